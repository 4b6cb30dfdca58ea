"""The schedule: which rank needs which keys in which round, and what it computes with them. Plain functions of sizes.

A rank's *rounds* come from two functions. `intersect` says which rows of some queries see which of some keys: one
interval each, by the rules' key spans. `rounds` puts them together: in a ring, round t brings the keys of the rank t
before; in a gather, one round brings all. Owners send keys directly to the ranks that see them, and only the rows that
are seen: hidden keys are neither sent nor computed.

Every rank computes the schedules of itself and its peers from the same numbers, so sends and receives match without
communication.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ..core.mask_rules import MaskRules, key_span, query_span
from .layout import Piece

Range = tuple[int, int]  # rows [lo, hi) of a tensor


class Span(NamedTuple):
    """Tokens of one document, `step` positions apart, contiguous in memory."""

    doc: int
    pos: int  # the first token's, in its document
    row: int  # the first token's, in memory
    size: int
    step: int = 1


class Pair(NamedTuple):
    """Rows of queries over rows of keys of one document: what one call computes."""

    doc: int
    q: int
    rows: int
    qpos: int  # the first row's, in its document
    k: int
    keys: int
    kpos: int
    full: bool  # every cell is visible: the call needs no rules
    step: int = 1  # positions between rows, and between keys


@dataclass(frozen=True)
class Task:
    """What the schedule of a call depends on. Equal on all ranks."""

    rules: MaskRules
    q_pieces: tuple[tuple[Piece, ...], ...]  # of each rank
    k_pieces: tuple[tuple[Piece, ...], ...]
    cu_q: tuple[int, ...]  # [0, Lq] if there is one document
    cu_k: tuple[int, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]  # (offset, keys in use) of each batch row, for each document
    fusible: bool  # only rules depend on positions: fully visible pairs may be joined
    gather: bool = False  # all keys in one round, in order
    hash: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:  # it is hashed at each call, to look up its schedule
        parts = (self.rules, self.q_pieces, self.k_pieces, self.cu_q, self.cu_k, self.places, self.fusible, self.gather)
        object.__setattr__(self, "hash", hash(parts))

    def __hash__(self) -> int:
        return self.hash

    @property
    def ranks(self) -> int:
        return len(self.q_pieces)

    def rows_in_use(self, rank: int) -> list[Range]:
        """The rows of a rank's queries that belong to a document."""
        return [(span.row, span.row + span.size) for span in _spans(self, rank, False)]


class Source(NamedTuple):
    """Rows of keys of one rank, sent in one message."""

    rank: int
    ranges: tuple[Range, ...]

    @property
    def rows(self) -> int:
        return sum(hi - lo for lo, hi in self.ranges)


class Round(NamedTuple):
    """What a rank receives, sends and computes in one round."""

    step: int
    sources: tuple[Source, ...]  # the keys that it needs, its own included
    order: tuple[tuple[int, int, int], ...]  # (rank, row in its message, rows): the layout of the buffer
    sends: tuple[Source, ...]  # the keys that others need from it
    pairs: tuple[Pair, ...]  # their `k` are rows of the buffer


def spans(pieces: Sequence[Piece], cu: Sequence[int]) -> list[Span]:
    """Pieces cut at the ends of documents; tokens past the last document belong to none."""
    cut: list[Span] = []
    row = 0
    for start, count, step in pieces:
        after = row + count
        doc = bisect.bisect_right(cu, start) - 1
        while row < after and doc < len(cu) - 1:
            size = min(after - row, len(range(start, cu[doc + 1], step)))
            if size:
                cut.append(Span(doc, start - cu[doc], row, size, step))
            start, row, doc = start + size * step, row + size, doc + 1
        row = after
    return joined(cut)


def joined(parts: Iterable[Span]) -> list[Span]:
    """Joins spans that continue the one before them."""
    kept: list[Span] = []
    for span in parts:
        if kept:
            last = kept[-1]
            if (last.doc, last.pos + last.size, last.row + last.size) == span[:3] and last.step == span.step == 1:
                kept[-1] = last._replace(size=last.size + span.size)
                continue
        kept.append(span)
    return kept


