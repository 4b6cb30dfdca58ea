"""The demo's shapes on a CPU beside every other library that can do them here: ONNX Runtime, MLX, CPU_ATTN, torch.

    make .venv-vllm/.installed && .venv-vllm/bin/python -m pip install onnxruntime onnx 'mlx[cpu]'
    .venv-vllm/bin/python benchmarks/cpu/peers.py --json benchmarks/records/cpu/peers.json

Float32. Calls are interleaved one by one and the least time of each is taken; outputs are compared with ours. Among
them is a large product of matrices by torch (MKL): the share of its speed that the products of prefill reach.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.measure import geometric_mean, least_times
from tilewise.tools.bench.peers import OURS, PEERS, find, installed, tried
from tilewise.tools.bench.report import write_json
from tilewise.tools.workloads import WORKLOADS, make_inputs

APART = 1e-4  # of outputs, at most
# What ONNX Runtime's MultiHeadAttention can do of the encoder: rows that use all of their keys.
CASES = (*WORKLOADS, replace(WORKLOADS[0], name="minilm-unpadded", lengths=(), rows=8))
SIZE = 1536  # of the matrices
MATMUL = "matmul"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["sdpa", "onnxruntime", "mlx", "cpu-attn"])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each case")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    missing = {name: why for name, why in installed().items() if name in options.peers and why}
    for name, why in missing.items():
        print(f"{name}: {why}")
    names = [name for name in options.peers if name not in missing]
    found: list[dict[str, Any]] = []
    ratios: dict[str, list[float]] = {}
    shares: list[float] = []
    matrices = torch.randn(2, SIZE, SIZE)
    with torch.inference_mode():
        for case in CASES:
            x = make_inputs(case, torch.device("cpu"), torch.float32)
            calls: dict[str, Callable[[], Any]] = {OURS: x.attend}
            want, refused = x.attend(), {}
            for way in find(case, x, names):
                out, why = tried(way)
                if out is None or way.call is None:
                    refused[way.name] = why
                elif float((out - want).abs().max()) > APART:
                    refused[way.name] = f"its output is {float((out - want).abs().max()):.2g} away"
                else:
                    calls[way.name] = way.call
            times = least_times(calls | {MATMUL: lambda: matrices[0] @ matrices[1]}, options.seconds)
            print(f"{case.name}: {OURS} {1e3 * times[OURS]:.2f} ms", flush=True)
            for name in list(calls)[1:]:
                ratios.setdefault(name, []).append(times[name] / times[OURS])
                print(f"    {name:22} {1e3 * times[name]:9.2f} ms, {ratios[name][-1]:.2f}x")
            for name, why in refused.items():
                print(f"    {name:22} {why}")
            found.append({"case": case.name, "seconds": times, "refused": refused})
            if case.q_len > 1:
                cost = x.plan().cost
                assert cost is not None
                shares.append(cost.flops / times[OURS] / (2 * SIZE**3 / times[MATMUL]))
                found[-1]["share_of_matmul"] = shares[-1]
                print(f"    {shares[-1]:.0%} of the matmul's FLOP/s")
    means = {name: {"mean": geometric_mean(each), "least": min(each)} for name, each in ratios.items()}
    for name, mean in means.items():
        print(f"{name}: {mean['mean']:.2f}x on average, {mean['least']:.2f}x at least")
    print(f"prefill has {geometric_mean(shares):.0%} of the matmul's FLOP/s on average")
    if options.json:
        about = describe("python benchmarks/cpu/peers.py") | {
            "ratios": means,
            "share_of_matmul": geometric_mean(shares),
        }
        write_json(options.json, about | {"results": found})


if __name__ == "__main__":
    main()
