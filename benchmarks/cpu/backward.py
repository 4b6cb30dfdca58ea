"""The backward pass beside that of SDPA: interleaved, the least time of many repeats.

    python benchmarks/cpu/backward.py --json benchmarks/records/cpu/backward.json

With `--threads 1` it is CPU time, which holds on a busy machine too; else wall time. With `--peaks` it ends with what
one core can do in bf16: VDPBF16PS over registers, our products from the first-level cache, and torch's matmul.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.backends.cpu.codegen.bf16_dot import dot_pairs, has_bf16
from tilewise.backends.cpu.codegen.vector import Emit, Value, W, microkernel
from tilewise.backends.cpu.gemm.backward import gemm_rows_bf16
from tilewise.backends.cpu.gemm.fp32 import KEYS, PANEL
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import aligned, write_json

HEADS = 8
CASES: list[dict[str, Any]] = [
    {"dtype": dtype, "D": D, "L": L, "causal": causal}
    for dtype in ("float32", "bfloat16", "float16")
    for D in (64, 128)
    for L in (512, 2048)
    for causal in (False, True)
    if dtype != "float16" or L == 512  # SDPA would take seconds
]
CASES.append({"dtype": "float32", "D": 64, "L": 4096, "causal": True, "window": 512, "heads": 2})


def measure(case: dict[str, Any], seconds: float, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of both, and how many times as fast ours is."""
    L, D, causal, window = case["L"], case["D"], case["causal"], case.get("window")
    shape, dtype = (1, case.get("heads", HEADS), L, D), getattr(torch, case["dtype"])
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    options: dict[str, Any] = {"is_causal": causal}
    if window:
        near = torch.ones(L, L, dtype=torch.bool).tril().triu(1 - window)
        options = {"attn_mask": near}
    theirs = scaled_dot_product_attention(q, k, v, **options)
    dout = torch.randn_like(theirs)
    ours = tilewise.attention(q, k, v, causal=causal, window=window and (window - 1, 0))
    ways = {"SDPA": theirs, "tilewise": ours}
    times: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["SDPA"]) < 3:
        for way, out in ways.items():
            start = clock()
            torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            times[way].append(clock() - start)
    least = {way: min(taken[1:]) * 1e3 for way, taken in times.items()}
    cells = shape[1] * sum(min(i + 1, window or L) if causal else L for i in range(L))
    speeds = {way: 10 * D * cells / ms / 1e6 for way, ms in least.items()}  # five products of 2 D for a visible cell
    ratio = least["SDPA"] / least["tilewise"]
    return {**case, "repeats": len(times["SDPA"]), "ms": least, "GFLOP/s": speeds, "speedup": ratio}


SUMS, DEPTH = KEYS * PANEL // W, 64


@microkernel("iii")
def dots_in_registers(e: Emit, x: Value, to: Value, times: Value) -> None:
    a, b = e.load(x), e.load(x, W)
    sums = [e.var(e.zeros) for _ in range(SUMS)]
    with e.loop(times):
        for total in sums:
            total.set(dot_pairs(e, a, b, total.get()))
    for i, total in enumerate(sums):
        e.store(total.get(), to, i * W)


def peaks() -> dict[str, float]:
    """GFLOP/s of one core in bf16."""
    gemm = gemm_rows_bf16[-1]
    in_registers = njit(nogil=True)(lambda a, b, c, times: dots_in_registers(a, c, times))

    @njit(nogil=True)
    def in_cache(a, b, c, times):  # type: ignore[no-untyped-def]
        for _ in range(times):
            gemm(a, DEPTH, b, PANEL, c, PANEL, DEPTH, 0)

    memory = [np.zeros(1 << 14, np.float32) for _ in range(3)]
    places, square = [x.ctypes.data // 64 * 64 + 64 for x in memory], torch.randn(1024, 1024).bfloat16()
    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "registers": (lambda: in_registers(*places, 20_000), 20_000 * SUMS * 4 * W),
        "first-level cache": (lambda: in_cache(*places, 400), 400 * 4 * KEYS * PANEL * DEPTH),
        "torch matmul": (lambda: square @ square, 2 * 1024**3),
    }
    found: dict[str, float] = {}
    for name, (call, operations) in ways.items():
        call()
        for _ in range(40):
            start = time.thread_time()
            call()
            found[name] = max(found.get(name, 0.0), operations / (time.thread_time() - start) / 1e9)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peaks", action="store_true", help="of one core in bf16; with --threads 1")
    parser.add_argument("--only", choices=("float32", "bfloat16", "float16"), help="this dtype alone")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    if options.peaks and (options.threads != 1 or not has_bf16()):
        parser.error("--peaks: of one thread, --threads 1, on a processor with AVX-512 BF16")
    rows, lines = [], [["", "SDPA ms", "tilewise ms", "times", "GFLOP/s"]]
    for case in CASES if options.only is None else [case for case in CASES if case["dtype"] == options.only]:
        rows.append(measure(case, options.seconds, clock))
        words = " ".join(f"{name} {value}" for name, value in case.items())
        ms = rows[-1]["ms"]
        speeds = " and ".join(f"{x:.0f}" for x in rows[-1]["GFLOP/s"].values())
        lines.append([words, f"{ms['SDPA']:.2f}", f"{ms['tilewise']:.2f}", f"{rows[-1]['speedup']:.2f}", speeds])
        print(*lines[-1], flush=True)
    plain = [row for row in rows if "window" not in row]
    means = {
        t: math.exp(sum(math.log(row["speedup"]) for row in found) / len(found))
        for t in ("float32", "bfloat16", "float16")
        if (found := [row for row in plain if row["dtype"] == t])
    }
    print("\n".join(aligned(lines)))
    print("geometric means", {name: round(x, 2) for name, x in means.items()})
    limits = {"bf16 peaks, GFLOP/s": peaks()} if options.peaks else {}
    print(limits or "")
    if options.json:
        how = {"threads": options.threads, "clock": "CPU" if options.threads == 1 else "wall"}
        about = describe(shlex.join(["python", *sys.argv]))
        write_json(options.json, about | how | limits | {"means": means, "rows": rows})


if __name__ == "__main__":
    main()
