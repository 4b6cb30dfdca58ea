"""Additive masks and their gradients by the Hopper backward kernels: checks, then times beside SDPA and Triton's.

    python benchmarks/h200/backward_mask.py --json backward_mask.json

Kernels are compiled by processes of their own, which check them: against the oracle, with NaN in hidden places and in
the gradients before, on odd sizes, and for the same bits again. Then all ways of a row take turns; Hopper's gradients
are compared with Triton's first. `--once "[1, 1]"` runs one backward pass of a row, for a profiler.
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
from backward_checks import check, repeats
from backward_triton import PLANE, Row, flops, made_of, sdpa, whole_pass
from timing import ceilings, kernels_alone, seconds

from tilewise.backends.gpu.target import nvidia
from tilewise.backends.hopper.bwd import config
from tilewise.backends.hopper.bwd.narrow_launch import NarrowLauncher
from tilewise.dispatch import planner
from tilewise.testing.case import Case

# Mask of 16k tokens in all, and how many times SDPA's speed is wanted.
ROWS: dict[str, tuple[Row, float]] = {
    "[1, 1]": (Row(64, 2048, {}, H=16, mask=(1, 1, *PLANE)), 4.0),
    "dense": (Row(64, 2048, {}, H=16, mask=(8, 16, *PLANE)), 3.0),
    "[1, 1] f32": (Row(64, 2048, {}, H=16, mask=(1, 1, *PLANE), mask_dtype=torch.float32), 0.0),
    "dense f32": (Row(64, 2048, {}, H=16, mask=(8, 16, *PLANE), mask_dtype=torch.float32), 0.0),
    "[1, H]": (Row(64, 2048, {}, H=16, mask=(1, 16, *PLANE)), 0.0),
    "[1, 1] D128": (Row(128, 2048, {}, H=16, mask=(1, 1, *PLANE)), 0.0),
    "no mask": (Row(64, 2048, {}, H=16), 0.0),
    "dense D128": (Row(128, 2048, {}, H=16, mask=(8, 16, *PLANE)), 0.0),
}
BY_TRITON = ("[1, 1]", "dense", "[1, 1] f32", "dense f32")  # also computed by Triton's kernels
BF16, F16, F32 = ({"dtype": q, "mask_kind": m} for q, m in (("bf16", "bf16"), ("f16", "f16"), ("bf16", "f32")))
CHECKS = [
    Case(B=2, H=4, Lq=512, D=64, mask="bhqk", **BF16),
    Case(B=2, H=2, Lq=700, Lk=904, D=64, mask="bhqk", pattern="rows", causal=True, sinks=True, **F16),
    Case(B=2, H=2, Hkv=1, Lq=300, Lk=501, D=64, mask="bhqk", **BF16),
    Case(B=3, H=2, Lq=500, Lk=504, D=128, mask="bhqk", lengths=(500, 0, 257), **BF16),
    Case(B=1, H=2, Lq=640, D=128, mask="bhqk", window=(130, 70), **F16),
    Case(B=1, H=2, Lq=300, D=64, mask="bhqk", softcap=30.0, causal=True, **BF16),
    Case(B=1, H=2, Lq=300, D=64, mask="bhqk", pattern="least", **F32),
    Case(B=3, H=4, Hkv=2, Lq=700, Lk=904, D=64, mask="qk", pattern="rows", **BF16),
    Case(B=3, H=4, Lq=700, D=64, mask="hqk", causal=True, sinks=True, **F16),
    Case(B=3, H=4, Lq=600, Lk=333, D=128, mask="b1qk", window=(200, 90), **BF16),
    Case(B=2, H=4, Hkv=2, Lq=500, D=128, mask="qk", softcap=30.0, **BF16),
    Case(B=2, H=4, Lq=300, D=64, mask="qk", pattern="least", **F32),
    Case(B=2, H=2, Lq=260, D=40, mask="hqk", pattern="least", **F16),
    Case(B=4, H=8, Lq=1600, D=64, mask="qk", pattern="rows", **BF16),
    Case(B=2, H=16, Hkv=4, Lq=1500, D=128, mask="hqk", causal=True, **F16),
]
REPEATED = (0, 1, 3, 4, 7, 8, 10, 13, 14)  # of CHECKS


# Ways of Hopper's kernels beside the chosen one: what they change of its spec.
HOWS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "hopper": lambda s: {},
    "other programs": lambda s: {"persistent": not s.persistent},
}
PLANES = {f"{n} planes": n for n in (4, 12, 24)}  # at once; the same kernels


def launcher_of(made: Any, how: str = "hopper") -> NarrowLauncher:
    chosen = config.spec_of
    change = HOWS.get(how, HOWS["hopper"])
    config.spec_of = lambda p, target: replace(chosen(p, target), **change(chosen(p, target)))
    launcher = NarrowLauncher(planner.choose(made.problem, "hopper").problem, nvidia(90), PLANES.get(how, 0))
    config.spec_of = chosen
    return launcher


def hows(name: str) -> tuple[str, ...]:
    """The ways of Hopper's kernels for a row."""
    more = {
        "[1, 1]": tuple(PLANES),
        "dense": ("other programs", *PLANES),
    }
    return ("hopper", *more.get(name, ()))


def compile_one(name: str, how: str) -> None:
    made = made_of(ROWS[name][0])[1]
    way = whole_pass(made) if how == "triton" else lambda: launcher_of(made, how)(made.tensors)
    way()
    torch.cuda.synchronize()


def check_one(case: Case, count: int) -> dict[str, Any]:
    return check(case) | (repeats(case, count) if count else {})


