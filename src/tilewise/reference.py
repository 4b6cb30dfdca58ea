"""The oracle: attention in float64, dense and plain. It defines what every backend must compute.

For one sequence, head h, query i at position `qpos`, key j at position j:

    s = scale * q.k;  softcap;  - slope * |qpos - j|;  + mask;  -inf where (i, j) is not visible
    p = softmax(s), with one more logit, the sink, that has no value
    out = p v;  lse = log(sum exp(s))

A row that sees no key gives 0 and -inf (or its sink). A value under an invisible cell is never touched. A sink of -inf
is none, one of +inf takes all weight: 0 and +inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .core.problem import Problem
from .core.tensors import Sequence, Tensors, sequences


@dataclass(frozen=True, slots=True)
class Scores:
    """One sequence's attention with all its steps, in the compute dtype."""

    scores: torch.Tensor  # [H, Lq, Lk], -inf where not visible
    probs: torch.Tensor  # [H, Lq, Lk]
    visible: torch.Tensor  # bool [H, Lq, Lk]
    out: torch.Tensor  # [H, Lq, Dv]
    lse: torch.Tensor  # [H, Lq]


def visible_cells(seq: Sequence) -> torch.Tensor:
    """Which (query, key) pairs of a sequence see each other: bool `[H, Lq, Lk]`."""
    p, device = seq.problem, seq.tensors.q.device
    i = torch.arange(seq.q_len, device=device)[:, None]
    kpos = torch.arange(seq.kv_len, device=device)[None, :]
    qpos = seq.q_offset + i
    rules = p.rules
    left, right = rules.window
    seen = torch.ones(seq.q_len, seq.kv_len, dtype=torch.bool, device=device)
    if rules.causal:
        seen &= kpos <= qpos
    if left is not None:
        seen &= qpos - kpos <= left
    if right is not None:
        seen &= kpos - qpos <= right
    if rules.chunk:
        seen &= kpos // rules.chunk == torch.div(qpos, rules.chunk, rounding_mode="floor")
    seen = seen.expand(p.heads, -1, -1)
    mask = seq.mask(slice(0, seq.q_len), slice(0, seq.kv_len))
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask != -torch.inf)
    return seen


def attend(seq: Sequence, compute: torch.dtype = torch.float64) -> Scores:
    """Attention of one sequence, every step in `compute`."""
    p, t = seq.problem, seq.tensors
    device = t.q.device
    q = seq.q.to(compute)  # [H, Lq, D]
    k = seq.keys(0, seq.kv_len, compute).repeat_interleave(p.group, 0)  # [H, Lk, D]
    v = seq.values(0, seq.kv_len, compute).repeat_interleave(p.group, 0)  # [H, Lk, Dv]
    visible = visible_cells(seq)

    s = p.scale * (q @ k.mT)
    if p.softcap:
        s = p.softcap * torch.tanh(s / p.softcap)
    if seq.slopes is not None:
        qpos = seq.q_offset + torch.arange(seq.q_len, device=device)[:, None]
        kpos = torch.arange(seq.kv_len, device=device)[None, :]
        s = s - seq.slopes.to(compute)[:, None, None] * (qpos - kpos).abs()
    mask = seq.mask(slice(0, seq.q_len), slice(0, seq.kv_len))
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask.to(compute)
    s = torch.where(visible, s, -torch.inf)

    logits = s
    if t.sinks is not None:
        sink = t.sinks.to(compute)[:, None, None].expand(-1, seq.q_len, 1)
        logits = torch.cat([s, sink], -1)
    lse = torch.logsumexp(logits, -1)
    probs = torch.where(visible, torch.softmax(logits, -1)[..., : seq.kv_len], 0.0)
    if t.sinks is not None:
        probs = torch.where(sink == torch.inf, 0.0, probs)
    finite = v.isfinite()
    out = probs @ torch.where(finite, v, 0.0)
    if not bool(finite.all()):  # 0 * inf is NaN: such values reach only the rows that see them
        stray = torch.where(finite, 0.0, v)[:, None]  # [H, 1, Lk, Dv]
        out = out + torch.where(visible[..., None], probs[..., None] * stray, 0.0).sum(-2)
    return Scores(s, probs, visible, out, lse)


def reference(problem: Problem, tensors: Tensors, compute: torch.dtype = torch.float64) -> list[Scores]:
    """Attention of every sequence of a call."""
    return [attend(seq, compute) for seq in sequences(problem, tensors)]
