"""Calls that come again: checked and planned once, then launched for tensors that differ in their address only.

Checking and planning take tens of microseconds, a small decode call less than that. A call is remembered by everything
that a check or a plan could depend on: `Bound`, one of `attention` with nothing but q, k and v for tensors, which a
backend can launch by addresses; `Again`, one with lengths, offsets or tables whose values are not to be checked, or one
with quantised keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ..core.plan import Plan
from ..core.tensors import Tensors
from ..quantised import Quantised
from ..state import AttentionState
from ..validation.arrays import to_tensor
from ..validation.calls import Call
from . import planner

MOST = 4096  # remembered calls
Key = tuple[Any, ...]
Launcher = Callable[..., None]  # of q, k, v, out, lse or None; of quantised keys and values their scales too
Tables = tuple[
    Any, Any, Any, Any, Any
]  # the block table, lengths, sums of queries' and of keys' lengths, offsets; or None
NO_TABLES: Tables = (None, None, None, None, None)

_known: dict[Key, Bound] = {}
_again: dict[Key, Again] = {}


class Bound:
    """One remembered call."""

    __slots__ = ("launch", "like_q", "lse_shape", "shape")

    def __init__(self, call: Call, launch: Launcher, like_q: bool) -> None:
        self.launch = launch
        self.shape = tuple(call.out.shape)
        self.lse_shape = None if call.lse is None else tuple(call.lse.shape)
        self.like_q = like_q  # the output has q's shape and strides

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | AttentionState:
        try:
            out = torch.empty_like(q) if self.like_q else q.new_empty(self.shape)  # 0.9 and 1.5 us
            if self.lse_shape is None:
                self.launch(q, k, v, out, None)
                return out
            lse = q.new_empty(self.lse_shape, dtype=torch.float32)
            self.launch(q, k, v, out, lse)
            return AttentionState(out, lse)
        except RuntimeError:
            for name, x in (("q", q), ("k", k), ("v", v)):
                to_tensor(name, x)  # a tensor without strided memory (mkldnn) may have the key of one with it
            raise


def is_exact(
    scale: Any,
    causal: Any,
    window: Any,
    chunk: Any,
    softcap: Any,
    split_size: Any,
    return_lse: Any,
    allow_tf32: Any,
) -> bool:
    """Whether the options have the types that the checks ask for: 1, 1.0 and True are one key, but not one option."""
    return (
        (causal is False or causal is True)
        and (return_lse is False or return_lse is True)
        and (allow_tf32 is False or allow_tf32 is True)
        and (scale is None or isinstance(scale, float) or type(scale) is int)
        and (softcap is None or isinstance(softcap, float) or type(softcap) is int)
        and (chunk is None or type(chunk) is int)
        and (split_size is None or type(split_size) is int)
        and (window is None or type(window) is int or _is_pair(window))
    )


def _is_pair(window: Any) -> bool:
    if type(window) is not tuple or len(window) != 2:
        return False
    left, right = window
    return (left is None or type(left) is int) and (right is None or type(right) is int)


def key_of(q: Any, k: Any, v: Any, options: tuple[Any, ...]) -> Key | None:
    """What a call is remembered by; None if it has to be checked each time.

    Strides follow from the shape of a contiguous tensor (but those of dims of size 1, which nobody steps along), and
    that it is one is asked for and hashed in half the time.
    """
    if not (type(q) is type(k) is type(v) is torch.Tensor) or forward_ad._current_level >= 0:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    try:
        return (
            q.shape, q.is_contiguous() or q.stride(), q.dtype, q.is_cpu or q.device,
            k.shape, k.is_contiguous() or k.stride(), k.dtype, k.is_cpu or k.device,
            v.shape, v.is_contiguous() or v.stride(), v.dtype, v.is_cpu or v.device,
            torch.get_num_threads(), options,
        )  # fmt: skip
    except RuntimeError:  # a nested or compressed sparse tensor has no shape or strides: the checks will say so
        return None


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
    if 1 in (call.problem.head_dim, call.problem.value_dim):
        return  # any stride is a unit stride there, so that the key would also be that of `(z.conj()).imag`
    if len(_known) >= MOST:
        _known.clear()
    like_q = key[0] == call.out.shape and key[1] == (call.out.is_contiguous() or call.out.stride())
    _known[key] = Bound(call, bind(plan, call.tensors), like_q)


class Again:
    """One remembered call with tables: no checks and no choice, then the way of every call."""

    __slots__ = ("form", "launch", "lse_shape", "plan", "run", "shape")

    def __init__(self, call: Call, plan: Plan, layout: Any, launch: Launcher | None = None) -> None:
        self.plan, self.run = plan, planner.load(plan.backend).run
        self.launch = launch  # by the addresses of quantised keys and values, if the backend can
        self.shape = call.out.shape
        self.lse_shape = None if call.lse is None else call.lse.shape
        self.form = "packed" if plan.problem.packed_q else layout

    def __call__(self, q: torch.Tensor, k: Any, v: Any, tables: Tables) -> torch.Tensor | AttentionState:
        out, lse = self.new(q)
        if self.launch is None:
            self.run(self.plan, self.tensors(q, k, v, tables, out, lse))
        else:
            (k, k_scales), (v, v_scales) = _parts(k), _parts(v)
            self.launch(q, k, v, out, lse, k_scales, v_scales)
        return out if lse is None else AttentionState(out, lse)

    def new(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Room for the result."""
        out = q.new_empty(self.shape)
        return out, None if self.lse_shape is None else q.new_empty(self.lse_shape, dtype=torch.float32)

    def tensors(
        self, q: torch.Tensor, k: Any, v: Any, tables: Tables, out: torch.Tensor, lse: torch.Tensor | None
    ) -> Tensors:
        seq_major = self.form == "blhd" or tables[0] is not None
        packed_k = tables[3] is not None
        (k_data, k_scales), (v_data, v_scales) = _parts(k), _parts(v)
        if seq_major or packed_k:
            k_data, k_scales, v_data, v_scales = (
                x if x is None else x.transpose(0, 1)[None] if packed_k else x.transpose(1, 2)
                for x in (k_data, k_scales, v_data, v_scales)
            )
        common = self.common
        t = Tensors(common(q), k_data, v_data, common(out), None if lse is None else common(lse), k_scales, v_scales)
        t.block_table, t.kv_lengths, t.cu_seqlens_q, t.cu_seqlens_k, t.q_offset = tables
        return t

    def common(self, x: torch.Tensor) -> torch.Tensor:
        """q, out or lse as `[B, H, L, ...]`."""
        if self.form == "packed":
            return x.transpose(0, 1)[None]
        return x if self.form == "bhld" else x.transpose(1, 2)