def intersect(task: Task, a: Span, b: Span) -> Pair | None:
    """The rows of `a` that see keys of `b` and the keys that they see; None if there are none."""
    rows: list[Range] = []
    keys: list[Range] = []
    full = True
    width = (a.size - 1) * a.step + 1  # positions that the queries span
    for offset, length in task.places[a.doc]:
        top = offset + a.pos
        lo, hi = key_span(task.rules, top, length)
        last_lo, last_hi = key_span(task.rules, top + width - 1, length)
        k0, k1 = max(0, -((b.pos - lo) // b.step)), min(b.size, -((b.pos - last_hi) // b.step))
        if k0 >= k1:
            full = False
            continue
        ends = b.pos + k0 * b.step, b.pos + (k1 - 1) * b.step
        first = -(-query_span(task.rules, ends[0], top, width)[0] // a.step)
        last = -(-query_span(task.rules, ends[1], top, width)[1] // a.step)
        if first >= last:
            full = False
            continue
        full = full and hi > ends[1] and last_lo <= ends[0]
        rows.append((first, last))
        keys.append((k0, k1))
    if not rows:
        return None
    (q0, q1), (k0, k1) = ((min(lo for lo, _ in x), max(hi for _, hi in x)) for x in (rows, keys))
    full = full and len(set(keys)) == 1 and (q0, q1) == (0, a.size)
    q, k = a.pos + q0 * a.step, b.pos + k0 * b.step
    return Pair(a.doc, a.row + q0, q1 - q0, q, b.row + k0, k1 - k0, k, full, a.step)


def meetings(task: Task, queries: Sequence[Span], keys: Sequence[Span]) -> list[Pair]:
    by_doc = defaultdict(list)
    for span in keys:
        by_doc[span.doc].append(span)
    return [pair for a in queries for b in by_doc[a.doc] if (pair := intersect(task, a, b)) is not None]


def fused(task: Task, pairs: Sequence[Pair]) -> list[Pair]:
    """The same cells in fewer pairs.

    Full pairs with adjacent keys or adjacent queries are joined. With causal as the only rule, fully visible keys just
    before those on the diagonal are joined with them: only the first key's position changes. Rows that continue a
    diagonal, counted in memory, are joined too: the two chunks of a zigzag over themselves.
    """
    if not task.fusible:
        return list(pairs)
    causal = task.rules.relative() == MaskRules(causal=True)
    kept: list[Pair] = []
    for p in pairs:
        last = kept[-1] if kept else None
        if last and last.full and last[1:3] == p[1:3] and last.k + last.keys == p.k and (p.full or causal):
            kept[-1] = p._replace(k=last.k, keys=last.keys + p.keys, kpos=p.kpos - last.keys)
        else:
            kept.append(p)
    rows: list[Pair] = []
    for p in kept:
        last = rows[-1] if rows else None
        if last and last.k == p.k and last.q + last.rows == p.q:
            end = last.qpos - last.kpos + last.rows  # the diagonal's end, in rows of keys
            goes_on = end == p.qpos - p.kpos and task.places[p.doc][0][0] + end <= last.keys <= p.keys
            full = last.full and p.full and last.keys == p.keys
            if full or (causal and last.doc == p.doc and goes_on):
                rows[-1] = last._replace(rows=last.rows + p.rows, keys=p.keys, full=full)
                continue
        rows.append(p)
    return rows


@lru_cache(maxsize=4096)
def _spans(task: Task, rank: int, keys: bool) -> tuple[Span, ...]:
    pieces, cu = (task.k_pieces, task.cu_k) if keys else (task.q_pieces, task.cu_q)
    return tuple(spans(pieces[rank], cu))


@lru_cache(maxsize=65536)
def needed(task: Task, owner: int, reader: int) -> tuple[Range, ...]:
    """The rows of `owner`'s keys that queries of `reader` see."""
    pairs = meetings(task, _spans(task, reader, False), _spans(task, owner, True))
    kept: list[Range] = []
    for lo, hi in sorted((p.k, p.k + p.keys) for p in pairs):
        if kept and lo <= kept[-1][1]:
            kept[-1] = (kept[-1][0], max(hi, kept[-1][1]))
        else:
            kept.append((lo, hi))
    return tuple(kept)


@lru_cache(maxsize=256)
def steps(task: Task) -> tuple[int, ...]:
    """The steps of a ring in which some rank sees keys of the rank that many before it.

    All ranks take the same steps, even if they have nothing to do in one, so that two ranks post their messages in the
    same order.
    """
    ranks = range(task.ranks)
    return tuple(t for t in ranks if t == 0 or any(needed(task, (r - t) % task.ranks, r) for r in ranks))


@lru_cache(maxsize=256)
def rounds(task: Task, rank: int) -> tuple[Round, ...]:
    """What a rank does, round by round."""
    return tuple(round_of(task, rank, step) for step in ((0,) if task.gather else steps(task)))


def round_of(task: Task, rank: int, step: int) -> Round:
    """What a rank does in one step of a ring, or in a gather."""
    R = task.ranks
    owners, readers = (range(R), range(R)) if task.gather else ([(rank - step) % R], [(rank + step) % R])
    wanted = [Source(owner, needed(task, owner, rank)) for owner in owners]
    sends = (Source(x, needed(task, rank, x)) for x in readers if x != rank)
    if not task.gather and step == 0:  # its own keys are used in place
        wanted = [Source(rank, ((0, sum(piece.size for piece in task.k_pieces[rank])),))]
    sources = tuple(x for x in wanted if x.rows)
    buffer, order = _assembled(task, sources)
    pairs = meetings(task, _spans(task, rank, False), buffer)
    return Round(step, sources, order, tuple(x for x in sends if x.rows), tuple(fused(task, pairs)))


def _assembled(task: Task, sources: Sequence[Source]) -> tuple[list[Span], tuple[tuple[int, int, int], ...]]:
    """The received keys, sorted by document and position: as spans, and as rows of their sources."""
    parts = []
    for rank, ranges in sources:
        row = 0
        for lo, hi in ranges:
            for span in _spans(task, rank, True):
                first, last = max(lo, span.row), min(hi, span.row + span.size)
                if first < last:
                    pos = span.pos + (first - span.row) * span.step
                    parts.append((span.doc, pos, rank, row + first - lo, last - first, span.step))
            row += hi - lo
    if len(sources) == 1:  # already in order: nothing is moved
        buffer = [Span(doc, pos, row, count, step) for doc, pos, _, row, count, step in parts]
        return joined(buffer), ((sources[0].rank, 0, sources[0].rows),)
    buffer, order, at = [], [], 0
    for doc, pos, rank, row, count, step in sorted(parts):
        buffer.append(Span(doc, pos, at, count, step))
        order.append((rank, row, count))
        at += count
    return joined(buffer), tuple(order)
