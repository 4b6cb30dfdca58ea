"""Merges the partial results of a call: `MergedState` for `out` and `lse`, `GradSum` for a gradient."""

from __future__ import annotations

import itertools

import torch

from ..state import AttentionState, add_into, merge_into
from .pair_call import Call
from .schedule import Range

MOST_STATES = 8  # merged in one pass: parts, and the result so far


class MergedState:
    """`out` and `lse` over all keys, merged from parts over some of them, several in one pass."""

    def __init__(
        self, call: Call, q: torch.Tensor, width: int, parts: int, sinks: torch.Tensor | None, exact: bool
    ) -> None:
        self.call, self.once, self.fresh = call, call.once, sinks is None
        self.pending: list[tuple[Range, Range, AttentionState]] = []
        # In float32 if it will be merged again, or if a backward pass needs it unrounded.
        rounded = self.once or (parts <= self.most and not exact)
        dtype = q.dtype if rounded else torch.float32
        self.exact = exact and not self.once and q.dtype == torch.float32
        self.out = q.new_empty((*q.shape[:-1], width), dtype=dtype)
        self.lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        self.blank = True  # nothing written yet
        if sinks is not None or self.exact:
            self.clear()
        if sinks is not None:  # once for each row of a document, whatever keys it sees
            for which in call.task.rows_in_use(call.ranks.rank):
                call.cut(self.lse, which).copy_(sinks_by_head(call, sinks, self.lse))
        self.wide = self.lse.double() if self.exact else None

    def clear(self) -> None:
        self.out.zero_()
        self.lse.fill_(-torch.inf)
        self.blank = False

    def add(self, which: Range, heads: Range, part: AttentionState) -> None:
        self.pending.append((which, heads, part))
        if self.wide is not None:
            wide = self.call.cut(self.wide, which, heads)
            torch.logaddexp(wide, part.lse.double(), out=wide)
        if len(self.pending) == self.most:
            self.merge()

    @property
    def most(self) -> int:
        """How many parts are collected before they are merged in one pass."""
        return MOST_STATES if self.fresh or self.once else MOST_STATES - 1

    def merge(self) -> None:
        """Merges the collected parts, in the order of rounds: the same bits each time."""
        if self.blank and not self.covered():
            self.clear()
        self.blank = False
        for heads in dict.fromkeys(heads for _, heads, _ in self.pending):
            parts = [(*which, part) for which, of, part in self.pending if of == heads]
            ends = sorted({end for first, last, _ in parts for end in (first, last)})
            for lo, hi in itertools.pairwise(ends):
                states = [
                    AttentionState(*(self.call.cut(x, (lo - first, hi - first)) for x in part))
                    for first, last, part in parts
                    if first <= lo and hi <= last
                ]
                total = AttentionState(*(self.call.cut(x, (lo, hi), heads) for x in (self.out, self.lse)))
                states = states if self.fresh or self.once else [total, *states]
                if len(states) > 1:
                    merge_into(states, total)
                for x, new in zip(total, states[0], strict=True) if len(states) == 1 else ():
                    x.copy_(new)
        self.pending, self.fresh = [], False

    def covered(self) -> bool:
        """Whether the parts cover every row of every head."""
        end = 0
        for (first, last), (lo, hi), _ in sorted(self.pending, key=lambda part: part[0]):
            if first > end or (lo, hi) != (0, self.lse.shape[self.call.head]):
                return False
            end = max(end, last)
        return end == self.lse.shape[self.call.seq]


class GradSum:
    """A gradient, summed from parts over some rows: several in one pass, in float32 and in order."""

    def __init__(self, call: Call, like: torch.Tensor, parts: int) -> None:
        self.call, self.like = call, like
        self.pending: dict[Range, list[tuple[Range, torch.Tensor]]] = {}  # by heads
        self.begun: set[Range] = set()
        # In float32 if more will be added.
        self.total = torch.zeros_like(like, dtype=like.dtype if parts <= MOST_STATES else torch.float32)

    def add(self, heads: Range, which: Range, part: torch.Tensor) -> None:
        pending = self.pending.setdefault(heads, [])
        pending.append((which, part))
        if len(pending) == MOST_STATES:
            self.flush(heads)

    def flush(self, heads: Range) -> None:
        parts = self.pending.pop(heads)
        for lo, hi in itertools.pairwise(sorted({end for which, _ in parts for end in which})):
            terms = [
                self.call.cut(part, (lo - first, hi - first))
                for (first, last), part in parts
                if first <= lo and hi <= last
            ]
            total = self.call.cut(self.total, (lo, hi), heads)
            if heads in self.begun and terms:
                terms.insert(0, total)
            if terms:
                add_into(terms, total)
        self.begun.add(heads)

    def result(self) -> torch.Tensor:
        for heads in list(self.pending):
            self.flush(heads)
        return self.total.to(self.like.dtype)


def sinks_by_head(call: Call, sinks: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Sinks in a shape that broadcasts against `lse`."""
    return sinks.view([-1 if dim == call.head else 1 for dim in range(lse.ndim)])
