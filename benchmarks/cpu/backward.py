"""The backward pass beside that of SDPA: interleaved, the least time of many repeats.

    python benchmarks/cpu/backward.py --json benchmarks/records/cpu/backward.json

With `--threads 1` it is CPU time, which holds on a busy machine too; else wall time.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import tilewise
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
    return {**case, "repeats": len(times["SDPA"]), "ms": least, "speedup": least["SDPA"] / least["tilewise"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rows, lines = [], [["", "SDPA ms", "tilewise ms", "times"]]
    for case in CASES:
        rows.append(measure(case, options.seconds, clock))
        words = " ".join(f"{name} {value}" for name, value in case.items())
        ms = rows[-1]["ms"]
        lines.append([words, f"{ms['SDPA']:.2f}", f"{ms['tilewise']:.2f}", f"{rows[-1]['speedup']:.2f}"])
        print(*lines[-1], flush=True)
    plain = [row for row in rows if "window" not in row]
    means = {
        t: math.exp(sum(math.log(row["speedup"]) for row in found) / len(found))
        for t in ("float32", "bfloat16", "float16")
        if (found := [row for row in plain if row["dtype"] == t])
    }
    print("\n".join(aligned(lines)))
    print("geometric means", {name: round(x, 2) for name, x in means.items()})
    if options.json:
        how = {"threads": options.threads, "clock": "CPU" if options.threads == 1 else "wall"}
        about = describe(f"python benchmarks/cpu/backward.py --threads {options.threads}")
        write_json(options.json, about | how | {"means": means, "rows": rows})


if __name__ == "__main__":
    main()
