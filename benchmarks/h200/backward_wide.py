"""Times the backward kernels of wide heads (192/128, 256, 512), whole and by launch, beside other libraries'.

    python benchmarks/h200/backward_wide.py --peers FOLDER --json backward_wide.json

`--once 256` runs one backward pass of that head dim, 8k, full, for a profiler. Results are checked by
`backward_checks.py --wide`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from backward import BF16, Work, peers, timed, work
from timing import ceilings

from tilewise.backends.hopper.bwd.wide.launch import WideBound

# D, Dv, heads, KV heads, tokens in all, lengths
CELLS = [
    (256, 256, 8, 8, 16384, (16384, 4096, 1024)),
    (256, 256, 16, 4, 8192, (4096,)),
    (192, 128, 128, 128, 8192, (8192, 4096, 2048)),
    (512, 512, 4, 4, 16384, (16384, 4096)),
]
# What a variant changes in the specs of its launches.
VARIANTS: dict[int, dict[str, tuple[dict[str, Any], ...]]] = {
    256: {"late P": ({}, {"early_p": False})},
    192: {"lean": ({}, {"BI": 64, "lean": True, "u_stages": 2, "w_stages": 2})},
    512: {"dV by 64": ({}, {}, {"BI": 64, "u_stages": 4, "w_stages": 4})},
}


def bound_of(made: Work, changes: Any = ()) -> WideBound:
    bound = WideBound(made[0])
    if changes:
        bound.specs = tuple(replace(s, **changed) for s, changed in zip(bound.specs, changes, strict=True))
    return bound


def launches(bound: WideBound, tensors: Any) -> list[Callable[[], Any]]:
    """Each launch of a call by itself: what comes before, dQ, dK and dV, and what comes after."""
    bound(tensors)
    (steps,) = bound.ready.values()
    given = {name: x for name, x in bound.tensors(tensors).items() if x is not None}
    at = {name: x.data_ptr() for name, x in given.items()}
    bound.again(steps, at, tensors.dout.device)
    return [lambda s=step: (given, bound.again([s], at, tensors.dout.device)) for step in steps]


def inputs(D: int, Dv: int, H: int, Hkv: int, B: int, L: int) -> list[torch.Tensor]:
    sizes = ((H, D), (Hkv, D), (Hkv, Dv), (H, Dv))
    return [torch.randn(B, L, h, d, device="cuda", dtype=BF16) for h, d in sizes]


def compile_one(index: int, causal: bool, changes: Any) -> None:
    D, Dv, H, Hkv, *_ = CELLS[index]
    made = work(*inputs(D, Dv, H, Hkv, 1, 1024), "hopper", causal=causal)
    bound_of(made, changes)(made[1])
    torch.cuda.synchronize()


def compile_all(chosen: list[Any]) -> None:
    """In processes of their own, before anything is timed."""
    with ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(compile_one, index, causal, changes)
            for index, (D, *_) in enumerate(CELLS)
            if CELLS[index] in chosen
            for causal in (False, True)
            for changes in [(), *VARIANTS[D].values()]
        ]
        for job in jobs:
            job.result()


def cell(args: Any, D: int, Dv: int, H: int, Hkv: int, B: int, L: int, causal: bool) -> dict[str, Any]:
    q, k, v, dout = inputs(D, Dv, H, Hkv, B, L)
    ways = peers(args.peers, q, k, v, dout, causal)
    made = work(q, k, v, dout, "hopper", causal=causal)
    bounds = {"ours": bound_of(made)} | {name: bound_of(made, x) for name, x in VARIANTS[D].items()}
    ways |= {name: lambda b=bound: b(made[1]) for name, bound in bounds.items()}
    cells = B * H * (L * (L + 1) / 2 if causal else L * L)
    name = f"D{D}/{Dv} {H}/{Hkv} {L // 1024}k {'causal' if causal else 'full'}"
    row = timed(args, name, ways, 2 * (3 * D + 2 * Dv) * cells)
    row["by launch"] = {}
    for name, bound in bounds.items():
        parts = launches(bound, made[1])
        us = timed(args, f"    {name}", {str(n): run for n, run in enumerate(parts)}, 1e12)["us"]
        raw = [cells * 2 * products(D, Dv, s) / us[str(n + 1)] / 1e6 for n, s in enumerate(bound.specs)]
        row["by launch"][name] = {"us": [*us.values()], "raw TFLOPS": [round(x, 1) for x in raw]}
        print("   ", name, row["by launch"][name], flush=True)
    return row


def products(D: int, Dv: int, s: Any) -> int:
    """Multiplications for each cell."""
    return D + Dv if s.only == "v" else 2 * D + Dv if s.of_queries or s.only == "k" else 2 * (D + Dv)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", help="folder of peers_load.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.8, help="seconds a cell")
    parser.add_argument("--head-dims", default="256,192,512")
    parser.add_argument("--once", type=int, help="one backward pass of this head dim")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.once:
        D, Dv, H, Hkv, *_ = next(x for x in CELLS if x[0] == args.once)
        made = work(*inputs(D, Dv, H, Hkv, 1, 8192), "hopper")
        bound_of(made)(made[1])
        torch.cuda.synchronize()
        return
    start = time.perf_counter()
    chosen = [x for x in CELLS if str(x[0]) in args.head_dims.split(",")]
    compile_all(chosen)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    report: dict[str, Any] = {"device": "H200", "torch": torch.__version__, "ceilings": ceilings(), "rows": []}
    print(report["ceilings"])
    for D, Dv, H, Hkv, tokens, lengths in chosen:
        for L in lengths:
            for causal in (False, True):
                report["rows"].append(cell(args, D, Dv, H, Hkv, tokens // L, L, causal))
                if args.json:
                    args.json.write_text(json.dumps(report, indent=1) + "\n")
    for row in report["rows"]:
        print(row["work"].ljust(24), row["TFLOPS"])
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
