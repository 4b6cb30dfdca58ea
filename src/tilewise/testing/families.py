"""What a family of kernels is proven by: a sample of the conformance cases and larger ones, repeats, poison, times.

A family is what a backend's `family` says of a problem. A check is data, so that another process can make it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ..core.expression import mods
from ..core.options import Options
from ..core.problem import Problem
from ..dispatch import planner
from ..errors import Unsupported
from ..validation.backward import backward, differentiable
from .case import Case, make
from .cases import CASES, GRADIENTS
from .check import Mismatch, check_call, check_case
from .gradients import judge_gradients, make_gradients
from .properties import fill_free_memory

OF_FAMILY = 10  # conformance cases of a family, evenly spaced over all that it serves
LARGEST = 2  # cases of a family that are repeated, and run in memory full of NaN
REPEATS = {"cuda": 50, "mps": 50, "cpu": 3}
ROUNDS, LONGEST = 7, 1.5  # of a time, and the seconds after which it has enough of them
BF16 = Case(B=1, H=8, Hkv=2, D=128, dtype="bf16")

# More rows and keys than the conformance cases have, for the kernels' usual tiles; the oracle holds all their scores.
LARGER = [
    replace(BF16, Lq=1100, causal=True),
    replace(BF16, Hkv=8, Lq=520, Lk=1300, D=64, causal=True, window=300),
    replace(BF16, Lq=640, D=256, dtype="f16"),
    replace(BF16, H=4, Lq=384, D=192, Dv=128, causal=True, softcap=20.0),
    replace(BF16, H=4, Lq=260, D=512),
    replace(BF16, H=4, Hkv=4, Lq=600, mask="qk", pattern="blocks"),
    replace(BF16, B=3, H=32, Hkv=8, Lq=1, Lk=2500, lengths=(2500, 1, 1777)),
    replace(BF16, B=3, H=32, Hkv=8, Lq=1, form="paged", lengths=(2500, 1, 1777)),
    replace(BF16, B=3, H=32, Hkv=8, Lq=4, form="paged", lengths=(2500, 4, 1777), causal=True, k="int8/64", v="int8/64"),
    replace(BF16, Lq=200, Lk=1500, indices="200"),
    replace(BF16, B=3, H=64, Hkv=1, Lq=1, form="paged", lengths=(1500, 1, 777), D=576, Dv=512, page=64, latent=True),
    replace(BF16, B=2, H=64, Hkv=1, Lq=1, form="paged", lengths=(1500, 777), D=576, Dv=512, page=64, latent=True,
            indices="512"),
]  # fmt: skip
LARGER_GRADIENTS = [
    replace(BF16, Lq=520, causal=True),
    replace(BF16, H=4, Hkv=4, Lq=400, Lk=700, D=64, causal=True, window=200, dtype="f16"),
    replace(BF16, H=4, Lq=384, D=256, causal=True),
    replace(BF16, H=2, Lq=260, D=512),
    Case(form="varlen", Hkv=2, q_lengths=(300, 1, 130), lengths=(300, 40, 130), D=128, dtype="bf16", causal=True),
]
# By a word, `score_mod` and `mask_mod`; a case names its function in `note`.
FUNCTIONS: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "capped": (lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0), None),
    "prefix": (None, lambda b, h, q, k: (q >= k) | (k < 9)),
    "decay": (lambda s, b, h, q, k: s - (q - k) * torch.exp2(-h.float()), lambda b, h, q, k: q - k < 40),
}
WITH_FUNCTIONS = [
    *(Case(B=2, Hkv=2, Lq=97, Lk=130, D=64, note=name) for name in FUNCTIONS),
    *(Case(B=2, Hkv=2, Lq=1, Lk=130, D=64, dtype="bf16", note=name) for name in FUNCTIONS),
    Case(form="paged", B=2, Hkv=2, Lq=3, lengths=(70, 133), D=64, note="decay"),
    Case(form="varlen", q_lengths=(70, 1, 33), lengths=(70, 90, 33), note="prefix"),
]
# Calls that are timed: on a CPU in float32, with an eighth of the rows and keys and at most 4 sequences.
TIMED = {
    "prefill": replace(BF16, H=16, Hkv=16, Lq=4096, causal=True),
    "decode": replace(BF16, B=16, H=32, Hkv=8, Lq=1, Lk=8192),
    "pages": replace(BF16, B=16, H=32, Hkv=8, Lq=1, form="paged", lengths=(8192,) * 16),
    "quantised": replace(BF16, B=16, H=32, Hkv=8, Lq=1, form="paged", lengths=(8192,) * 16, k="int8/64", v="int8/64"),
    "indices": replace(BF16, Lq=512, Lk=4096, indices="512"),
    "functions": replace(BF16, Lq=2048, note="capped"),
    "backward": replace(BF16, Hkv=8, Lq=4096, causal=True),
    "wide backward": replace(BF16, Hkv=8, Lq=4096, D=256, causal=True),
    "latent decode": replace(BF16, B=16, H=128, Hkv=1, Lq=1, form="paged", lengths=(8192,) * 16, D=576, Dv=512,
                             page=64, latent=True),
    "latent indices": replace(BF16, B=16, H=128, Hkv=1, Lq=1, form="paged", lengths=(8192,) * 16, D=576, Dv=512,
                              page=64, latent=True, indices="2048"),
}  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One check of a family of a backend."""

    backend: str
    family: str
    kind: str  # a name in KINDS
    case: Case
    apart: tuple[tuple[str, str], ...] = ()  # of a time: backends and families that are wrong, so not compared with

    def __str__(self) -> str:
        return f"{self.kind} {self.case}"