def _parts(x: Any) -> tuple[Any, Any]:
    """Data and scales of keys or values, or None for the scales."""
    return (x.data, x.scales) if isinstance(x, Quantised) else (x, None)


def tables_key(q: Any, k: Any, v: Any, tables: Tables, *options: Any) -> Key | None:
    """What a call with tables is remembered by; None if it has to be checked each time."""
    if type(q) is not torch.Tensor or forward_ad._current_level >= 0:
        return None
    key: list[Any] = [options, torch.get_num_threads()]
    either = 0
    for x in (q, k, v):
        parts: tuple[Any, ...] = (x,)
        if type(x) is Quantised:
            parts = (x.data, x.scales)
            key.append((x.dtype, x.group))
        for part in parts:
            if type(part) is not torch.Tensor or (part.requires_grad and torch.is_grad_enabled()) or part.is_neg():
                return None
            try:
                key.append((part.shape, part.stride(), part.dtype, part.device))
                either |= part.data_ptr()
            except RuntimeError:  # it has no shape, strides or address: the checks will say so
                return None
    key.append(either % 16)
    for x in tables:
        if x is None:
            key.append(None)
        elif type(x) is torch.Tensor and x.dtype is torch.int32 and x.layout is torch.strided:
            key.append((x.shape, x.stride(), x.device))
        else:
            return None
    return tuple(key)


def is_hashable(key: Key | None) -> bool:
    """Whether it can be looked up: the checks will say what they think of an option that cannot."""
    try:
        hash(key)
    except TypeError:
        return False
    return True


def find_again(key: Key | None) -> Again | None:
    try:
        return _again.get(key) if key is not None else None
    except TypeError:
        return None


def remember_again(key: Key | None, call: Call, plan: Plan, layout: Any) -> None:
    """Keeps a call with tables, or of quantised keys and values, that has just run."""
    if key is None or call.problem.is_empty or call.problem.copies:
        return
    if len(_again) >= MOST:
        _again.clear()
    bind = getattr(planner.load(plan.backend), "bind_quantised", None)
    t = call.tensors
    has_tables = any(x is not None for x in (t.block_table, t.kv_lengths, t.cu_seqlens_q, t.cu_seqlens_k, t.q_offset))
    _again[key] = Again(call, plan, layout, None if bind is None or has_tables else bind(plan, t))


def forget() -> None:
    """Forgets every call; plans are kept by the planner."""
    _known.clear()
    _again.clear()
