"""Forms of the Hopper backward kernel that the planner may choose: checks, then times, interleaved.

    python benchmarks/h200/backward_variants.py --json backward_variants.json

A form is what it changes of the spec that `config` chooses. Processes of their own compile each and check it:
against the oracle, with NaN in hidden places, and for the same bits again. Then all forms of a work are timed,
interleaved. The gradients of each are compared with those of the plain form first; only `near_tanh` may differ in bits.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from backward import BF16, work
from timing import kernels_alone, seconds

from tilewise.backends.gpu.target import nvidia
from tilewise.backends.hopper.bwd import config, launch
from tilewise.backends.hopper.bwd.narrow_launch import NarrowLauncher
from tilewise.testing.case import Case
from tilewise.testing.gradients import check_gradients, make_gradients

HEADS = {64: 32, 128: 16}
# What a form changes of the spec that is chosen; only near_tanh may be said of another kind of work.
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"converts": False, "direct": False, "near_tanh": False},
    "direct": {"converts": False, "direct": True},
    "converts": {"converts": True, "direct": False},
    "both": {"converts": True, "direct": True},
    "both, other": {"converts": True, "direct": True},
    "near": {"converts": False, "direct": False},
    "chosen": {},
}
WORKS = {
    "dense 16k": ("plain",),
    "window": ("plain", "converts", "both", "both, other", "chosen"),
    "packed": ("plain", "both", "both, other", "chosen"),
    "causal 1k": ("plain", "direct", "both", "chosen"),
    "causal 4k": ("plain", "both", "chosen"),
    "causal 16k": ("plain", "chosen"),
    "softcap 4k": ("plain", "near", "both"),
    "softcap 4k, far": ("plain", "near", "both"),
}
SAME = {"causal 4k": "causal 1k", "softcap 4k, far": "softcap 4k"}  # kernels
CHECKS = {
    "both": [
        Case(B=1, H=4, Hkv=2, Lq=900, D=128, window=(130, 70), dtype="f16"),
        Case(B=3, H=2, Lq=900, Lk=300, D=64, lengths=(300, 0, 1), causal=True, window=(90, None), dtype="f16"),
        Case(B=2, H=4, Hkv=2, Lq=300, D=64, causal=True, window=(127, None), sinks=True, dtype="bf16"),
    ],
    "both, other": [
        Case(B=2, H=2, Lq=1100, D=64, causal=True, window=(200, None), dtype="bf16"),
        Case(B=1, H=4, Hkv=2, Lq=900, D=128, window=(130, 70), dtype="f16"),
        Case(B=1, H=2, Hkv=1, Lq=300, Lk=500, D=128, causal=True, dtype="bf16"),
        Case(B=4, H=4, Hkv=2, D=128, form="varlen", q_lengths=(300, 1, 0, 513), lengths=(300, 200, 7, 513),
             causal=True, dtype="f16"),
        Case(B=4, H=2, D=40, form="varlen", q_lengths=(129, 640, 64, 1), lengths=(129, 640, 64, 0), window=(50, 10),
             dtype="bf16"),
        Case(B=1, H=2, Lq=1000, D=96, causal=True, dtype="f16"),
    ],
}  # fmt: skip
SPEC_OF = config.spec_of
H200 = nvidia(90)


def use(form: str, few: bool = False) -> None:
    """The form, where it can be: a converter has a persistent program to convert for."""

    def spec_of(problem: Any, target: Any) -> Any:
        s, changes = SPEC_OF(problem, target), dict(FORMS[form])
        if not (s.persistent and s.hides_right) or s.mask:
            changes |= {"converts": False}
        s = replace(s, **changes)
        # The converter's registers by the head dim, or the other way round.
        return replace(s, producer_regs=32 if s.converts and (s.D == 128) != ("other" in form) else 24)

    config.spec_of, config.splits_of = spec_of, lambda p, target: 1
    if few:  # persistent programs of many blocks
        config.persistent = lambda p: True
        launch.target_of = lambda device: nvidia(90, 5)


def made_of(name: str, D: int) -> tuple[Any, float]:
    """A plan with its tensors, and the cells that a head sees."""
    H, L, W = HEADS[D], 16384, 1024

    def random(*shape: int, by: float = 1.0) -> list[Any]:
        made = [torch.randn(*shape, H, D, device="cuda", dtype=BF16) for _ in range(4)]
        made[0] *= by
        return made

    if name == "packed":
        lengths = torch.randint(64, 4097, (64,), generator=torch.Generator().manual_seed(1)).tolist()
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_q": max(lengths), "max_k": max(lengths)}
        return work(*random(sum(lengths)), "hopper", causal=True, **ends), sum(n * (n + 1) / 2 for n in lengths)
    if name == "window":
        made = work(*random(1, L), "hopper", causal=True, window=W)
        return made, W * (W + 1) / 2 + (L - W) * W
    n = {"1k": 1024, "4k": 4096, "16k": 16384}[name.split(",")[0].split()[-1]]
    cap = {"softcap": 50.0} if "softcap" in name else {}
    inputs = random(L // n, n, by=20.0 if "far" in name else 1.0)
    made = work(*inputs, "hopper", causal="full" not in name, **cap)
    return made, L // n * (n * n if "full" in name else n * (n + 1) / 2)


def compile_one(name: str, D: int, form: str) -> None:
    use(form)
    (plan, tensors), _ = made_of(name, D)
    NarrowLauncher(plan.problem, H200)(tensors)
    torch.cuda.synchronize()


def check_one(form: str, case: Case, count: int) -> dict[str, Any]:
    """A case by few persistent programs, with NaN in hidden places, and the same bits again."""
    use(form, few=True)
    verdict = check_gradients(case, "hopper", "cuda")
    made = make_gradients(case, "cuda")
    first = {name: x.clone() for name, x in made.run("hopper").items()}
    same = all(torch.equal(x, first[name]) for _ in range(count) for name, x in made.run("hopper").items())
    outcome = {"form": form, "case": str(case), "error of bound": round(verdict.error / max(verdict.bound, 1e-300), 3)}
    return outcome if same else outcome | {"failed": "bits differ"}


def gradients(made: Any, form: str) -> dict[str, torch.Tensor]:
    plan, tensors = made
    for x in tensors.gradients().values():
        x.fill_(float("nan"))
    use(form)
    NarrowLauncher(plan.problem, H200)(tensors)
    return {name: x.clone() for name, x in tensors.gradients().items()}


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """0 for the same bits, else the largest relative difference by RMS."""
    if all(torch.equal(a[n], b[n]) for n in a):
        return 0.0
    return max(float((a[n].float() - b[n].float()).norm() / b[n].float().norm()) for n in a)


def parts(launcher: NarrowLauncher, tensors: Any, args: Any) -> dict[str, float]:
    """Microseconds of each launch beside the kernel, which cannot run without what is before it."""
    found = {}
    for n, kernel in enumerate(kernels_alone(launcher, tensors)):
        if kernel.name != "backward":
            name = f"{n} {kernel.name}"
            found[name] = round(seconds({name: kernel.run}, args.rounds, args.budget)[name] * 1e6, 1)
    return found


def timed(name: str, D: int, args: Any, ready: set[Any]) -> dict[str, Any]:
    made, cells = made_of(name, D)
    row: dict[str, Any] = {"work": name, "D": D, "apart": {}}
    runs, want = {}, gradients(made, "plain")
    for form in WORKS[name]:
        if (SAME.get(name, name), D, form) not in ready:
            continue
        try:
            if form != "plain":
                row["apart"][form] = apart(gradients(made, form), want)
            use(form)
            launcher = NarrowLauncher(made[0].problem, H200)
            runs[form] = lambda launcher=launcher: launcher(made[1])
            runs[form]()
            torch.cuda.synchronize()
            if form != "plain" and name in ("window", "packed"):
                want_bits = {n: x.clone() for n, x in made[1].gradients().items()}
                for _ in range(args.repeats):
                    runs[form]()
                    if apart(made[1].gradients(), want_bits):
                        raise AssertionError("bits differ")
        except Exception as error:
            row.setdefault("failed", {})[form] = f"{type(error).__name__}: {str(error)[:200]}"
        if args.parts and name == "window" and form in ("plain", "both") and form in runs:
            row.setdefault("beside, us", {})[form] = parts(launcher, made[1], args)
    use("plain")
    times = seconds(runs, args.rounds, args.budget)
    row["us"] = {form: round(t * 1e6, 1) for form, t in times.items()}
    row["TFLOPS"] = {form: round(cells * 10 * D * HEADS[D] / t / 1e12, 1) for form, t in times.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=0.6, help="seconds a row")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit", type=float, default=45, help="seconds for compiling and checks")
    parser.add_argument("--only", default="", help="works whose name holds this")
    parser.add_argument("--parts", action="store_true", help="launches beside the kernel by themselves too")
    parser.add_argument("--unchecked", action="store_true", help="no small cases")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    works = [name for name in WORKS if any(x in name for x in args.only.split(",")) or name == "dense 16k"]
    checks: list[dict[str, Any]] = []
    pool = ProcessPoolExecutor(os.cpu_count() or 8, multiprocessing.get_context("spawn"))
    jobs = {
        pool.submit(compile_one, n, D, f): (n, D, f) for n in works if n not in SAME for D in HEADS for f in WORKS[n]
    }
    checked = [] if args.unchecked else [*CHECKS.items()]
    tests = {pool.submit(check_one, f, case, args.repeats): (f, case) for f, some in checked for case in some}
    wait([*jobs, *tests], args.limit)
    ready = set()
    for job, what in (jobs | tests).items():
        try:
            found = job.result(0)
            ready.add(what)
            checks += [found] if found else []
        except BaseException as error:
            checks.append({"what": str(what), "failed": f"{type(error).__name__}: {str(error)[:300]}"})
    pool.shutdown(wait=False, cancel_futures=True)
    for process in [*(pool._processes or {}).values()]:  # those that are not done would hold the GPU
        process.kill()
    failed = [x for x in checks if "failed" in x]
    report["checks"] = checks
    print(f"{len(checks)} checks, {len(failed)} failed, {time.perf_counter() - start:.0f} s", *failed[:6], sep="\n")
    for D in HEADS:
        for name in works:
            row = timed(name, D, args, ready)
            report["rows"].append(row)
            if name == "dense 16k":
                dense = row["TFLOPS"]["plain"]
            else:
                row["of the dense speed"] = {form: round(t / dense, 3) for form, t in row["TFLOPS"].items()}
            print(json.dumps(row), flush=True)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    assert not math.isnan(dense)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
