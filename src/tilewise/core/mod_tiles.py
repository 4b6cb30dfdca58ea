"""Which tiles the functions of a call hide, by intervals of positions: no cell is evaluated, nothing is Lq x Lk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .expression.bounds import Range, point
from .expression.intervals import classes
from .expression.mods import Bound, Mods

if TYPE_CHECKING:
    from .problem import Problem
    from .tensors import Tensors

MOST_TILES = 1 << 18  # whose bounds are in memory at once
Number = torch.Tensor | int  # int64 [B], or the same for all sequences


class SequencePlaces(NamedTuple):
    """Lengths of the sequences of a call, positions of their first rows, and distances between those of neighbours."""

    q_len: Number
    kv_len: Number
    q_start: Number
    k_start: Number
    k_stride: Number
    q_stride: Number


def sequence_places(problem: Problem, tensors: Tensors) -> SequencePlaces:
    """Where the rows of each sequence are."""
    p, t = problem, tensors

    def by_row(x: torch.Tensor) -> Number:
        return x.long()

    q_len: Number = p.q_len if t.cu_seqlens_q is None else by_row(t.cu_seqlens_q.diff())
    kv_len: Number = p.kv_len if t.cu_seqlens_k is None else by_row(t.cu_seqlens_k.diff())
    kv_len = kv_len if t.kv_lengths is None else by_row(t.kv_lengths)
    offset: Number = kv_len - q_len
    if isinstance(p.rules.q_offset, int):
        offset = p.rules.q_offset
    elif t.q_offset is not None:
        offset = by_row(t.q_offset)
    places: Any = p.rules.places if t.places is None else t.places.long().unbind(1)
    return SequencePlaces(q_len, kv_len, offset, *places)


def mod_states(problem: Problem, tensors: Tensors, tile: tuple[int, int]) -> torch.Tensor | None:
    """The states of all tiles of a call by its functions: uint8 `[1 or B, 1 or H, nq, nk]`, 0 skip, 1 mixed, 2 full.

    None if it has no functions, or if positions are given one by one. Nothing is read on the host.
    """
    p, t = problem, tensors
    if p.mods is None or p.positions:
        return None

    at = sequence_places(p, t)
    q = _positions(p.q_len, tile[0], at.q_len, at.q_start, at.q_stride, p.device)
    k = _positions(p.kv_len, tile[1], at.kv_len, at.k_start, at.k_stride, p.device)
    return function_states(p.mods, t.captured, q, k, p.batch, p.heads)


def function_states(
    mods: Mods, captured: tuple[torch.Tensor, ...], q: Range, k: Range, batch: int, heads: int
) -> torch.Tensor:
    """The states of tiles whose queries and keys are at positions `q` `[1 or B, nq]` and `k` `[1 or B, nk]`."""
    device = q.lo.device
    inputs = {
        "b": point(torch.arange(batch, device=device)[:, None, None, None]),
        "h": point(torch.arange(heads, device=device)[:, None, None]),
        "k": Range(k.lo[:, None, None], k.hi[:, None, None]),
    }
    used = frozenset().union(*(root.inputs for root in (mods.score, mods.mask) if root is not None))
    planes = (batch if "b" in used or len(q.lo) * len(k.lo) > 1 else 1), (heads if "h" in used else 1)
    nq, nk = q.lo.shape[1], k.lo.shape[1]
    step = max(1, MOST_TILES // max(1, planes[0] * planes[1] * nk))
    parts = []
    for first in range(0, nq, step):
        rows = slice(first, first + step)
        own = Range(*(x[:, None, rows, None] for x in (q.lo, q.hi)))
        found = classes(mods, inputs | {"q": own}, captured)
        parts.append(found.expand(*planes, min(step, nq - first), nk))
    return torch.cat(parts, 2) if parts else torch.zeros((*planes, nq, nk), dtype=torch.uint8, device=device)


def _positions(most: int, tile: int, used: Number, start: Number, stride: Number, device: torch.device) -> Range:
    """The positions of tiles of rows, `[1 or B, tiles]`: from `start` on, `stride` apart, as far as rows are in use."""
    first = torch.arange(0, most, tile, device=device)[None]
    start, stride, used = (x[:, None] if isinstance(x, torch.Tensor) else x for x in (start, stride, used))
    last = torch.maximum((first + tile).clamp_max(used) - 1, first)
    lo, hi = torch.broadcast_tensors(first * stride + start, last * stride + start)
    return Range(lo, hi)


def states_of_mod(
    bound: Bound, offset: int, shape: tuple[int, int], tile: tuple[int, int], batch: int, heads: int
) -> torch.Tensor:
    """The states of a function alone, over `[Lq, Lk]` cells whose first query is at `offset`."""
    device = bound.tensors[0].device if bound.tensors else torch.device("cpu")
    starts = zip(shape, tile, (offset, 0), strict=True)
    q, k = (_positions(n, size, n, start, 1, device) for n, size, start in starts)
    return function_states(bound.mods, bound.tensors, q, k, batch, heads)
