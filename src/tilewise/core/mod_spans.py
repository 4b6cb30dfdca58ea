"""Spans of keys that a mask_mod leaves to rows, from its conditions that compare a number of the key with one of the
query: documents, prefixes, lengths. Each number is computed once for a row or key, and no cell is evaluated.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from .expression.evaluate import evaluate
from .expression.mods import MOST, Mods
from .expression.node import Node
from .expression.spans import conditions
from .mod_tiles import Number, sequence_places

if TYPE_CHECKING:
    from .problem import Problem
    from .tensors import Tensors

Tensor = torch.Tensor


class Comparison(NamedTuple):
    """A condition on an int of the key and one of the query: `key == query`, `key <= query` or `query <= key`."""

    key: Node
    query: Node
    op: str  # eq, le, ge
    strict: bool = False  # lt, gt


class Spans(NamedTuple):
    """Keys `lo` to `hi` of rows, int64 `[1 or B, Lq]`; whether all of them are visible to mask_mod."""

    lo: Tensor
    hi: Tensor
    whole: bool


@lru_cache(maxsize=MOST)
def comparisons(mods: Mods) -> tuple[tuple[Comparison, ...], int]:
    """The comparisons that a mask_mod joins by `&`, and the number of its other conditions."""
    if mods.mask is None:
        return (), 0
    found = [_comparison(x) for x in conditions(mods.mask)]
    return tuple(x for x in found if x is not None), found.count(None)


def _comparison(node: Node) -> Comparison | None:
    if node.op not in ("eq", "le", "lt"):
        return None
    a, b = node.children
    if a.kind != "int" or node.inputs & {"h", "s"} or (a.inputs & {"q"} and a.inputs & {"k"}):
        return None
    op = "eq" if node.op == "eq" else "le"
    if b.inputs & {"k"}:
        a, b, op = b, a, "eq" if op == "eq" else "ge"
    if b.inputs & {"k"} or a.inputs & {"q"} or "k" not in a.inputs:
        return None
    return Comparison(a, b, op, node.op == "lt")


def mod_spans(problem: Problem, tensors: Tensors) -> Spans | None:
    """The spans of a dense call; None if all keys are in them."""
    p, t = problem, tensors
    if p.mods is None or p.form != "dense" or p.positions:
        return None
    known, others = comparisons(p.mods)
    if not known:
        return None
    at, device = sequence_places(p, t), p.device
    q = _positions(at.q_start, at.q_stride, p.q_len, device)
    k = _positions(at.k_start, at.k_stride, p.kv_len, device)
    rows = torch.arange(p.batch, device=device)[:, None]
    lo, hi = torch.zeros_like(q), torch.full_like(q, p.kv_len)
    for x in known:
        keys, queries = (
            evaluate([node], {"b": rows, "q": q, "k": k}, t.captured, torch.float32)[0].long()
            for node in (x.key, x.query)
        )
        found = _interval(keys, torch.broadcast_to(queries, torch.broadcast_shapes(queries.shape, q.shape)), x)
        others += not found.whole
        lo, hi = torch.maximum(lo, found.lo), torch.minimum(hi, found.hi)
    if not bool((lo > 0).any() | (hi < p.kv_len).any()):
        return None
    return Spans(lo, torch.maximum(lo, hi), others == 0)


def _positions(start: Number, stride: Number, count: int, device: torch.device) -> Tensor:
    """The positions of rows or keys, int64 `[1 or B, count]`."""
    start, stride = (x[:, None] if isinstance(x, Tensor) else x for x in (start, stride))
    return start + stride * torch.arange(count, device=device)[None]


def _interval(keys: Tensor, queries: Tensor, x: Comparison) -> Spans:
    """The keys that a condition leaves to each query of a sequence, or all keys if its numbers of keys are in no order.

    Each sequence by itself: its bits depend on its spans.
    """
    steps, op, strict = keys.diff(), x.op, x.strict
    falls = (steps < 0).any(1, keepdim=True)
    ordered = ~(falls & (steps > 0).any(1, keepdim=True))
    n = max(len(keys), len(queries))
    keys, queries = keys.expand(n, -1).contiguous(), queries.expand(n, -1).contiguous()
    # Of falling numbers: as many keys from the end on.
    keys = torch.where(falls, keys.flip(1), keys)
    before, until = torch.zeros_like(queries), torch.full_like(queries, keys.shape[1])
    if op in ("eq", "ge"):
        before = _searched(keys, queries, right=strict)
    if op in ("eq", "le"):
        until = _searched(keys, queries, right=not strict)
    lo, hi = (torch.where(falls, keys.shape[1] - x, y) for x, y in ((until, before), (before, until)))
    return Spans(torch.where(ordered, lo, 0), torch.where(ordered, hi, keys.shape[1]), bool(ordered.all()))


def _searched(keys: Tensor, queries: Tensor, *, right: bool) -> Tensor:
    """`torch.searchsorted`; on a CPU by one thread: waking others takes longer, on a busy machine 100 times as long."""
    if keys.device.type != "cpu":
        return torch.searchsorted(keys, queries, right=right)
    side: Literal["left", "right"] = "right" if right else "left"
    rows = zip(keys.numpy(), queries.numpy(), strict=True)
    return torch.from_numpy(np.stack([np.searchsorted(x, y, side) for x, y in rows]))