def compile_and_check(names: list[str], count: int, limit: float) -> tuple[list[Any], list[Any]]:
    """What the checks say, and what was not compiled; what takes longer than `limit` seconds has failed."""
    pool = ProcessPoolExecutor(15, multiprocessing.get_context("spawn"))
    jobs = [
        pool.submit(compile_one, name, how)
        for name in names
        for how in (*hows(name), "triton")
        if (how != "triton" or name in BY_TRITON) and how not in PLANES
    ]
    checks = [pool.submit(check_one, case, count * (n in REPEATED)) for n, case in enumerate(CHECKS)]
    end = time.perf_counter() + limit

    def result(job: Any) -> Any:
        try:
            return job.result(timeout=max(0.1, end - time.perf_counter()))
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[-500:]}"}

    found = [result(job) for job in checks]
    failed = [x for x in map(result, jobs) if x is not None]
    pool.shutdown(wait=False, cancel_futures=True)
    return found, failed


def gradients(made: Any, run: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """Copies of all gradients, whose memory held NaN before."""
    found = made.tensors.gradients()
    for x in found.values():
        x.fill_(float("nan"))
    run()
    return {name: x.clone() for name, x in found.items()}


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative RMS of what two ways differ by."""
    return {
        name: float(f"{((x.float() - b[name].float()).norm() / b[name].float().norm()).item():.2g}")
        for name, x in a.items()
    }


def launches(launcher: NarrowLauncher, tensors: Any) -> dict[str, Callable[[], Any]]:
    """Each launch of a call by itself."""
    runs = [kernel.run for kernel in kernels_alone(launcher, tensors)]
    dq, sums = ["dQ"] * (not launcher.spec.converts), ["mask's sums"] * config.sums_mask(launcher.problem)
    names = ("statistics", "backward", *dq, *sums, *["fix-up"] * launcher.spec.guarded)
    parts: dict[str, Callable[[], Any]] = dict(zip(names, runs, strict=True))
    parts["backward"] = lambda: (runs[0](), runs[1]())  # without the first, its counter says that all is done
    return parts


def times(launcher: NarrowLauncher, made: Any, args: Any) -> dict[str, float]:
    """Microseconds of each launch."""
    parts = seconds(launches(launcher, made.tensors), args.rounds, args.budget / 3)
    parts["backward"] -= parts["statistics"]
    return {part: round(1e6 * t, 1) for part, t in parts.items()}


def timed(name: str, args: Any) -> dict[str, Any]:
    row, wanted = ROWS[name]
    given, made, dout = made_of(row)
    launchers = {how: launcher_of(made, how) for how in hows(name)}
    ways: dict[str, Any] = {way: lambda b=launcher: b(made.tensors) for way, launcher in launchers.items()}
    known = gradients(made, ways["hopper"])
    if name in BY_TRITON:
        ways["triton"] = whole_pass(made)
        known = gradients(made, ways["triton"])
    differs = {way: apart(gradients(made, ways[way]), known) for way in launchers}
    del known
    peer = sdpa(given, dout, made) if row.mask_dtype == torch.bfloat16 else None  # SDPA takes one of q's type
    if peer is not None:
        ways["sdpa"] = peer
    taken = seconds(ways, args.rounds, args.budget)
    parts = {how: times(launcher, made, args) for how, launcher in launchers.items() if how not in PLANES}
    rates = {way: round(flops(made, 1.0) / t / 1e12, 1) for way, t in taken.items()}
    best = rates["hopper"] / rates["sdpa"] if "sdpa" in rates else None
    return {
        "row": name,
        "us": {way: round(1e6 * t, 1) for way, t in taken.items()},
        "TFLOPS": rates,
        "us by launch": parts,
        "apart from triton" if name in BY_TRITON else "apart from hopper": differs,
        "of sdpa": best and round(best, 2),
        "wanted": wanted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds a row")
    parser.add_argument("--repeats", type=int, default=200, help="of some checks")
    parser.add_argument("--limit", type=float, default=55.0, help="seconds for compiling and checks")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--without", nargs="*", default=(), help="no rows whose name holds one of these")
    parser.add_argument("--once", choices=ROWS, help="one backward pass of this row")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.once:
        made = made_of(ROWS[args.once][0])[1]
        launcher_of(made)(made.tensors)
        torch.cuda.synchronize()
        return
    start = time.perf_counter()
    names = [name for name in ROWS if args.only in name and not any(x in name for x in args.without)]
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    report["checks"], report["not compiled"] = compile_and_check(names, args.repeats, args.limit)
    wrong = [x for x in report["checks"] if "failed" in x or "refused" in x]
    print(*report["checks"], *report["not compiled"], sep="\n", flush=True)
    print(f"{time.perf_counter() - start:.0f} s for compiling and checks", flush=True)
    report["ceilings"] = ceilings()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    for name in names:
        try:
            report["rows"].append(timed(name, args))
        except Exception as error:
            report["rows"].append({"row": name, "failed": f"{type(error).__name__}: {error}"})
        print(report["rows"][-1], flush=True)
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    print(
        f"{len(wrong)} of {len(CHECKS)} checks wrong, {len(report['not compiled'])} not compiled; {report['ceilings']}"
    )
    for row in report["rows"]:
        if "failed" not in row:
            rate = row["TFLOPS"]["hopper"]
            print(f"{row['row']:12} hopper {rate:6.1f}  of SDPA {row['of sdpa']}  wanted {row['wanted']}")
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    os._exit(bool(wrong))  # processes that hang are not waited for


if __name__ == "__main__":
    main()
