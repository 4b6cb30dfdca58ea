"""Forms of the Hopper backward kernel that the planner may choose: checks, then times, interleaved.

    python benchmarks/h200/backward_variants.py --json backward_variants.json

A form is a set of names of `config` that are true. Processes of their own compile each and check it: against the
oracle, with NaN in hidden places, and for the same bits again. Then all forms of a work take turns. The gradients of
each are compared with those of the plain form first; only `NEAR_TANH` may differ in bits.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from backward import BF16, work
from backward_checks import LARGE, check, repeats
from timing import ceilings, seconds

from tilewise.backends.hopper.bwd import config
from tilewise.backends.hopper.bwd.launch import Bound
from tilewise.testing.case import Case

HEADS = {64: 32, 128: 16}
FORMS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "converts": ("CONVERTS",),
    "direct": ("DIRECT",),
    "both": ("CONVERTS", "DIRECT"),
    "near": ("NEAR_TANH",),
}
SPARSE, CAPPED = ("plain", "converts", "direct", "both"), ("plain", "near")
WORKS = {
    "dense 16k": ("plain",), "window": SPARSE, "packed": SPARSE, "causal 1k": SPARSE, "full 1k": SPARSE,
    "softcap 4k": CAPPED, "softcap 4k, far": CAPPED,
}  # fmt: skip
MORE = [
    Case(B=1, H=2, Lq=1000, D=128, causal=True, softcap=50.0), Case(B=2, H=2, Lq=700, D=64, softcap=5.0),
    Case(B=1, H=2, Hkv=1, Lq=300, D=128, softcap=2.0, window=(100, 30)), Case(B=2, H=4, Lq=1000, D=64, causal=True),
    Case(B=3, H=2, Lq=900, Lk=300, D=64, lengths=(300, 0, 1), causal=True, window=(90, None)),
]  # fmt: skip


PLANES = (2, 4, 8)  # interleaved, where the plain form has more or less


def use(form: str, few: bool = False) -> None:
    for name in ("CONVERTS", "DIRECT", "NEAR_TANH"):
        setattr(config, name, name in FORMS[form])
    if few:  # persistent programs of many blocks in every case
        config.persistent = lambda p: True
        config.PROCESSORS = 5


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
    Bound(plan)(tensors)
    torch.cuda.synchronize()


def check_form(form: str, few: bool, count: int) -> list[dict[str, Any]]:
    """All cases in this one process, which compiles each kernel once."""
    use(form, few)
    cases = [case for case in [*LARGE, *MORE] if form != "near" or case.softcap]
    cases = [replace(c, dtype=("bf16", "f16")[n % 2]) for n, c in enumerate(cases)]
    cases = [c for n, c in enumerate(cases) if few or form != "plain" or n % 4 == 0]
    found = []
    for n, case in enumerate(cases):
        found.append({"form": form, "few": few} | check(case))
        if n % 3 == 0 and case.D % 64 == 0:
            found.append({"form": form, "few": few} | repeats(case, count))
    return found


def gradients(made: Any, form: str) -> dict[str, torch.Tensor]:
    plan, tensors = made
    for x in tensors.gradients().values():
        x.fill_(float("nan"))
    use(form)
    Bound(plan)(tensors)
    return {name: x.clone() for name, x in tensors.gradients().items()}


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """0 for the same bits, else the largest relative difference by RMS."""
    if all(torch.equal(a[n], b[n]) for n in a):
        return 0.0
    return max(float((a[n].float() - b[n].float()).norm() / b[n].float().norm()) for n in a)


def parts(bound: Bound, tensors: Any, args: Any) -> dict[str, float]:
    """Microseconds of each launch beside the kernel, which cannot run without what is before it."""
    (steps,) = bound.ready.values()
    given = {name: x for name, x in bound.tensors(tensors).items() if x is not None}
    at = {name: x.data_ptr() for name, x in given.items()}
    beside = {n: step for n, step in enumerate(steps) if step.launch.compiled.metadata.name != "backward"}
    found = {}
    for n, step in beside.items():
        bound.again(steps, at, tensors.dout.device)
        run = lambda s=step: bound.again([s], at, tensors.dout.device)  # noqa: E731
        name = f"{n} {step.launch.compiled.metadata.name}"
        found[name] = round(seconds({name: run}, args.rounds, args.budget)[name] * 1e6, 1)
    return found


def timed(name: str, D: int, args: Any) -> dict[str, Any]:
    made, cells = made_of(name, D)
    row: dict[str, Any] = {"work": name, "D": D, "apart": {}}
    runs, want = {}, gradients(made, "plain")
    for form in WORKS[name]:
        try:
            if form != "plain":
                row["apart"][form] = apart(gradients(made, form), want)
            use(form)
            bound = Bound(made[0])
            runs[form] = lambda bound=bound: bound(made[1])
            runs[form]()
            torch.cuda.synchronize()
        except Exception as error:
            row.setdefault("failed", {})[form] = f"{type(error).__name__}: {str(error)[:200]}"
        if name in ("window", "packed") and form in ("plain", "both") and form in runs:
            row.setdefault("beside, us", {})[form] = parts(bound, made[1], args)
        for planes in PLANES if form == "plain" and name in ("window", "packed") else ():
            bound = Bound(made[0], planes)
            runs[f"plain, {planes} planes"] = lambda bound=bound: bound(made[1])
    use("plain")
    times = seconds(runs, args.rounds, args.budget)
    row["us"] = {form: round(t * 1e6, 1) for form, t in times.items()}
    row["TFLOPS"] = {form: round(cells * 10 * D * HEADS[D] / t / 1e12, 1) for form, t in times.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a row")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--limit", type=float, default=110, help="seconds for compiling and checks")
    parser.add_argument("--only", default="", help="works whose name holds this")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    works = [name for name in WORKS if args.only in name or name == "dense 16k"]
    checks: list[dict[str, Any]] = []
    with ProcessPoolExecutor(os.cpu_count() or 8, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_one, name, D, form) for name in works for D in HEADS for form in WORKS[name]]
        forms = sorted({form for name in works for form in WORKS[name]})
        tests = [pool.submit(check_form, form, few, args.repeats) for form in forms for few in (True, False)]
        for job in [*jobs, *tests]:
            try:
                checks += job.result(max(1.0, args.limit - (time.perf_counter() - start))) or []
            except Exception as error:
                checks.append({"failed": f"{type(error).__name__}: {str(error)[:300]}"})
    failed = [x for x in checks if "failed" in x]
    report |= {"checks": checks, "ceilings": ceilings()}
    print(f"{len(checks)} checks, {len(failed)} failed, {time.perf_counter() - start:.0f} s", *failed[:6], sep="\n")
    for D in HEADS:
        for name in works:
            row = timed(name, D, args)
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
