"""Which backend serves a call or its backward pass: the first, best first, that can. Plans are kept by `Problem`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import numpy as np
import torch

from ..core.kv_store import Store, Writer
from ..core.machines import Machine
from ..core.plan import OtherDevice, Plan
from ..core.problem import CascadeProblem, Problem, WriteProblem
from ..core.tensors import BackwardTensors, Tensors
from ..errors import InvalidArgument, Unsupported

# Best first; each is a module of tilewise.backends.
BACKENDS = ("hopper", "triton", "metal", "cpu", "torch", "reference")


class Backend(Protocol):
    """What a module of `tilewise.backends` offers."""

    def supports(self, problem: Problem) -> str | None:
        """None if it can serve the problem, else why not, in a few words."""

    def plan(self, problem: Problem) -> Plan:
        """How it would serve a problem that it supports."""

    def run(self, plan: Plan, tensors: Tensors) -> None:
        """Writes `tensors.out` and, if it is there, `tensors.lse`; every row of both.

        A backend may also have `bind(plan, tensors)`, which gives a function that runs the same call on other tensors,
        or None. They differ from these in their addresses only, come in the order of the fields of `Tensors` (None for
        what a call does not have, nothing after `lse` if it has no more), and `call_cache.py` calls it. And
        `declines(problem)`, which says why one that comes later is the better choice for a problem that it supports.
        And `run_pair(shared_plan, plan, tensors, shared)`, which merges attention over keys that sequences share into
        that over their own, in one launch: `pairs.py`. And `cascade_gain(problem, rows, tokens)`, which says what that
        saves. And `compile_loop(loop)`, for plain loops over the host's arrays. With one of these three it has
        `serves(device)`, which gives None or why it cannot run there.

        `machines()` names other machines that it can plan for: `core/machines.py`.

        One that stores rows in caches has `supports_write(problem)` and `writer(k, v, wrap)`.

        One with a backward pass has `supports_backward(problem)`, `plan_backward(problem)` and `run_backward(plan,
        tensors)` beside these, all three as in `Backward`, and perhaps `declines_backward(problem)`.
        """


class Backward(Protocol):
    """What a module of `tilewise.backends` with a backward pass offers beside `Backend`. Each problem has `grads`."""

    def supports_backward(self, problem: Problem) -> str | None:
        """None if it can give the gradients that the problem asks for, else why not, in a few words."""

    def plan_backward(self, problem: Problem) -> Plan:
        """How it would give the gradients of a problem that it supports."""

    def run_backward(self, plan: Plan, tensors: BackwardTensors) -> None:
        """Writes every element of the gradients that are in `tensors`; reads the rest."""


@cache
def load(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f"tilewise.backends.{name}"))


def load_backward(name: str) -> Backward:
    """A backend that has a backward pass."""
    return cast(Backward, load(name))


def check_name(backend: Any) -> None:
    """Refuses what no backend is called, also what `choose` could not look up."""
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise InvalidArgument("backend", repr(backend), f"None or one of {', '.join(BACKENDS)}")


@lru_cache(maxsize=4096)
def choose(problem: Problem, backend: str | None = None, threads: int | None = None) -> Plan:
    """The plan for `problem`: by the best backend that can, or by the named one or not at all.

    `threads` is torch's number of them. Backends ask torch; here it keeps plans for other numbers apart. A problem with
    `grads` is a backward pass.
    """
    check_name(backend)
    if backend is not None:
        problem = _as_taken(backend, problem)
        reason = supports(backend, problem)
        if reason is not None:
            raise Unsupported(backend, reason, "leave out backend= to take one that can")
        return _plan(backend, problem)
    given = problem
    passed_over: list[tuple[str, str]] = []
    for name in BACKENDS:
        backend_module = load(name)
        problem = _as_taken(name, given)
        reason = supports(name, problem)
        declines = getattr(backend_module, "declines_backward" if problem.grads else "declines", None)
        if reason is None and declines is not None and not problem.is_empty:
            reason = declines(problem)
        if reason is None:
            return replace(_plan(name, problem), passed_over=tuple(passed_over))
        passed_over.append((name, reason))
    listing = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise Unsupported("any", listing, "move the tensors to the CPU")


@cache
def machines() -> dict[str, Machine]:
    """Machines that calls can be planned for without having them, by name."""
    found: dict[str, Machine] = {}
    for name in BACKENDS:
        module: Any = load(name)
        found |= module.machines() if hasattr(module, "machines") else {}
    return found


def choose_on(machine: str, problem: Problem, backend: str | None, threads: int) -> Plan:
    """The plan that `choose` would make on another machine. It is not kept, and cannot be run."""
    known = machines()
    if not isinstance(machine, str) or machine not in known:
        raise InvalidArgument("device", repr(machine), f"None, for this machine, or one of {', '.join(known)}")
    other = known[machine]
    there = replace(problem, device=torch.device(other.device))
    chosen = other.choose(choose.__wrapped__, there, backend, threads)
    note = () if problem.grads else (f"planned for {machine} ({other.about}), not for this machine",)
    return replace(chosen, notes=chosen.notes + note)


_writers: WeakValueDictionary[Any, Any] = WeakValueDictionary()


def writer(k: Store, v: Store, wrap: int) -> Writer:
    """What stores new rows in `k` and `v`, each `[B or pages, Hkv, slots, columns]`: position p in slot `p % wrap`.

    One that somebody holds is given again for the same memory, with the launches that it remembers.
    """
    tensors = [x for x in (k.data, k.scales, v.data, v.scales) if x is not None]
    key = (k.format, v.format, v.inside, wrap, *((x.data_ptr(), x.device, x.shape, x.stride()) for x in tensors))
    if (known := _writers.get(key)) is None:
        module: Any = load(choose_writer(WriteProblem(k.data.device, k.format.storage, v.format.storage)))
        known = _writers[key] = module.writer(k, v, wrap)
    return cast(Writer, known)


@lru_cache(maxsize=256)
def choose_writer(problem: WriteProblem) -> str:
    """The backend that stores a cache's rows: the best that can."""
    for name in BACKENDS:
        module: Any = load(name)
        if hasattr(module, "writer") and module.supports_write(problem) is None:
            return name
    raise Unsupported("any", f"no backend writes on {problem.device}", "keep the cache on the CPU")


