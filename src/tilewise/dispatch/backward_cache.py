"""Backward passes in the call cache: a repeated one is launched without validation and planning.

Its key is made as that of a forward call, of the options and the properties of all tensors. Validation only makes views
of the arguments, so a repeated pass makes the same views, by shape and strides, of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..core.plan import Plan
from ..core.problem import Problem
from ..core.tensors import FIELDS, BackwardTensors, Tensors, as_fields
from ..validation.backward import BackwardCall
from . import activity, call_cache, planner

INCOMING = ("dout", "dlse")
Source = tuple[str, call_cache.View | None]  # an argument, and the view of it that is taken, if not itself


@dataclass(slots=True)
class CachedBackward:
    """One repeated backward pass."""

    plan: Plan
    run: Callable[[Plan, BackwardTensors], None]
    count: Callable[[], int]
    layout: str
    views: list[Source]  # of the forward call's inputs, out and lse
    incoming: list[Source]  # of dout and dlse
    gradients: list[tuple[str, torch.Size, tuple[int, ...], torch.dtype]]  # name, shape, dense strides, dtype
    captures: bool  # functions of the user read tensors

    def __call__(self, arguments: dict[str, Any]) -> BackwardCall:
        forward, incoming = (
            {name: arguments[name] if view is None else arguments[name].as_strided(*view) for name, view in views}
            for views in (self.views, self.incoming)
        )
        device = self.plan.problem.device
        new = {
            name: torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for name, shape, stride, dtype in self.gradients
        }
        captured = arguments["score_mod"].tensors if self.captures else ()
        tensors = BackwardTensors(Tensors(**forward, captured=captured), **incoming, **as_fields(new))
        self.run(self.plan, tensors)
        self.count()
        return BackwardCall(self.plan.problem, tensors, self.layout)


def key_of(arguments: dict[str, Any], grads: tuple[str, ...]) -> call_cache.Key | None:
    """The cache key of a backward pass; `arguments` include its options."""
    strict = torch.are_deterministic_algorithms_enabled()
    args = arguments["q"], arguments["k"], arguments["v"]
    options = {name: x for name, x in arguments.items() if name not in ("q", "k", "v")}
    return call_cache.key_of("attention_backward", args, options | {"grads": grads, "strict": strict})


def remember(key: call_cache.Key | None, call: BackwardCall, plan: Plan, arguments: dict[str, Any]) -> None:
    """Puts a backward pass that has just run into the cache, unless validation copied, converted or read something."""
    p, b = call.problem, call.tensors
    if key is None or p.is_empty or p.copies or b.forward.tile_map is not None or _reads_lengths(p, arguments):
        return
    views, incoming = _views(b.forward, FIELDS, arguments), _views(b, INCOMING, arguments)
    if views is None or incoming is None:
        return
    new = [(name, x.shape, x.stride(), x.dtype) for name, x in b.gradients().items()]
    run = planner.load_backward(plan.backend).run_backward
    call_cache.keep(
        key, CachedBackward(plan, run, activity.counter(plan), call.layout, views, incoming, new, p.mods is not None)
    )


def _reads_lengths(p: Problem, arguments: dict[str, Any]) -> bool:
    """Whether the plan is for the longest sequence that validation found in the offsets."""
    return p.form == "varlen" and (arguments.get("max_q") is None or arguments.get("max_k") is None)


def _views(fields: Tensors | BackwardTensors, names: tuple[str, ...], arguments: dict[str, Any]) -> list[Source] | None:
    """The fields that hold a tensor, each as a view of the argument of its name; None if one is not a view of it."""
    found: list[Source] = []
    for name in names:
        x, source = getattr(fields, name), arguments.get(name)
        if x is None:
            continue
        if not isinstance(source, torch.Tensor) or not call_cache.same_memory(x, source, name):
            return None
        found.append((name, call_cache.view_of(x, source)))
    return found
