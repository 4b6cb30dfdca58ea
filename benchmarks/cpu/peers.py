"""The demo's shapes on a CPU beside every other library that can do them here: ONNX Runtime, MLX, CPU_ATTN, torch.

    pip install onnxruntime onnx 'mlx[cpu]'
    python benchmarks/cpu/peers.py --json benchmarks/records/cpu/peers.json

Float32. Calls are interleaved one by one and the least time of each is taken; outputs are compared with ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.measure import geometric_mean, least_times
from tilewise.tools.bench.peers import OURS, PEERS, find, installed, tried
from tilewise.tools.bench.report import write_json
from tilewise.tools.workloads import WORKLOADS, make_inputs

APART = 1e-4  # of outputs, at most


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
    with torch.inference_mode():
        for case in WORKLOADS:
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
            times = least_times(calls, options.seconds)
            print(f"{case.name}: {OURS} {1e3 * times[OURS]:.2f} ms", flush=True)
            for name in list(calls)[1:]:
                ratios.setdefault(name, []).append(times[name] / times[OURS])
                print(f"    {name:22} {1e3 * times[name]:9.2f} ms, {ratios[name][-1]:.2f}x")
            for name, why in refused.items():
                print(f"    {name:22} {why}")
            found.append({"case": case.name, "seconds": times, "refused": refused})
    means = {name: {"mean": geometric_mean(each), "least": min(each)} for name, each in ratios.items()}
    for name, mean in means.items():
        print(f"{name}: {mean['mean']:.2f}x on average, {mean['least']:.2f}x at least")
    if options.json:
        write_json(options.json, describe("python benchmarks/cpu/peers.py") | {"ratios": means, "results": found})


if __name__ == "__main__":
    main()
