"""Backward passes in the call cache: one like those before is launched without checks or a plan.

It is remembered as a forward call is, by its options and the properties of all its tensors. What a check makes of them
are views of the same memory, so of other tensors those are made by shape and stride alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..core.plan import Plan
from ..core.problem import Problem
from ..core.tensors import BackwardTensors, Tensors
from ..validation.backward import BackwardCall
from . import activity, call_cache, planner

FIELDS = tuple(f.name for f in fields(Tensors) if f.name != "tile_map")
INCOMING = ("dout", "dlse")
View = tuple[str, tuple[torch.Size, tuple[int, ...]] | None]  # an argument, and its shape and strides if they change


@dataclass(slots=True)
class CachedBackward:
    """One remembered backward pass."""

    plan: Plan
    run: Callable[[Plan, BackwardTensors], None]
    count: Callable[[], int]
    layout: str
    views: list[View]
    incoming: list[View]
    gradients: list[tuple[str, torch.Size, tuple[int, ...], torch.dtype]]  # with strides that leave no gap

    def __call__(self, given: dict[str, Any]) -> BackwardCall:
        seen, coming = (
            {name: given[name] if view is None else given[name].as_strided(*view) for name, view in views}
            for views in (self.views, self.incoming)
        )
        device = self.plan.problem.device
        new = {
            f"d{name}": torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for name, shape, stride, dtype in self.gradients
        }
        tensors = BackwardTensors(Tensors(**seen), **coming, **new)
        self.run(self.plan, tensors)
        self.count()
        return BackwardCall(self.plan.problem, tensors, self.layout)


def key_of(given: dict[str, Any], grads: tuple[str, ...]) -> call_cache.Key | None:
    """What a backward pass is remembered by. `given` are its arguments, and options that were given."""
    strict = torch.are_deterministic_algorithms_enabled()
    args = given["q"], given["k"], given["v"]
    rest = {name: x for name, x in given.items() if name not in ("q", "k", "v")}
    return call_cache.key_of("attention_backward", args, rest | {"grads": grads, "strict": strict})


def remember(key: call_cache.Key | None, call: BackwardCall, plan: Plan, given: dict[str, Any]) -> None:
    """Keeps a backward pass that has just run, if nothing in it was copied, converted or read from a table."""
    p, b = call.problem, call.tensors
    if key is None or p.is_empty or p.copies or b.forward.tile_map is not None or _reads_lengths(p, given):
        return
    views, incoming = _views(b.forward, FIELDS, given), _views(b, INCOMING, given)
    if views is None or incoming is None:
        return
    new = [(name, x.shape, x.stride(), x.dtype) for name, x in b.gradients().items()]
    run = planner.load_backward(plan.backend).run_backward
    call_cache.keep(key, CachedBackward(plan, run, activity.counter(plan), call.layout, views, incoming, new))


def _reads_lengths(p: Problem, given: dict[str, Any]) -> bool:
    """Whether the plan is for the longest sequence that was found."""
    return p.form == "varlen" and (given.get("max_q") is None or given.get("max_k") is None)


def _views(held: Tensors | BackwardTensors, names: tuple[str, ...], given: dict[str, Any]) -> list[View] | None:
    """The fields that are tensors, each as a view of the argument of its name; None if one is not."""
    found: list[View] = []
    for name in names:
        x, source = getattr(held, name), given.get(name)
        if x is None:
            continue
        if not isinstance(source, torch.Tensor) or source.dtype != x.dtype or source.data_ptr() != x.data_ptr():
            return None
        if (source.shape[-1] == 1 or source.stride(-1) != 1) and x.is_floating_point():
            return None  # it would have the key of a view that torch negates: `z.conj().imag`
        same = (x.shape, x.stride()) == (source.shape, source.stride())
        found.append((name, None if same else (x.shape, x.stride())))
    return found
