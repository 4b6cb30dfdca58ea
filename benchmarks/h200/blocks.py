"""`block_indices` on a Hopper GPU: 10% of the blocks at 16k, by lists of tiles (Hopper) and by gathers (Triton).

    python benchmarks/h200/blocks.py --json blocks.json

The conformance suite's cases with block indices are checked first, by both backends where they serve them. Each call is
checked against plain torch over the chosen blocks, too. Then all ways are interleaved in CUDA graphs. A share is how
much of the dense call's speed is left for each cell that is computed: dense time times the share of blocks, over the
time of the call.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from timing import ceilings, graphed, seconds

from hopper import inputs
from tilewise import attention
from tilewise.dispatch import planner
from tilewise.testing.case import Case, make
from tilewise.testing.cases import INDICES
from tilewise.testing.check import check_case

L, BATCH, HEADS = 16384, 1, 16
# name: head dim, block, share of blocks, options
WORKS: dict[str, tuple[int, int, float, dict[str, Any]]] = {
    "D128, blocks of 128": (128, 128, 0.1, {}),
    "D128, blocks of 128, causal": (128, 128, 0.1, {"causal": True}),
    "D64, blocks of 128": (64, 128, 0.1, {}),
    "D128, blocks of 256": (128, 256, 0.1, {}),
    "D128, blocks of 64 (Triton)": (128, 64, 0.1, {}),
    "D128, blocks of 128, half": (128, 128, 0.5, {}),
}


def chosen(block: int, share: float, causal: bool) -> torch.Tensor:
    """So many blocks of each row, its own among them: int32 [B, L / block, n]; under a causal rule of its past."""
    count = L // block
    scores = torch.rand(BATCH, count, count, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    scores.diagonal(dim1=1, dim2=2).fill_(2)
    n = max(1, round(share * count))
    if not causal:
        return scores.topk(n, 2).indices.int()
    past = torch.arange(count, device="cuda")
    scores = scores.masked_fill(past > past[:, None], -1)
    values, best = scores.topk(n, 2)
    return torch.where(values < 0, -1, best).int()


def call_of(name: str, backend: str | None) -> tuple[Any, Any, torch.Tensor, tuple[Any, ...]]:
    D, block, share, options = WORKS[name]
    given = inputs(BATCH, HEADS, HEADS, L, D, "bhld")
    blocks = chosen(block, share, bool(options.get("causal")))
    sparse = lambda: attention(*given, block_indices=blocks, block_size=block, backend=backend, **options)  # noqa: E731
    dense = lambda: attention(*given, **options)  # noqa: E731
    return sparse, dense, blocks, given


def check(name: str, out: torch.Tensor, blocks: torch.Tensor, given: tuple[Any, ...]) -> float:
    """The largest error of some blocks of queries, against torch in float32 over the keys that they choose."""
    D, block, _, options = WORKS[name]
    q, k, v = (x.float() for x in given)
    worst = 0.0
    for row in (0, 1, L // block // 2, L // block - 1):
        mine = blocks[0, row][blocks[0, row] >= 0].long()
        keys = (mine[:, None] * block + torch.arange(block, device="cuda")).flatten()
        rows = torch.arange(row * block, (row + 1) * block, device="cuda")
        s = q[0, :, rows] @ k[0, :, keys].mT * D**-0.5
        if options.get("causal"):
            s = s.masked_fill(keys > rows[:, None], -torch.inf)
        worst = max(worst, float((s.softmax(-1) @ v[0, :, keys] - out[0, :, rows].float()).abs().max()))
    return worst


def conforming() -> list[tuple[Case, str]]:
    """Cases of the suite with block indices, by each backend that serves them."""
    listed = [(case, backend) for case in INDICES if case.block > 1 for backend in ("hopper", "triton")]
    served = lambda case, backend: planner.load(backend).supports(make(case, "cuda").checked().problem) is None  # noqa: E731
    return [(case, backend) for case, backend in listed if served(case, backend)]


def compiled(job: tuple[Any, str]) -> Any:
    """Compiles a work's kernels in a process of its own, or checks a case; Triton keeps kernels on disk."""
    name, backend = job
    if isinstance(name, Case):
        verdict = check_case(name, backend, "cuda")
        return f"{verdict.error / max(verdict.bound, 1e-30):.2f} of the bound by {backend}: {name}"
    sparse, dense, *_ = call_of(name, backend)
    sparse()
    dense()
    return name


def backends(block: int) -> tuple[str, ...]:
    return ("hopper", "triton") if block % 128 == 0 else ("triton",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--checks", action="store_true", help="no times, only the suite's cases")
    args = parser.parse_args()
    jobs: list[tuple[Any, str]] = [(name, backend) for name, work in WORKS.items() for backend in backends(work[1])]
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        for text in pool.map(compiled, [*conforming(), *([] if args.checks else jobs)]):
            print(text, flush=True)
    if args.checks:
        return
    rows = []
    for name, (_, block, _, options) in WORKS.items():
        ways: dict[str, Any] = {}
        for backend in backends(block):
            sparse, dense, blocks, given = call_of(name, backend)
            error = check(name, sparse(), blocks, given)
            assert error < 0.02, f"{name}, {backend}: off by {error:.2g}"
            for _ in range(3):
                assert torch.equal(sparse(), sparse())
            ways |= {backend: sparse, "dense": dense}
        taken = seconds({way: graphed([run]) for way, run in ways.items()}, args.rounds, 2.0)
        count = L // block
        cells = float((blocks >= 0).sum()) / blocks.shape[1]  # blocks of a row
        if options.get("causal"):
            cells = 2 * (cells - 0.5) * count / (count + 1)  # of half of them: the diagonal counts half
        work = cells / count
        row = {way: round(taken["dense"] * work / t, 3) for way, t in taken.items() if way != "dense"}
        rows.append({"work": name, "us": {way: round(1e6 * t, 1) for way, t in taken.items()}, "share of dense": row})
    for each in rows:
        print(each["work"].ljust(32), each["us"], "of dense speed:", each["share of dense"], flush=True)
    if args.json:
        about = f"bf16, batch {BATCH}, {HEADS} heads, {L} queries and keys"
        report = {"device": "H200", "about": about, "ceilings": ceilings(), "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
