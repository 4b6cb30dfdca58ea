"""Gradients with key and block indices, beside SDPA with the same cells as a mask, and our dense backward pass.

    python benchmarks/cpu/backward_sparse.py --json benchmarks/records/cpu/backward_sparse.json

Interleaved, the least time of many repeats. With `--threads 1` it is CPU time, which holds on a busy machine too; else
wall time. Queries choose at random, which is the worst case: neighbours choose different keys. All calls are causal.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import aligned, write_json

# `count` keys, or blocks of `block` keys, of each query or block of queries
CASES: list[dict[str, Any]] = [
    {"H": H, "Hkv": Hkv, "L": L, "D": D, "count": count, "block": block, "dtype": dtype}
    for H, Hkv, L, D, count, block in (
        (8, 2, 2048, 64, 4, 64),
        (16, 1, 2048, 128, 8, 32),
        (16, 1, 2048, 128, 128, 1),
        (8, 2, 2048, 64, 128, 1),
        (8, 8, 2048, 64, 128, 1),
    )
    for dtype in ("float32", "bfloat16")
]


def chosen(L: int, count: int, block: int) -> torch.Tensor:
    """Indices [1, ceil(L / block), count], among the blocks up to the query's own, which is one of them."""
    blocks = -(-L // block)
    scores = torch.rand(blocks, blocks).masked_fill(torch.ones(blocks, blocks).triu(1).bool(), -1.0)
    scores.fill_diagonal_(2.0)
    best = scores.topk(min(count, blocks), sorted=False)
    return torch.where(best.values < 0, -1, best.indices).int()[None]


def measure(case: dict[str, Any], seconds: float, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of each way."""
    H, Hkv, L, D, count, block = (case[name] for name in ("H", "Hkv", "L", "D", "count", "block"))
    dtype = getattr(torch, case["dtype"])
    q, k, v = (torch.randn(1, heads, L, D, dtype=dtype, requires_grad=True) for heads in (H, Hkv, Hkv))
    indices = chosen(L, count, block)
    given = {"key_indices": indices} if block == 1 else {"block_indices": indices, "block_size": block}
    cells = torch.zeros(indices.shape[1], indices.shape[1] + 1, dtype=torch.bool)
    cells.scatter_(1, indices[0].long() % (indices.shape[1] + 1), True)
    mask = cells[:, :-1].repeat_interleave(block, 0).repeat_interleave(block, 1)[:L, :L].tril()
    theirs = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    ours = tilewise.attention(q, k, v, causal=True, **given)
    torch.testing.assert_close(ours, theirs, atol=2e-2 if dtype == torch.bfloat16 else 1e-4, rtol=0.0)
    ways = {"SDPA, mask": theirs, "tilewise": ours, "tilewise, dense": tilewise.attention(q, k, v, causal=True)}
    dout = torch.randn_like(theirs)
    times: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["tilewise"]) < 3:
        for way, out in ways.items():
            start = clock()
            torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            times[way].append(clock() - start)
    least = {way: min(taken[1:]) * 1e3 for way, taken in times.items()}
    share = float(mask.sum()) / (L * (L + 1) / 2)
    return {**case, "visible": share, "ms": least, "speedup": least["SDPA, mask"] / least["tilewise"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each case")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rows, lines = [], [["", "visible", "SDPA ms", "tilewise ms", "dense ms", "times SDPA"]]
    for case in CASES:
        row = measure(case, options.seconds, clock)
        rows.append(row)
        words = " ".join(f"{name} {value}" for name, value in case.items())
        ms = [f"{x:.2f}" for x in row["ms"].values()]
        lines.append([words, f"{row['visible']:.1%}", *ms, f"{row['speedup']:.2f}"])
        print(*lines[-1], flush=True)
    print("\n".join(aligned(lines)))
    if options.json:
        how = {"threads": options.threads, "clock": "CPU" if options.threads == 1 else "wall"}
        write_json(options.json, describe(shlex.join(["python", *sys.argv])) | how | {"rows": rows})


if __name__ == "__main__":
    main()
