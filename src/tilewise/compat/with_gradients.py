"""Attention that torch can differentiate, by tilewise's options: plain torch, with a mask of all cells.

It serves a model's forward pass outside of `torch.no_grad()`, which tilewise's kernels cannot: they have no backward.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.compiler import is_compiling

from ..core.mask_rules import NO_RULES, key_spans
from ..core.options import Options, as_rules

_told: list[bool] = []


def needed(*tensors: torch.Tensor) -> bool:
    """Whether a gradient may be asked of the result; the first time, what that means is told."""
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return False
    if not _told and not is_compiling():
        _told.append(True)
        message = "tilewise has no backward pass: torch serves tensors that require grad, with a dense mask"
        warnings.warn(f"{message}. Call the model under torch.no_grad() to run on tilewise", stacklevel=4)
    return True


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "bhld",
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    validate: bool | None = None,
    **rules: Any,
) -> torch.Tensor:
    """`tilewise.attention` for the options that transformers' models need; `rules` are those of positions."""
    if layout == "blhd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, L, D]
    seen = visible(q.shape[2], k.shape[2], q.device, **rules)
    if mask is not None and mask.dtype == torch.bool:
        seen, mask = mask if seen is None else seen & mask, None
    if softcap or sinks is not None:
        out = _spelled_out(q, k, v, scale, softcap, sinks, mask, seen)
    else:
        if mask is not None:
            mask = mask.to(q.dtype) if seen is None else mask.to(q.dtype).masked_fill(~seen, -torch.inf)
        grouped = q.shape[1] != k.shape[1]
        function = torch.nn.functional.scaled_dot_product_attention
        out = function(q, k, v, seen if mask is None else mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2) if layout == "blhd" else out


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    max_q: int | None = None,
    max_k: int | None = None,
    kv_lengths: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """`tilewise.varlen_attention`, sequence by sequence."""
    out = []
    starts, ends = cu_q.tolist(), cu_k.tolist()
    lengths = cu_k.diff().tolist() if kv_lengths is None else kv_lengths.tolist()
    for b, used in enumerate(lengths):
        rows, keys = slice(starts[b], starts[b + 1]), slice(ends[b], ends[b] + used)
        if rows.stop > rows.start:
            one = attention(q[None, rows], k[None, keys], v[None, keys], layout="blhd", **options)
            out.append(one[0])
    rest = q.shape[0] - starts[-1]
    out.append(v.new_zeros(rest, q.shape[1], v.shape[-1]))  # rows of no sequence
    return torch.cat(out)


def visible(
    rows: int,
    keys: int,
    device: torch.device,
    *,
    q_offset: torch.Tensor | int | None = None,
    kv_lengths: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """The cells that rules of positions leave, bool `[1 or B, 1, Lq, Lk]`; None if they leave all."""
    rules = as_rules(Options(**options))
    if rules == NO_RULES and kv_lengths is None:
        return None
    j = torch.arange(keys, device=device)
    if q_offset is None:
        q_offset = (keys if kv_lengths is None else kv_lengths) - rows
    first = q_offset[:, None] if isinstance(q_offset, torch.Tensor) else q_offset
    positions = torch.arange(rows, device=device) + first  # [Lq] or [B, Lq]
    lo, hi = key_spans(rules, positions, keys if kv_lengths is None else kv_lengths[:, None])
    seen = (lo[..., None] <= j) & (j < hi[..., None])  # [Lq, Lk] or [B, Lq, Lk]
    return seen[:, None] if seen.ndim == 3 else seen[None, None]


def _spelled_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    """What torch's function has no options for; scores in float32 at least."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    work = torch.promote_types(q.dtype, torch.float32)
    s = (q.to(work) @ k.to(work).mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    top = s.amax(-1, keepdim=True).detach()
    if sinks is not None:
        sink = sinks.to(work)[:, None, None]
        top = torch.maximum(top, sink.detach())
    top = top.clamp_min(torch.finfo(work).min)  # a row that sees nothing: all its weights are 0
    p = (s - top).exp()
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sink - top).exp()
    p = p / total.clamp_min(torch.finfo(work).tiny)
    return (p.to(v.dtype) @ v).to(q.dtype)
