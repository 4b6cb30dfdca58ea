"""Prefill in bf16 beside SDPA, torch's bf16 matmul and, where it is installed, OpenVINO.

python benchmarks/cpu/prefill_bf16.py --json benchmarks/records/cpu/prefill_bf16.json
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.measure import interleaved
from tilewise.tools.bench.report import write_json

SIZES = ((8, 2048, 64), (32, 1024, 128), (8, 2048, 128), (4, 2048, 256), (96, 256, 32))  # heads, tokens, head dim
MATMUL = 2048


def openvino(heads: int, length: int, width: int, causal: bool) -> Callable[..., Any] | None:
    if importlib.util.find_spec("openvino") is None:
        return None
    import openvino as ov
    from openvino import opset13 as ops

    given = [ops.parameter([1, heads, length, width], ov.Type.bf16) for _ in range(3)]
    model = ov.Model([ops.scaled_dot_product_attention(*given, causal=causal)], given)
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    request = compiled.create_infer_request()

    def run(*tensors: torch.Tensor) -> Any:
        own = [ov.Tensor(x.view(torch.int16).numpy(), list(x.shape), ov.Type.bf16) for x in tensors]
        return request.infer(own, share_inputs=True)

    return run


def row(heads: int, length: int, width: int, causal: bool, seconds: float) -> dict[str, Any]:
    """Milliseconds of each, and the share of matmul's FLOP/s that our visible cells take."""
    q, k, v = torch.randn(3, 1, heads, length, width).bfloat16().unbind(0)
    a = torch.randn(MATMUL, MATMUL).bfloat16()
    calls: dict[str, Callable[[], Any]] = {
        "tilewise": lambda: tilewise.attention(q, k, v, causal=causal, backend="cpu"),
        "SDPA": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal),
        "matmul": lambda: a @ a,
    }
    peer = openvino(heads, length, width, causal)
    if peer is not None:
        calls["OpenVINO"] = lambda: peer(q, k, v)
    exact = scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=causal)
    errors = {name: float((calls[name]().double() - exact).abs().max()) for name in ("tilewise", "SDPA")}
    found = dict(zip(calls, interleaved(list(calls.values()), seconds), strict=True))
    ms = {name: 1e3 * timing.seconds for name, timing in found.items()}
    cells = length * (length + 1) / 2 if causal else length**2
    flops = 4 * heads * width * cells
    share = flops / ms["tilewise"] / (2 * MATMUL**3 / ms["matmul"])
    name = f"{heads} x {length}, D {width}{', causal' * causal}"
    ratios = {peer: ms[peer] / ms["tilewise"] for peer in ms if peer not in ("tilewise", "matmul")}
    print(f"{name:28}", *(f"{n} {t:7.2f} ms" for n, t in ms.items()), f"{share:.0%} of matmul", flush=True)
    return {"name": name, "ms": ms, "ratios": ratios, "of_matmul": share, "errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each row")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    rows = [row(*size, causal, given.seconds) for size in SIZES for causal in (False, True)]
    means = {peer: math.exp(sum(math.log(r["ratios"][peer]) for r in rows) / len(rows)) for peer in rows[0]["ratios"]}
    for peer, mean in means.items():
        print(f"{mean:.2f}x of {peer}, geometric mean; least {min(r['ratios'][peer] for r in rows):.2f}x")
    if given.json:
        about = describe("python benchmarks/cpu/prefill_bf16.py")
        write_json(given.json, {**about, "rows": rows, "geometric_means": means})


if __name__ == "__main__":
    main()
