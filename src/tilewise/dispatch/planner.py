"""Chooses the backend of a call or backward pass: the first in `BACKENDS` that supports it. Plans are cached by
`Problem`.

A backend is a module of `tilewise.backends` with the functions of `Backend`. It may have these too (`optional`):

- `declines(problem)`: why a later backend is the better choice for a problem that this one supports, or None.
- `family(problem)` and `unproven(problem)`: the kernels that serve it, by a name, and what no record says of them here.
- `proof_facts(device)`: the device, driver and compiler that a proof of its kernels holds for (`proofs.py`), or None.
- `bind(plan, tensors)`: a function that runs the same call on other tensors, for `call_cache.py`, or None. They differ
  in their addresses only and come in the order of the fields of `Tensors`: None for those that the call does not have,
  and none after `lse` if there are no more.
- `takes_shared(problem)`: whether it reads `k_shared` beside K. Else both are joined first.
- `run_cascade(shared_plan, plan, tensors, shared)`: cascade attention in one launch, for `cascade.py`.
- `cascade_gain(problem, rows, tokens)`: the seconds that a cascade saves.
- `merge_into(outs, lses, out, lse)`: merges partial results in one pass.
- `compile_loop(loop)`: compiles a plain loop over NumPy arrays.
- `serves(device)`: None, or why it cannot run on a device. Needed with any of the last four.
- `machines()`: other machines that it can plan for: `core/machines.py`.
- `supports_write(problem)` and `writer(k, v, wrap)`: stores new rows of K and V in caches.
- `supports_backward`, `plan_backward` and `run_backward`: a backward pass, as in `Backward`; with them perhaps
  `declines_backward(problem)`.
- `plan_statistics(problem)`, `run_statistics(plan, tensors, statistics)` and `run_statistics_gradients(plan,
  backward_tensors, statistics)`: what `return_aux` requests, in a pass of its own that reads `lse`, and its gradients.
- `plan_derivatives(problem)`, `run_tangent(plan, tensors, tangents)` and `run_second_order(plan, backward_tensors,
  tangents)`: forward mode, and the gradients of that, in which double backward consists.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import numpy as np
import torch

from ..core.kv_store import Store, Writer
from ..core.machines import Machine
from ..core.plan import Lacking, OtherDevice, Plan, Unproven
from ..core.problem import CascadeProblem, Problem, WriteProblem
from ..core.tensors import BackwardTensors, Tensors
from ..errors import InvalidArgument, Unsupported
from . import proofs

# Best first; each is a module of tilewise.backends.
BACKENDS = ("hopper", "triton", "metal", "cpu", "torch", "reference")
_warned: set[str] = set()


class Backend(Protocol):
    """A module of `tilewise.backends`."""

    def supports(self, problem: Problem) -> str | None:
        """None if it can serve the problem, else why not, in a few words."""

    def plan(self, problem: Problem) -> Plan:
        """How it would serve a problem that it supports."""

    def run(self, plan: Plan, tensors: Tensors) -> None:
        """Writes every row of `tensors.out` and, if it is there, of `tensors.lse`."""


class Backward(Protocol):
    """A module of `tilewise.backends` with a backward pass. The problems that it is given have `grads`."""

    def supports_backward(self, problem: Problem) -> str | None:
        """None if it can compute the gradients in `problem.grads`, else why not, in a few words."""

    def plan_backward(self, problem: Problem) -> Plan:
        """How it would compute the gradients of a problem that it supports."""

    def run_backward(self, plan: Plan, tensors: BackwardTensors) -> None:
        """Writes every element of the gradients that are in `tensors`; reads the rest."""


@cache
def load(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f"tilewise.backends.{name}"))


def load_backward(name: str) -> Backward:
    """A backend that has a backward pass."""
    return cast(Backward, load(name))


def optional(name: str, function: str) -> Callable[..., Any] | None:
    """An optional function of a backend, None if it does not have it. They are listed above."""
    return getattr(load(name), function, None)


def check_name(backend: Any) -> None:
    """Refuses a name that no backend has. Also an unhashable value, which the cache of `choose` could not take."""
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise InvalidArgument("backend", repr(backend), f"None or one of {', '.join(BACKENDS)}")


@lru_cache(maxsize=4096)
def choose(problem: Problem, backend: str | None = None, threads: int | None = None) -> Plan:
    """The plan for `problem` by the named backend, or by the best that supports it. With `grads` it is a backward pass.

    `threads` is torch's number of threads. It is only part of the cache key: backends ask torch themselves.
    """
    return _choose(problem, backend, here=True)


proofs.forgetters.append(choose.cache_clear)


def choose_elsewhere(problem: Problem, backend: str | None = None, threads: int | None = None) -> Plan:
    """As `choose`, for a machine that is not here: by records alone."""
    return _choose(problem, backend, here=False)


def _choose(problem: Problem, backend: str | None, here: bool) -> Plan:
    check_name(backend)
    if backend is not None:
        problem = _as_taken(backend, problem)
        reason = supports(backend, problem)
        if reason is not None:
            raise Unsupported(backend, reason, "leave out backend= to take one that can")
        return _noted(_plan(backend, problem), trust(backend, problem, here, asks=here)[1])
    given = problem
    passed_over: list[tuple[str, str]] = []
    for name in BACKENDS:
        problem = _as_taken(name, given)
        reason = supports(name, problem)
        declines = optional(name, "declines_backward" if problem.grads else "declines")
        if declines is not None and not problem.is_empty and (reason is None or isinstance(reason, Lacking)):
            slower = declines(problem)
            if reason is None or slower is not None:
                reason = slower
        if reason is None:
            taken, words = trust(name, problem, here, asks=here)
            if taken:
                return replace(_noted(_plan(name, problem), words), passed_over=tuple(passed_over))
            reason = Lacking(f"{words}, backend={name!r} uses it anyway")
        if here and isinstance(reason, Lacking):
            _warn(name, problem, reason)
        passed_over.append((name, reason))
    listing = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise Unsupported("any", listing, "move the tensors to the CPU")


def trust(name: str, problem: Problem, here: bool = True, asks: bool = False) -> tuple[bool, str | None]:
    """Whether a backend that supports a problem is taken without being named, and what is to be said of it.

    What this machine has shown decides; where it has not been asked, what records say. Times decide where no record
    does, or a busy machine would undo what was measured on a quiet one. `asks`: with TILEWISE_PROVE=auto it is asked
    now.
    """
    if problem.is_empty or optional(name, "family") is None:
        return True, None
    question = optional(name, "unproven")
    unproven = None if question is None else question(problem)
    facts = proof_facts(name, problem.device) if here and proofs.matter() else None
    found = _verdict(name, problem, facts)
    if asks and found.kind == "open" and unproven is not None and facts is not None:
        proofs.prove_now(facts, problem.device)
        found = _verdict(name, problem, facts)
    kernels = f"the {family(name, problem)} kernels"
    if found.kind == "failed":
        return False, f"{kernels} failed on this machine by `tilewise prove`, {found.why}"
    if found.kind == "slower" and unproven is not None:
        return False, f"{kernels} took {found.why} on this machine by `tilewise prove`"
    if unproven is None or found.kind == "proven":
        return True, None
    return unproven.taken, f"{unproven.what}: {_offer(name, unproven, facts, here)}"


def family(name: str, problem: Problem) -> str:
    """The kernels of a backend that serve a problem: what is proven, or fails, together."""
    of = optional(name, "family")
    return "" if of is None else of(problem)


@lru_cache(maxsize=64)
def proof_facts(name: str, device: torch.device) -> proofs.Facts | None:
    """What a proof of a backend's kernels on a device holds for; None where there can be none."""
    of = optional(name, "proof_facts")
    own = None if of is None else of(device)
    return None if own is None else proofs.complete(own)


