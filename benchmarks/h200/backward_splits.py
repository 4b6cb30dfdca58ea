"""Backward of few keys: key blocks whose query blocks several programs share, beside one program for each.

    python benchmarks/h200/backward_splits.py --json backward_splits.json

Cases are checked against the oracle and repeated to the bit; then every row is timed with 1 to 8 splits, interleaved,
in CUDA graphs: eager launches of such short calls would measure the host.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from backward import BF16, peers, work
from backward_checks import repeats
from timing import graphed, kernels_alone, seconds

from tilewise.backends.gpu.target import nvidia
from tilewise.backends.hopper.bwd import config
from tilewise.backends.hopper.bwd.narrow_launch import NarrowLauncher
from tilewise.testing.case import Case
from tilewise.testing.gradients import check_gradients

# D, batch, heads, KV heads, length, causal
ROWS = [
    (128, 1, 32, 8, 1024, False), (128, 1, 32, 8, 1024, True), (128, 1, 32, 8, 2048, False),
    (128, 1, 32, 8, 2048, True), (128, 1, 32, 8, 3072, False), (128, 1, 32, 8, 3072, True), (128, 1, 32, 8, 4096, True),
    (128, 2, 32, 8, 1024, True), (128, 1, 16, 2, 2048, True), (128, 1, 16, 2, 4096, False), (128, 1, 16, 2, 4096, True),
    (128, 1, 8, 8, 1024, False), (128, 1, 8, 8, 1024, True), (128, 1, 8, 8, 2048, True), (128, 1, 16, 16, 1024, True),
    (64, 1, 32, 8, 1024, False), (64, 1, 32, 8, 1024, True), (64, 1, 32, 8, 2048, True), (64, 1, 16, 16, 1024, True),
    (64, 1, 8, 8, 1024, True),
]  # fmt: skip
PEERS = {ROWS[0], ROWS[1], ROWS[3], ROWS[9], ROWS[16]}
CASES = [
    (2, Case(B=1, H=4, Hkv=1, Lq=1000, D=128, causal=True, dtype="bf16")),
    (3, Case(B=1, H=2, Hkv=1, Lq=300, Lk=500, D=128, causal=True, dtype="f16")),
    (2, Case(B=1, H=4, Hkv=2, Lq=900, D=128, window=(130, 70), dtype="bf16")),
    (4, Case(B=3, H=4, Hkv=1, Lq=500, D=64, lengths=(1, 128, 499), dtype="bf16")),
    (3, Case(B=1, H=8, Hkv=2, Lq=2048, Lk=200, D=64, dtype="f16", sinks=True)),
    (2, Case(B=1, H=3, Lq=700, Lk=333, D=96, causal=True, dtype="bf16", softcap=20.0)),
    (0, Case(B=1, H=8, Hkv=2, Lq=1024, D=64, causal=True, dtype="bf16")),
    (0, Case(B=1, H=16, Hkv=2, Lq=2048, D=128, dtype="bf16")),
]
HEURISTIC = config.splits_of
H200 = nvidia(90)


def use(splits: int) -> None:
    """So many in every call; 0: as the heuristic has it."""
    config.splits_of = (lambda p, target: splits) if splits else HEURISTIC


def check(splits: int, case: Case, count: int) -> dict[str, Any]:
    use(splits)
    try:
        verdict = check_gradients(case, "hopper", "cuda")
    except Exception as error:
        return {"case": str(case), "splits": splits, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
    found = repeats(case, count) | {"splits": splits}
    return found | {"error of bound": round(verdict.error / max(verdict.bound, 1e-300), 3)}


def made_of(D: int, B: int, H: int, Hkv: int, L: int, causal: bool) -> tuple[Any, Any]:
    tensors = [torch.randn(B, L, h, D, device="cuda", dtype=BF16) for h in (H, Hkv, Hkv, H)]
    return work(*tensors, "hopper", causal=causal), tensors


def compile_one(what: tuple[Any, ...], splits: int) -> None:
    use(splits)
    (plan, tensors), _ = made_of(*what)
    NarrowLauncher(plan.problem, H200)(tensors)
    torch.cuda.synchronize()


def compiling(pool: ProcessPoolExecutor, rows: list[Any]) -> dict[Future[Any], Any]:
    """Each kernel once."""
    jobs: dict[Any, Any] = {}
    for what in rows:
        (plan, _), _ = made_of(*what)
        for splits in (1, 2):
            use(splits)
            jobs.setdefault(config.spec_of(plan.problem, H200), (what, splits))
    use(0)
    return {pool.submit(compile_one, *job): job for job in jobs.values()}


def launches(launcher: NarrowLauncher, tensors: Any, args: Any) -> dict[str, float]:
    """Microseconds of each launch but the kernel, which cannot run again without what is before it."""
    runs = {
        kernel.name: graphed([kernel.run] * 20)
        for kernel in kernels_alone(launcher, tensors)
        if kernel.name != "backward"
    }
    return {name: round(t / 20 * 1e6, 1) for name, t in seconds(runs, args.rounds, args.budget).items()}


def timed(args: Any, what: tuple[Any, ...]) -> dict[str, Any]:
    D, B, H, Hkv, L, causal = what
    (plan, tensors), inputs = made_of(*what)
    row: dict[str, Any] = {"D": D, "B": B, "heads": f"{H}/{Hkv}", "L": L, "causal": causal}
    row["programs"], row["chosen"] = config.programs_of(plan.problem), HEURISTIC(plan.problem)
    runs, want = {}, None
    for splits in sorted({1, 2, 3, 4, 6, 8, row["chosen"]}):
        if splits > 2 and row["programs"] * splits > 660:
            continue
        use(splits)
        launcher = NarrowLauncher(plan.problem, H200)
        launcher(tensors)
        got = {name: x.float() for name, x in tensors.gradients().items()}
        want = want or got
        apart = max(float((got[n] - want[n]).norm() / want[n].norm()) for n in got)
        assert apart < 0.01, (what, splits, apart)  # its dK and dV are other sums, rounded once
        if what in ROWS[:2] and splits in (2, 4):
            try:
                row.setdefault("launches, us", {})[splits] = launches(launcher, tensors, args)
            except Exception as error:
                print(f"  launches: {type(error).__name__}: {str(error)[:200]}")
        runs[splits] = graphed([lambda launcher=launcher: launcher(tensors)] * 4)
    use(0)
    row["model, us"] = {splits: round(config.time_of(plan.problem, splits, H200)) for splits in runs}
    ways = {str(splits): run for splits, run in runs.items()}
    if args.peers and what in PEERS:
        for name, run in peers(args.peers, *inputs, causal).items():
            try:
                ways[name] = graphed([run] * 4)
            except Exception as error:
                print(f"  {name}: {str(error)[:100]}")
    times = {name: t / 4 for name, t in seconds(ways, args.rounds, args.budget).items()}
    flops = 10 * D * B * H * (L * (L + 1) / 2 if causal else L * L)
    row["us"] = {name: round(t * 1e6, 1) for name, t in times.items()}
    row["TFLOPS"] = {name: round(flops / t / 1e12) for name, t in times.items()}
    row["chosen beside one"] = round(times["1"] / times[str(row["chosen"])], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=0.3, help="seconds a row")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--limit", type=float, default=60, help="seconds for compiling and checks")
    parser.add_argument("--peers", help="folder of peers_load.py")
    parser.add_argument("--only", type=int, default=0, help="head dim")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    rows = [what for what in ROWS if args.only in (0, what[0])]
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    pool = ProcessPoolExecutor(os.cpu_count() or 8, multiprocessing.get_context("spawn"))
    jobs = compiling(pool, rows)
    tests = {pool.submit(check, splits, case, args.repeats): case for splits, case in CASES}
    wait([*jobs, *tests], args.limit)
    checks = []
    for job, what in (jobs | tests).items():
        try:
            checks += [job.result(0)] if job in tests else []
        except BaseException as error:
            checks.append({"what": str(what), "failed": f"{type(error).__name__}: {str(error)[:300]}"})
    pool.shutdown(wait=False, cancel_futures=True)
    for process in [*(pool._processes or {}).values()]:  # those that are not done would hold the GPU
        process.kill()
    report["checks"] = checks
    failed = [x for x in checks if "failed" in x]
    worst = max((x.get("error of bound", 0.0) for x in checks), default=0.0)
    print(
        f"{len(checks)} checks, {len(failed)} failed, worst {worst} of its bound, {time.perf_counter() - start:.0f} s"
    )
    print(*failed, sep="\n", flush=True)
    for what in rows:
        try:
            row = timed(args, what)
        except Exception as error:
            row = {"what": str(what), "failed": f"{type(error).__name__}: {str(error)[:300]}"}
        report["rows"].append(row)
        print(json.dumps(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