class Found(NamedTuple):
    """What a check found: how close a result is to its bound, or seconds by backend."""

    detail: str = ""
    times: dict[str, float] | None = None


def checks_of(device: str, backends: Sequence[str], of_family: int = OF_FAMILY) -> list[Check]:
    """All checks of the families that these backends have on a device, family by family; times come last."""
    by_family: dict[tuple[str, str], list[tuple[str, Case, bool]]] = {}
    no_fp8 = device.startswith("mps")  # torch has none there
    problems = [found for found in _problems(device) if not (no_fp8 and "fp8" in found[1].k + found[1].v)]
    for backend in backends:
        for kind, case, larger, problem in problems:
            if planner.supports(backend, problem) is None:
                family = planner.family(backend, problem)
                by_family.setdefault((backend, family), []).append((kind, case, larger))
    found: list[Check] = []
    for (backend, family), served in by_family.items():
        own = [(kind, case) for kind, case, larger in served if larger]
        sampled = [(kind, case) for kind, case, larger in served if not larger]
        sampled = sampled[:: max(1, -(-len(sampled) // of_family))]
        found += [Check(backend, family, kind, case) for kind, case in (*sampled, *own)]
        for kind, case in sorted(sampled + own, key=lambda x: _size(x[1]))[-LARGEST:]:
            for what in ("repeats", "poison"):
                found.append(Check(backend, family, f"{what}, {kind}", case))
    timed = [(backend, family) for backend, family in by_family if family in TIMED]
    return found + [Check(backend, family, "time", _timed(family, device)) for backend, family in timed]


def _problems(device: str) -> Iterator[tuple[str, Case, bool, Problem]]:
    """The kind of check, the case, whether it is a larger one, and its problem as on the device. It is made on the CPU:
    nothing is run.
    """
    of_kind = {
        "case": (CASES, LARGER), "gradients": (GRADIENTS, LARGER_GRADIENTS), "functions": (WITH_FUNCTIONS, []),
    }  # fmt: skip
    for kind, lists in of_kind.items():
        for larger, cases in enumerate(lists):
            for case in cases:
                yield kind, case, bool(larger), _problem(kind, case, device)


def _problem(kind: str, case: Case, device: str) -> Problem:
    inputs = make(case, sized=True)
    problem = inputs.checked(return_lse=True, **_traced(case, "cpu")).problem
    if kind == "gradients":
        problem = replace(problem, grads=differentiable(problem))
    return replace(problem, device=torch.device(device))


def _size(case: Case) -> int:
    return case.queries * case.keys * case.H * case.D


def _timed(family: str, device: str) -> Case:
    case = TIMED[family]
    if not device.startswith("cpu"):
        return case
    lengths = tuple(n // 8 for n in case.lengths[:4])
    Lq = max(1, case.Lq // 8)
    return replace(case, B=min(case.B, 4), Lq=Lq, Lk=case.Lk // 8, lengths=lengths, dtype="f32")


def _functions(case: Case) -> dict[str, Any]:
    score, mask = FUNCTIONS.get(case.note, (None, None))
    given = {"score_mod": score, "mask_mod": mask}
    return {name: function for name, function in given.items() if function is not None}


def _traced(case: Case, device: str) -> dict[str, Any]:
    functions = _functions(case)
    if not functions:
        return {}
    return {"score_mod": mods.bind(functions.get("score_mod"), functions.get("mask_mod"), torch.device(device))}


def run(check: Check, device: str, launched: Callable[[], None] = lambda: None) -> Found:
    """Makes a check; raises if it fails. `launched` is called when kernels are compiled and begin to run."""
    kind, _, of = check.kind.partition(", ")
    return KINDS[kind](check, of, device, launched)


def _case(check: Check, of: str, device: str, launched: Callable[[], None]) -> Found:
    make(check.case, device).call(check.backend, return_lse=True)
    launched()
    verdict = check_case(check.case, check.backend, device)
    return Found(f"error {verdict.error:.3g} of {verdict.bound:.3g}")


def _with_function(check: Check, of: str, device: str, launched: Callable[[], None]) -> Found:
    inputs = make(check.case, device)
    poison = torch.full_like(inputs.checked().out, float("nan"))
    call = inputs.checked(out=poison, **_traced(check.case, device))
    result = inputs.call(check.backend, out=poison, return_lse=True, **_functions(check.case))
    launched()
    verdict = check_call(call, call.tensors.out, inputs.common(result.lse))
    return Found(f"error {verdict.error:.3g} of {verdict.bound:.3g}")


def _gradients(check: Check, of: str, device: str, launched: Callable[[], None]) -> Found:
    made = make_gradients(check.case, device)
    made.run(check.backend)
    launched()
    verdict = judge_gradients(made, made.run(check.backend))
    return Found(f"error {verdict.error:.3g} of {verdict.bound:.3g}")


def _runner(case: Case, of: str, backend: str, device: str, slack: float) -> Callable[[], list[torch.Tensor]]:
    """A function that runs a case and returns its results in memory of their own."""
    if of == "gradients":
        made = make_gradients(case, device, slack)
        return lambda: [x.clone() for x in made.run(backend).values()]
    inputs, functions = make(case, device, slack), _functions(case)
    return lambda: [*inputs.call(backend, return_lse=True, **functions)]


def _repeats(check: Check, of: str, device: str, launched: Callable[[], None]) -> Found:
    run_again = _runner(check.case, of, check.backend, device, float("nan"))
    first, times = run_again(), REPEATS[torch.device(device).type]
    launched()
    differ = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(times):
        for a, b in zip(first, run_again(), strict=True):
            differ += ((a != b) & ~(a.isnan() & b.isnan())).sum()
    if int(differ):
        raise Mismatch(f"{int(differ)} elements differed in {times} repeats")
    return Found(f"{times} times the same bits")


def _poison(check: Check, of: str, device: str, launched: Callable[[], None]) -> Found:
    """The same bits in memory of zeros and of NaN, that of outputs and workspaces; and, forward, of all slack."""
    results = []
    for fill in (0.0, float("nan")):
        run_again = _runner(check.case, of, check.backend, device, 0.0 if of == "gradients" else fill)
        fill_free_memory(device, fill)
        results.append(run_again())
        launched()
    for a, b in zip(*results, strict=True):
        if bool(((a != b) & ~(a.isnan() & b.isnan())).any()):
            raise Mismatch("NaN in free memory or in slack changed the result")
    return Found("NaN in free memory changes no bit")


def _time(check: Check, of: str, device: str, launched: Callable[[], None]) -> Found:
    """Median seconds of a call, interleaved with the next backend that serves it and is not known to be wrong."""
    problem, call = (_timed_backward if "backward" in check.family else _timed_forward)(check.case, device)
    if planner.supports(check.backend, problem) is not None or planner.family(check.backend, problem) != check.family:
        raise Unsupported(check.backend, "the timed call has other kernels", "none")
    later = planner.BACKENDS[planner.BACKENDS.index(check.backend) + 1 :]
    serve = [name for name in later if name != "reference" and planner.supports(name, problem) is None]
    rivals = [name for name in serve if (name, planner.family(name, problem)) not in check.apart]
    names = [check.backend, *rivals[:1]]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        call(name)
        _wait(device)
    launched()
    end = time.perf_counter() + LONGEST
    for _ in range(ROUNDS):
        for name in names:
            start = time.perf_counter()
            call(name)
            _wait(device)
            seconds[name].append(time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    times = {name: statistics.median(of_name) for name, of_name in seconds.items()}
    return Found(", ".join(f"{name} {1e6 * s:.0f} us" for name, s in times.items()), times)


def _timed_forward(case: Case, device: str) -> tuple[Problem, Callable[[str], Any]]:
    inputs, functions = make(case, device, 0.0, sized=True), _functions(case)
    problem = inputs.checked(**_traced(case, device)).problem
    return problem, lambda backend: inputs.call(backend, validate=False, **functions)


def _timed_backward(case: Case, device: str) -> tuple[Problem, Callable[[str], Any]]:
    """A backward pass over what plain torch gave: the oracle would need all scores in float64."""
    inputs = make(case, device, 0.0, sized=True)
    call = inputs.checked(return_lse=True)
    planner.load("torch").run(planner.choose(call.problem, "torch"), call.tensors)
    back = backward(call, Options(), call.lse, torch.randn_like(call.out), None, ("q", "k", "v"))

    def run_backward(backend: str) -> None:
        plan = planner.choose(back.problem, backend, torch.get_num_threads())
        planner.load_backward(plan.backend).run_backward(plan, back.tensors)

    return back.problem, run_backward


def _wait(device: str) -> None:
    kind = torch.device(device).type
    if kind != "cpu":
        getattr(torch, kind).synchronize()


KINDS: dict[str, Callable[[Check, str, str, Callable[[], None]], Found]] = {
    "case": _case,
    "functions": _with_function,
    "gradients": _gradients,
    "repeats": _repeats,
    "poison": _poison,
    "time": _time,
}
