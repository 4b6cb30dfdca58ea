"""Checks of the Hopper kernels on a GPU: each launch that is timed against an oracle, the conformance suite in 16 bits,
a thousand repeats. Kernels are compiled by many processes; `hopper.py` runs all of this before it times anything.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tilewise.backends.gpu.target import target_of
from tilewise.backends.hopper.fwd import config
from tilewise.core.options import Options
from tilewise.validation import calls

BF16 = torch.bfloat16
Way = Callable[[], torch.Tensor]


def bound_call(*args: Any, **options: Any) -> Way:
    """A call of the Hopper kernels, checked and planned beforehand."""
    return launcher_of(calls.dense(*args, Options(**options)))


def launcher_of(call: Any) -> Way:
    from tilewise.backends.hopper.fwd.launch import Launcher

    c = config.config_of(call.problem)
    bound = Launcher(call.problem, c, target_of(call.problem.device))

    def run() -> torch.Tensor:
        bound(call.tensors)
        return call.out

    return run


def oracle(q: Any, k: Any, v: Any, causal: bool) -> torch.Tensor:
    """Float64, bottom-right causal."""
    G = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(G, 1), v.double().repeat_interleave(G, 1)
    s = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        Lq, Lk = s.shape[-2:]
        i, j = torch.arange(Lq, device=s.device)[:, None] + Lk - Lq, torch.arange(Lk, device=s.device)
        s = s.masked_fill(j > i, -torch.inf)
    return torch.softmax(s, -1) @ v


def check(D: int, causal: bool) -> float:
    """The relative error on awkward sizes, seq-major and head-major, with poisoned outputs."""
    worst = 0.0
    for B, H, Hkv, Lq, Lk in ((2, 4, 2, 700, 1024), (1, 3, 3, 130, 256), (8, 16, 4, 1024, 1024), (1, 2, 1, 500, 4400)):
        g = torch.Generator("cuda").manual_seed(Lq)
        q = 3 * torch.randn(B, Lq, H, D, device="cuda", generator=g).to(BF16).transpose(1, 2)
        k, v = (torch.randn(B, Hkv, Lk, D, device="cuda", generator=g).to(BF16) for _ in range(2))
        out = torch.full_like(q, float("nan"))
        bound_call(q, k, v, causal=causal, out=out)()
        want = oracle(q, k, v, causal)
        worst = max(worst, float((out.double() - want).norm() / want.norm()))
        if not bool(out.isfinite().all()):
            return float("nan")
    return worst


def compile_one(job: tuple[int, bool]) -> tuple[Any, float]:
    start = time.perf_counter()
    try:
        error = check(*job)
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem)[:300]}", time.perf_counter() - start
    return error, time.perf_counter() - start


def repeats(which: str) -> str:
    """A thousand repeats of one launch, on awkward sizes with many rounds of work, give the same bits."""
    D, option = which.split()
    g = torch.Generator("cuda").manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, int(D), device="cuda", dtype=BF16, generator=g)

    if option == "varlen":
        lengths = torch.tensor([0, 5, 700, 0, 1300, 64, 129, 999])
        cu = lengths.cumsum(0).to(torch.int32).cuda()
        q, k, v = randn(cu[-1] + 3, 16), randn(cu[-1] + 3, 4), randn(cu[-1] + 3, 4)
        run = launcher_of(calls.varlen(q, k, v, cu, cu, Options(max_q=1300, max_k=1300, causal=True)))
    else:
        keys = 4400 if "long" in option else 999
        q, k, v = randn(5, 16, 777), randn(5, 4, keys), randn(5, 4, keys)
        options: dict[str, Any] = {
            "full": {}, "long": {}, "causal": {"causal": True}, "long-causal": {"causal": True},
            "window": {"window": (300, 5), "softcap": 9.0},
            "lengths": {"kv_lengths": torch.tensor([999, 1, 500, 0, 128], device="cuda"), "causal": True},
            "chunk": {"chunk": 130, "causal": True, "sinks": torch.zeros(16, device="cuda")},
        }[option]  # fmt: skip
        run = bound_call(q, k, v, **options)
    first = run().clone()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        wrong += (run() != first).sum()
    return f"{int(wrong)} elements differed" if int(wrong) or not bool(first.isfinite().all()) else ""


OPTIONS = ("full", "causal", "window", "lengths", "chunk", "varlen")
REPEATS = [f"{D} {option}" for D in (64, 128, 256, 512) for option in OPTIONS]
REPEATS += ["64 long", "64 long-causal"]  # three consumers
REPEATS += ["320 full", "320 causal", "448 window"]  # an odd number of chunks


def conformance(index: int, least: int = 0) -> tuple[str, str, float]:
    """Case number `index` of the suite, as near as these kernels come to it: 16 bits, more than a few queries."""
    from tilewise.errors import Unsupported
    from tilewise.testing.cases import CASES
    from tilewise.testing.check import check_case

    start = time.perf_counter()
    case = fitted(CASES[index], index, least)
    try:
        verdict = check_case(case, "hopper", "cuda")
        status = f"ok {verdict.error:.3g} of {verdict.bound:.3g}"
    except Unsupported as error:
        status = f"unsupported {error}"
    except Exception as error:
        status = f"FAILED {type(error).__name__}: {str(error)[:400]}"
    return str(case), status, time.perf_counter() - start


def fitted(case: Any, index: int, least: int = 0) -> Any:
    changes: dict[str, Any] = {"dtype": ("bf16", "f16")[index % 2], "k": "", "v": ""}
    changes["D"] = max(-(-case.D // 8) * 8, least)
    changes["Dv"] = -(-case.Dv // 8) * 8
    if case.form == "dense" and case.Lq <= 16:
        changes["Lq"] = case.Lq + 32
    if case.strides == "sliced":
        changes["strides"] = ""
    return replace(case, **changes)


def conforming() -> list[int]:
    """The cases that could be for these kernels."""
    from tilewise.testing.cases import CASES

    found, seen = [], set()
    for i, case in enumerate(CASES):
        case = fitted(case, i)
        if case.form != "paged" and not case.mask and case.D <= 512 and str(case) not in seen:
            seen.add(str(case))
            found.append(i)
    return found


def prop(name: str) -> tuple[str, str, float]:
    """A property of the suite, with bfloat16 in place of float32."""
    from tilewise.errors import Unsupported
    from tilewise.testing import properties

    start = time.perf_counter()
    torch.set_default_dtype(BF16)
    plain = properties.Case
    properties.Case = lambda **given: plain(**({"dtype": "bf16"} | given))  # type: ignore[assignment,misc]
    properties.SOME[:] = [fitted(case, 0) for case in properties.SOME if case.form != "paged"]
    from tilewise.tools import verify

    try:
        (properties.PROPERTIES | verify.GPU_CHECKS)[name]("hopper", "cuda")
        status = "ok"
    except Unsupported as error:
        status = f"unsupported {error}"
    except Exception as error:
        status = f"FAILED {type(error).__name__}: {str(error)[:400]}"
    return name, status, time.perf_counter() - start


def repeated(which: str) -> tuple[str, str, float]:
    start = time.perf_counter()
    try:
        said = repeats(which)
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:300]}"
    return f"1000 repeats: D{which}", f"FAILED {said}" if said else "ok", time.perf_counter() - start


def prepare(
    verify: int, jobs: int, seconds: float, extra: list[str], compile_extra: Callable[[str], str],
    only: str = "", least: int = 0,
) -> list[tuple[str, str, float]]:  # fmt: skip
    """Compiles and checks every launch that is timed, and runs the conformance suite, within so many seconds.

    `only`: no launches, and of repeats and properties those named; `least`: smaller head dims of the suite become this.
    """
    from tilewise.testing.properties import PROPERTIES

    todo = [] if only else [(D, causal) for D in (64, 128, 256, 512) for causal in (False, True)]
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    futures = [pool.submit(compile_one, job) for job in todo]
    more = [pool.submit(compile_extra, name) for name in extra]
    suite = []
    if verify:
        names = only.split(",") if only else [*REPEATS, *PROPERTIES, "graphs_replay", "poisoned_memory"]
        suite = [pool.submit(repeated if name in REPEATS else prop, name) for name in names]
        suite += [pool.submit(conformance, i, least) for i in conforming()[::verify]]
    last = time.perf_counter() + seconds
    for key, future in zip(todo, futures, strict=True):
        try:
            error, took = future.result(timeout=max(0.1, last - time.perf_counter()))
        except Exception as problem:
            error, took = f"{type(problem).__name__}", 0.0
        good = isinstance(error, float) and error < 1e-2
        if not good:
            shown = f"{error:.2e}" if isinstance(error, float) else error
            print(f"  {key}: {shown} WRONG ({took:.0f} s)", flush=True)
    for name, future in zip(extra, more, strict=True):
        try:
            said = future.result(timeout=max(0.1, last - time.perf_counter()))
        except Exception as problem:
            said = type(problem).__name__
        if said:
            print(f"  {name}: {said}", flush=True)
    results = []
    for future in suite:
        try:
            results.append(future.result(timeout=max(0.0, last - time.perf_counter())))
        except TimeoutError:
            continue
        except Exception as problem:
            results.append(("a process", f"FAILED {type(problem).__name__}", 0.0))
        if results[-1][1].startswith("FAILED"):
            print("  " + " ".join(results[-1][:2])[:260].replace("\n", " "), flush=True)
    if suite:
        counts = {w: sum(r[1].startswith(w) for r in results) for w in ("ok", "unsupported", "FAILED")}
        print(f"conformance: {counts}, {len(suite) - len(results)} not reached in time", flush=True)
    for process in pool._processes.values():  # one may hang in a kernel that waits for ever
        process.kill()
    return results


def main() -> None:
    """The checks alone: `TRITON_PTXAS_PATH=... python benchmarks/h200/hopper_checks.py` tries another assembler."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=0, metavar="N", help="run every Nth conformance case too")
    parser.add_argument("--most", type=float, default=150, help="seconds")
    parser.add_argument("--only", default="", help="no launches, and of repeats and properties these")
    parser.add_argument("--least", type=int, default=0, metavar="D", help="smaller head dims of the suite become this")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = prepare(args.every or 10**6, args.jobs, args.most, [], str, args.only, args.least)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