proofs.forgetters.append(proof_facts.cache_clear)


def _verdict(name: str, problem: Problem, facts: proofs.Facts | None) -> proofs.Verdict:
    proof = None if facts is None else proofs.kept(facts)
    return proofs.Verdict("open") if proof is None else proof.verdict(name, family(name, problem))


def _offer(name: str, unproven: Unproven, facts: proofs.Facts | None, here: bool) -> str:
    """What `tilewise prove` would change."""
    result = "removes this note" if unproven.taken else f"lets calls use {name} where it is correct and faster"
    new = None if facts is None else proofs.changed(facts)
    since = f"; since the last time: {new}" * (new is not None)
    return f"`tilewise prove` checks them on {'this' if here else 'that'} machine, and {result}{since}"


def _noted(plan: Plan, note: str | None) -> Plan:
    return plan if note is None else replace(plan, notes=(note, *plan.notes))


def _warn(name: str, problem: Problem, reason: str) -> None:
    """Once for each backend: its kernels are for this device, and are not used."""
    if name not in _warned:
        _warned.add(name)
        text = f"tilewise: the {name} kernels are not used on this {device_name(problem.device)}: {reason}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else device.type


@cache
def machines() -> dict[str, Machine]:
    """Machines by name that calls can be planned for without having them."""
    found: dict[str, Machine] = {}
    for name in BACKENDS:
        if (known := optional(name, "machines")) is not None:
            found |= known()
    return found


def choose_on(machine: str, problem: Problem, backend: str | None, threads: int) -> Plan:
    """The plan that `choose` would make on another machine, by records. It is not cached, and cannot be run."""
    known = machines()
    if not isinstance(machine, str) or machine not in known:
        raise InvalidArgument("device", repr(machine), f"None, for this machine, or one of {', '.join(known)}")
    other = known[machine]
    there = replace(problem, device=torch.device(other.device))
    chosen = other.choose(choose_elsewhere, there, backend, threads)
    note = () if problem.grads else (f"planned for {machine} ({other.about}), not for this machine",)
    return replace(chosen, notes=chosen.notes + note)


