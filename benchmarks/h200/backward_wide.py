"""Checks and times the backward kernels of wide heads (192/128, 256, 512), whole and by launch, beside other ones.

    python benchmarks/h200/backward_wide.py --peers FOLDER --json backward_wide.json

Kernels are compiled by processes of their own, and some cases are checked by others meanwhile; all cases are checked by
`backward_checks.py --wide`. `--once 256` runs one backward pass of that head dim, 8k, full, for a profiler.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from backward import BF16, Work, peers, timed, unpack_peers, work
from backward_checks import check, repeats
from timing import ceilings, kernels_alone

from tilewise.backends.gpu.target import nvidia
from tilewise.backends.hopper.bwd.wide.launch import WideLauncher
from tilewise.testing.case import Case

# D, Dv, heads, KV heads, tokens in all, lengths
CELLS = [
    (192, 128, 128, 128, 8192, (8192, 4096, 2048)),
    (256, 256, 8, 8, 16384, (16384, 4096)),
    (512, 512, 4, 4, 16384, (4096, 16384)),
    (256, 256, 16, 4, 8192, (4096,)),
    (256, 256, 8, 8, 16384, (1024,)),
]
PLANES = {192: (4, 8, 16), 256: (2, 4, 8), 512: (2, 4)}  # at once, of causal calls, beside as many as are chosen
# By head dim: whether they are timed with causal calls or with full ones, and what variants change in their launches.
VARIANTS: dict[int, tuple[bool, dict[str, tuple[dict[str, Any], ...]]]] = {
    256: (False, {}),
    192: (True, {"32 rows": ({}, {"BI": 32, "u_stages": 3, "w_stages": 3})}),
    512: (False, {"dV by 32": ({}, {}, {"BI": 32, "u_stages": 7, "w_stages": 8})}),
}
LARGE, LATENT, FULL = {"D": 512}, {"D": 192, "Dv": 128}, {"D": 256}
CHECKS = [
    Case(B=1, H=4, Hkv=2, Lq=500, causal=True, sinks=True, dtype="bf16", **LARGE),
    Case(B=2, H=2, Lq=300, Lk=401, lengths=(401, 77), dtype="f16", **LARGE),
    Case(B=2, H=2, form="varlen", q_lengths=(129, 300), lengths=(129, 401), window=(90, 10), dtype="bf16", **LARGE),
    Case(B=2, H=4, Hkv=2, Lq=700, causal=True, dtype="bf16", **LATENT),
    Case(B=3, H=2, form="varlen", q_lengths=(129, 1, 300), lengths=(129, 64, 401), causal=True, dtype="f16", **LATENT),
    Case(B=1, H=4, Hkv=2, Lq=500, causal=True, softcap=30.0, dtype="bf16", **FULL),
    Case(B=1, H=2, Lq=300, window=(100, None), softcap=30.0, dtype="f16", **LATENT),
    Case(B=1, H=2, Lq=300, softcap=30.0, dtype="bf16", **LARGE),
]  # fmt: skip


def launcher_of(made: Work, changes: Any = (), planes: int = 0) -> WideLauncher:
    launcher = WideLauncher(made[0].problem, nvidia(90), planes)
    if changes:
        launcher.specs = tuple(replace(s, **changed) for s, changed in zip(launcher.specs, changes, strict=True))
    return launcher


def variants(D: int, causal: bool) -> dict[str, Any]:
    return VARIANTS[D][1] if causal == VARIANTS[D][0] else {}


def launches(launcher: WideLauncher, tensors: Any) -> list[Callable[[], Any]]:
    """Each launch of a call by itself: what comes before, dQ, dK and dV, and what comes after."""
    return [kernel.run for kernel in kernels_alone(launcher, tensors)]


def inputs(D: int, Dv: int, H: int, Hkv: int, B: int, L: int) -> list[torch.Tensor]:
    sizes = ((H, D), (Hkv, D), (Hkv, Dv), (H, Dv))
    return [torch.randn(B, L, h, d, device="cuda", dtype=BF16) for h, d in sizes]


def compile_one(D: int, Dv: int, causal: bool, changes: Any) -> None:
    made = work(*inputs(D, Dv, 4, 4, 1, 1024), "hopper", causal=causal)
    launcher_of(made, changes)(made[1])
    torch.cuda.synchronize()


def check_one(case: Case, count: int) -> dict[str, Any]:
    return check(case) | (repeats(case, count) if count else {})


def compile_and_check(
    chosen: list[Any], count: int, limit: float, folder: str | None, plain: bool
) -> tuple[list[Any], set[int]]:
    """What the checks say, and head dims that cannot be timed; what takes longer than `limit` seconds has failed."""
    pool = ProcessPoolExecutor(17, multiprocessing.get_context("spawn"))
    unpacked = [pool.submit(unpack_peers, folder)] if folder else []
    compiled = [
        (pool.submit(compile_one, D, Dv, causal, changes), D)
        for D, Dv in dict.fromkeys(x[:2] for x in chosen)
        for causal in (False, True)
        for changes in [(), *([] if plain else variants(D, causal).values())]
    ]
    checked = [] if plain else [case for case in CHECKS if case.D in [x[0] for x in chosen]]
    checks = [pool.submit(check_one, case, count) for case in checked]
    end = time.perf_counter() + limit

    def result(job: Any) -> Any:
        try:
            return job.result(timeout=max(0.1, end - time.perf_counter()))
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {str(error)[-500:]}"}

    failed = {D for job, D in compiled if result(job) is not None}
    found = [result(job) for job in checks]
    for job in unpacked:
        result(job)
    pool.shutdown(wait=False, cancel_futures=True)
    return found, failed


def cell(args: Any, D: int, Dv: int, H: int, Hkv: int, B: int, L: int, causal: bool) -> dict[str, Any]:
    q, k, v, dout = inputs(D, Dv, H, Hkv, B, L)
    ways = peers(args.peers, q, k, v, dout, causal, ("fa3x",)) if D <= 256 else {}
    made = work(q, k, v, dout, "hopper", causal=causal)
    launchers = {"ours": launcher_of(made)}
    if not args.unchecked:
        launchers |= {name: launcher_of(made, x) for name, x in variants(D, causal).items()}
    for planes in PLANES[D] if causal and not args.unchecked else ():
        if planes <= Hkv * B:
            launchers[f"{planes} planes"] = launcher_of(made, planes=planes)
    ways |= {name: lambda b=launcher: b(made[1]) for name, launcher in launchers.items()}
    cells = B * H * (L * (L + 1) / 2 if causal else L * L)
    name = f"D{D}/{Dv} {H}/{Hkv} {L // 1024}k {'causal' if causal else 'full'}"
    row = timed(args, name, ways, 2 * (3 * D + 2 * Dv) * cells)
    if args.unchecked:
        return row
    parts = launches(launchers["ours"], made[1])
    row["us by launch"] = us = list(timed(args, "    by launch", dict(enumerate(parts)), 1e12)["us"].values())
    raw = [cells * 2 * products(D, Dv, s) / us[n + 1] / 1e6 for n, s in enumerate(launchers["ours"].specs)]
    row["raw TFLOPS"] = [round(x, 1) for x in raw]
    print("   ", row["us by launch"], row["raw TFLOPS"], flush=True)
    return row


def products(D: int, Dv: int, s: Any) -> int:
    """Multiplications for each cell."""
    return D + Dv if s.only == "v" else 2 * D + Dv if s.of_queries or s.only == "k" else 2 * (D + Dv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", help="folder of peers_load.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds a cell")
    parser.add_argument("--repeats", type=int, default=200, help="of each check")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds for compiling and checks")
    parser.add_argument("--most", type=float, default=600.0, help="seconds after which no cell begins")
    parser.add_argument("--head-dims", default="256,192,512")
    parser.add_argument("--unchecked", action="store_true", help="no checks, no variants, no launches by themselves")
    parser.add_argument("--once", type=int, help="one backward pass of this head dim")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chosen = [x for x in CELLS if str(x[0]) in args.head_dims.split(",")]
    if args.once:
        D, Dv, H, Hkv, *_ = next(x for x in CELLS if x[0] == args.once)
        made = work(*inputs(D, Dv, H, Hkv, 1, 8192), "hopper")
        launcher_of(made)(made[1])
        torch.cuda.synchronize()
        return
    start = time.perf_counter()
    report: dict[str, Any] = {"device": "H200", "torch": torch.__version__, "rows": []}
    report["checks"], failed = compile_and_check(chosen, args.repeats, args.limit, args.peers, args.unchecked)
    print(
        *report["checks"],
        f"not compiled: {failed}; compiled and checked in {time.perf_counter() - start:.0f} s",
        sep="\n",
        flush=True,
    )
    report["ceilings"] = ceilings()
    print(report["ceilings"])
    for D, Dv, H, Hkv, tokens, lengths in chosen:
        for L in lengths if D not in failed else ():
            for causal in (False, True):
                if time.perf_counter() - start > args.most:
                    print(f"D{D} {L} {causal}: out of time", flush=True)
                    continue
                report["rows"].append(cell(args, D, Dv, H, Hkv, tokens // L, L, causal))
                if args.json:
                    args.json.write_text(json.dumps(report, indent=1) + "\n")
                torch.cuda.empty_cache()
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    os._exit(0)  # processes that hang are not waited for


if __name__ == "__main__":
    main()
