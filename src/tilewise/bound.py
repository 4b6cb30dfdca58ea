"""Calls that come again: checked and planned once, then launched for tensors that differ in their address only.

Checking and planning take tens of microseconds, a small decode call less than that. A call of `attention` with nothing
but q, k and v for tensors is remembered by everything that a check or a plan could depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import planner
from .checks import Call
from .plan import Plan
from .state import AttentionState

MOST = 4096  # remembered calls
Key = tuple[Any, ...]
Launcher = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], None]

_known: dict[Key, Bound] = {}


class Bound:
    """One remembered call."""

    __slots__ = ("launch", "lse_shape", "shape")

    def __init__(self, call: Call, launch: Launcher) -> None:
        self.launch = launch
        self.shape = call.out.shape
        self.lse_shape = None if call.lse is None else call.lse.shape

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | AttentionState:
        out = q.new_empty(self.shape)
        if self.lse_shape is None:
            self.launch(q, k, v, out, None)
            return out
        lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        self.launch(q, k, v, out, lse)
        return AttentionState(out, lse)


def key_of(q: Any, k: Any, v: Any, *options: Any) -> Key | None:
    """What a call is remembered by; None if it has to be checked each time."""
    if not (type(q) is type(k) is type(v) is torch.Tensor):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    return (
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype,
        v.device, torch.get_num_threads(), options,
    )  # fmt: skip


def find(key: Key | None) -> Bound | None:
    try:
        return _known.get(key) if key is not None else None
    except TypeError:  # an option that cannot be hashed: the checks will say what they think of it
        return None


def remember(key: Key | None, call: Call, plan: Plan) -> None:
    """Keeps a call that has just run, if its backend can launch it again by addresses alone."""
    bind = getattr(planner.load(plan.backend), "bind", None)
    if key is None or bind is None or call.problem.is_empty or call.problem.copies:
        return
    if len(_known) >= MOST:
        _known.clear()
    _known[key] = Bound(call, bind(plan, call.tensors))


def forget() -> None:
    """Forgets every call; plans are kept by the planner."""
    _known.clear()