_writers: WeakValueDictionary[Any, Any] = WeakValueDictionary()


def writer(k: Store, v: Store, wrap: int) -> Writer:
    """A writer of new rows of `k` and `v` `[B or pages, Hkv, slots, columns]`: position p in slot `p % wrap`.

    For the same memory, a writer that is still in use is returned again, with the launches that it has cached.
    """
    tensors = [x for x in (k.data, k.scales, v.data, v.scales) if x is not None]
    key = (k.format, v.format, v.inside, wrap, *((x.data_ptr(), x.device, x.shape, x.stride()) for x in tensors))
    if (known := _writers.get(key)) is None:
        name = choose_writer(WriteProblem(k.data.device, k.format.storage, v.format.storage))
        known = _writers[key] = cast(Any, load(name)).writer(k, v, wrap)
    return cast(Writer, known)


@lru_cache(maxsize=256)
def choose_writer(problem: WriteProblem) -> str:
    """The best backend that can store the rows of a cache."""
    for name in BACKENDS:
        supports_write = optional(name, "supports_write")
        if supports_write is not None and supports_write(problem) is None:
            return name
    raise Unsupported("any", f"no backend writes on {problem.device}", "keep the cache on the CPU")


def cascade_gain(problem: CascadeProblem, rows: np.ndarray, tokens: int) -> float:
    """Seconds saved if sequences with `rows` queries each share one pass over a prefix of `tokens`; 0 if unknown."""
    gain = _first_with("cascade_gain", problem.device)
    return 0.0 if gain is None else gain(problem, rows, tokens)


def merge_into(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor, lse: Any) -> bool:
    """Merges partial results on a GPU in one pass or, without `lse`, sums them; False if no backend can."""
    on_device = not out.is_cpu and out.dtype != torch.float64
    merge = _first_with("merge_into", out.device) if on_device else None
    return merge is not None and merge(outs, lses, out, lse)


def compile_loop(loop: Callable[..., Any]) -> Callable[..., Any]:
    """A plain loop over NumPy arrays, compiled if a backend can; else the (slow) loop itself."""
    compiled = _first_with("compile_loop", torch.device("cpu"))
    return loop if compiled is None else compiled(loop)


def runs_cascades(device: torch.device) -> bool:
    """Whether a backend can run a cascade in one launch."""
    return _first_with("run_cascade", device) is not None


def derivatives(problem: Problem, function: str) -> tuple[Plan, Callable[..., None]]:
    """The plan of a derivative that only some backends have, by the first that does, and its function: `run_tangent`
    or `run_second_order`.
    """
    return _by_first_with(function, "plan_derivatives", problem, None)


def statistics(
    problem: Problem, backend: str | None, function: str = "run_statistics"
) -> tuple[Plan, Callable[..., None]]:
    """The plan of a call's statistics or of their gradients, by the call's backend if that has them, else by the best,
    and its function.
    """
    check_name(backend)
    return _by_first_with(function, "plan_statistics", problem, backend)


def _by_first_with(function: str, plan: str, problem: Problem, first: str | None) -> tuple[Plan, Callable[..., None]]:
    for name in BACKENDS if first is None else (first, *BACKENDS):
        if (run := optional(name, function)) is not None:
            return getattr(load(name), plan)(problem), run
    raise Unsupported("any", f"none has {function}", "leave it out")


@cache
def _first_with(function: str, device: torch.device) -> Callable[..., Any] | None:
    """An optional function of the best backend for a device that has it."""
    for name in BACKENDS:
        found = optional(name, function)
        if found is not None and cast(Any, load(name)).serves(device) is None:
            return found
    return None


def _as_taken(name: str, problem: Problem) -> Problem:
    """The problem as a backend takes it: with `k_shared` joined to K unless it reads both."""
    if not problem.k_shared_dim:
        return problem
    takes = optional(name, "takes_shared")
    return problem if takes is not None and takes(problem) else problem.with_joined_keys()


def supports(name: str, problem: Problem) -> str | None:
    """None if the backend can serve the problem, forward or backward, else why not."""
    if not problem.grads:
        return load(name).supports(problem)
    if optional(name, "supports_backward") is not None:
        return load_backward(name).supports_backward(problem)
    reason = load(name).supports(problem)
    return reason if isinstance(reason, OtherDevice) else "no backward pass"


def _plan(name: str, problem: Problem) -> Plan:
    """The backend's plan. A problem with nothing to compute is never launched, so the backend is not asked."""
    if problem.is_empty:
        return Plan(problem, name, "nothing to compute", tile=(64, 64))
    return load_backward(name).plan_backward(problem) if problem.grads else load(name).plan(problem)