def cascade_gain(problem: CascadeProblem, rows: np.ndarray, tokens: int) -> float:
    """Seconds saved if sequences with `rows` queries each share one pass over a prefix of `tokens`; 0 if unknown."""
    name = _first_with("cascade_gain", problem.device)
    return 0.0 if name is None else cast(Any, load(name)).cascade_gain(problem, rows, tokens)


def merge_into(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor, lse: Any) -> bool:
    """Merges partial results on a GPU in one pass or, without `lse`, adds them up; False where no backend does so."""
    name = None if out.is_cpu else _first_with("merge_into", out.device)
    return name is not None and cast(Any, load(name)).merge_into(outs, lses, out, lse)


def compile_loop(loop: Callable[..., Any]) -> Callable[..., Any]:
    """A plain loop over the host's arrays, compiled if a backend can, else as it is: the same, and slow."""
    name = _first_with("compile_loop", torch.device("cpu"))
    return loop if name is None else cast(Any, load(name)).compile_loop(loop)


def runs_pairs(device: torch.device) -> bool:
    """Whether a backend can run two calls over the same queries in one launch."""
    return _first_with("run_pair", device) is not None


@cache
def _first_with(function: str, device: torch.device) -> str | None:
    """The best backend that has an optional function for a device."""
    for name in BACKENDS:
        module: Any = load(name)
        if hasattr(module, function) and module.serves(device) is None:
            return name
    return None


def _as_taken(name: str, problem: Problem) -> Problem:
    """The problem as a backend takes it: most read keys of one tensor."""
    if not problem.shared:
        return problem
    takes = getattr(load(name), "takes_shared", None)
    return problem if takes is not None and takes(problem) else problem.whole()


def supports(name: str, problem: Problem) -> str | None:
    """None if the backend can serve the problem, forward or backward, else why not."""
    module: Any = load(name)
    if not problem.grads:
        return module.supports(problem)
    if hasattr(module, "supports_backward"):
        return module.supports_backward(problem)
    reason = module.supports(problem)
    return reason if isinstance(reason, OtherDevice) else "no backward pass"


def _plan(name: str, problem: Problem) -> Plan:
    """A backend's plan; it is not asked about a problem with nothing to compute, which is never launched."""
    if problem.is_empty:
        return Plan(problem, name, "nothing to compute", tile=(64, 64))
    module: Any = load(name)
    return module.plan_backward(problem) if problem.grads else module.plan(problem)
