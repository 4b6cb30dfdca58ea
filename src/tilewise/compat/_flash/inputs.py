"""FlashAttention 3's extra inputs: `qv`, a second query, and float8 with descale factors.

Both become a plain call. `qv` multiplies V: `q k + qv v = [q, qv] [k, v]`. Descale factors are one number for each
sequence and KV head, so they factor out of the sums: those of q and k are multiplied into q, that of v into the output.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...core.problem import MAX_HEAD_DIM
from ...core.tracing import is_traced
from ...errors import InvalidArgument
from ...quantised import Quantised
from ...state import AttentionState

if TYPE_CHECKING:
    from .options import Later

FP8 = torch.float8_e4m3fn


class Rows(NamedTuple):
    """The rows of a packed tensor: their sequence, their index in it, and whether they belong to one at all."""

    sequence: torch.Tensor
    place: torch.Tensor
    valid: torch.Tensor

    @classmethod
    def of(cls, offsets: torch.Tensor, rows: int) -> Rows:
        """For `rows` rows with offsets `[B + 1]`; computed on the device."""
        at = torch.arange(rows, dtype=torch.int64, device=offsets.device)
        ends = offsets[1:].to(torch.int64)
        sequence = torch.searchsorted(ends, at, right=True).clamp(max=max(len(ends) - 1, 0))
        return cls(sequence, at - offsets[sequence], at < offsets[-1])


class Inputs(NamedTuple):
    """q, k and v of a tilewise call, and the factor and dtype of its output."""

    q: torch.Tensor
    k: Any
    v: Any
    options: dict[str, Any]
    factor: torch.Tensor | None = None
    dtype: torch.dtype | None = None

    def result(self, result: Any, out: torch.Tensor | None = None) -> Any:
        """FlashAttention's output from that of the call; written to `out` if it is given."""
        values, lse = result if isinstance(result, AttentionState) else (result, None)
        if self.factor is not None:
            values = values * self.factor
        if self.dtype is not None:
            values = values.to(self.dtype)
        if out is not None and values is not out:
            if out.shape != values.shape or out.dtype != values.dtype or out.device != values.device:
                given, want = (f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (out, values))
                raise InvalidArgument("out", given, want)
            values = out.copy_(values)
        return values if lse is None else AttentionState(values, lse)


def stored(x: torch.Tensor) -> Any:
    """K or V in float8 as `Quantised` with scales of 1, over the same memory; others unchanged."""
    if x.dtype != FP8:
        return x
    ones = torch.ones(-(-x.shape[-1] // 128), dtype=torch.float32, device=x.device)
    return Quantised(x, ones.expand(*x.shape[:-1], -1), "fp8_e4m3", 128)


def needs_inputs(q: torch.Tensor, k: torch.Tensor, later: Later) -> bool:
    """Whether a call needs `inputs`."""
    return q.dtype is FP8 or k.dtype is FP8 or later.get("qv") is not None or later.get("q_v") is not None


def second_query(q: torch.Tensor, v: torch.Tensor, later: Later) -> torch.Tensor | None:
    """`qv` or `q_v`, checked."""
    qv, other = later.get("qv"), later.get("q_v")
    if qv is not None and other is not None:
        raise InvalidArgument("q_v", "both q_v and qv", "one of them: both mean the same")
    qv = other if qv is None else qv
    if qv is not None and (tuple(qv.shape) != (*q.shape[:-1], v.shape[-1]) or qv.dtype != q.dtype):
        given, want = f"{tuple(qv.shape)} {qv.dtype}", f"{(*q.shape[:-1], v.shape[-1])} {q.dtype}, as q and v"
        raise InvalidArgument("qv", given, want)
    if qv is not None and FP8 in (q.dtype, v.dtype):
        raise InvalidArgument("qv", "a second query in float8", "float16, bfloat16 or float32", "widen q, k and v")
    if qv is not None and q.shape[-1] + v.shape[-1] > MAX_HEAD_DIM:
        raise InvalidArgument("qv", f"head dims {q.shape[-1]} + {v.shape[-1]}", f"at most {MAX_HEAD_DIM} in all")
    return qv


def descales(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, later: Later, batch: int) -> dict[str, torch.Tensor]:
    """The factors `[B, Hkv]` of those of q, k and v that are in float8, checked."""
    factors = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        factor: Any = later.get(f"{name}_descale")
        if factor is not None and x.dtype == FP8:
            factors[name] = _descale(f"{name}_descale", factor, batch, k.shape[-2], q.device)
    return factors


def inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: dict[str, Any],
    later: Later,
    batch: int,
    offsets: torch.Tensor | None = None,
) -> Inputs:
    """The plain call equivalent to one with `qv` or float8; `offsets` are those of packed queries."""
    qv = second_query(q, v, later)
    if qv is not None:
        if options.get("scale") is None:
            options = {**options, "scale": (q.shape[-1] + v.shape[-1]) ** -0.5}
        if (both := _joined_view(v, k)) is not None:
            return Inputs(torch.cat((qv, q), -1), both, v, options)
        return Inputs(torch.cat((q, qv), -1), torch.cat((k, v), -1), v, options)
    if FP8 not in (q.dtype, k.dtype, v.dtype):
        return Inputs(q, k, v, options)
    rows = None if offsets is None else Rows.of(offsets, q.shape[0])
    scales = descales(q, k, v, later, batch)

    def factor(*names: str) -> torch.Tensor | None:
        """The product of some scales for each row and head of q, or None if all are 1."""
        present = [scales[name] for name in names if name in scales]
        if not present:
            return None
        product = math.prod(present[1:], start=present[0])
        product = product.repeat_interleave(q.shape[-2] // k.shape[-2], 1)  # [B, H]
        return product[:, None, :, None] if rows is None else product[rows.sequence][..., None]

    dtype = torch.bfloat16 if q.dtype == FP8 else q.dtype
    of_scores, of_values = factor("q", "k"), factor("v")
    wide = q.float() if q.dtype == FP8 or of_scores is not None else q
    if of_scores is not None:
        wide = wide * of_scores
    return Inputs(wide, stored(k), stored(v), options, of_values, dtype)


def _descale(name: str, x: Any, batch: int, kv_heads: int, device: torch.device) -> torch.Tensor:
    """A number, or `[B, Hkv]`, as float32 `[B, Hkv]`."""
    scale = torch.as_tensor(x, dtype=torch.float32, device=device)
    if scale.numel() != 1 and tuple(scale.shape) != (batch, kv_heads):
        raise InvalidArgument(name, f"shape {tuple(scale.shape)}", f"a number or {(batch, kv_heads)}")
    return scale.reshape(1, 1).expand(batch, kv_heads) if scale.numel() == 1 else scale


def _joined_view(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """`[first, second]` as a view, if their rows are adjacent in memory; else None."""
    if is_traced() or first.stride() != second.stride() or first.stride(-1) != 1:
        return None
    if torch.is_grad_enabled() and (first.requires_grad or second.requires_grad):
        return None  # gradients of such a view would reach the first alone
    if first.dtype != second.dtype or first.shape[:-1] != second.shape[:-1]:
        return None
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return None
    if first.data_ptr() + first.shape[-1] * first.element_size() != second.data_ptr():
        return None
    width = first.shape[-1] + second.shape[-1]
    return first.as_strided((*first.shape[:-1], width), first.stride())
