"""Attention over a prefix that sequences share, once for all of them, merged with that over each one's rest.

Pages that begin several sequences are one set of keys for all their queries: many rows over the same keys, which is a
matrix product, where each sequence by itself would read them again. Groups of sequences and the length of what they
share come from the block tables; a cost function says where it pays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from ..api import paged_attention
from ..core.mask_rules import MaskRules
from ..core.tensors import Shared
from ..dispatch import pairs
from ..state import AttentionState, merge
from ..validation.arrays import returner, to_tensor
from .append import upload
from .attending import into
from .block_loops import compiled, merge_rows

# What tells positions apart (a prefix has one set of queries, whose positions differ) or asks for the same bits in
# every batch
AGAINST = (
    *(f.name for f in fields(MaskRules) if f.name not in ("causal", "kv_lengths")),
    *("mask", "tile_map", "alibi_slopes", "split_size"),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of a batch whose first `pages` pages are the same."""

    members: np.ndarray
    pages: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What the cost of attention over one key depends on."""

    device: str
    kv_heads: int
    group: int  # query heads of a KV head
    width: int  # D + Dv
    bytes: int  # of a key and its value, one head
    threads: int


def shared(table: np.ndarray, full: np.ndarray, gain: Callable[[np.ndarray, int], float]) -> list[Group]:
    """The groups that gain the most, of those that do gain: `gain(members, pages)`.

    Sequences that share pages form a tree. At each of its branches, either all below it share what they have in common,
    or its branches are looked at by themselves, where fewer share more.

    Args:
        table: `[B, n]`, pages.
        full: `[B]`: leading pages of each sequence that may be shared.

    >>> table = np.array([[3, 1, 5, 6], [3, 1, 5, 8], [3, 1, 9, 0], [7, 2, 0, 0]])
    >>> for group in shared(table, np.array([4, 4, 3, 2]), lambda members, pages: (len(members) - 1) * pages):
    ...     print(group.members, group.pages)
    [0 1 2] 2
    """

    def best(members: np.ndarray, known: int) -> tuple[float, list[Group]]:
        """Of members that have their first `known` pages in common."""
        most = int(full[members].min())
        same = (table[members, known:most] == table[members[0], known:most]).all(0)
        common = most if same.all() else known + int(same.argmin())
        own = gain(members, common)
        apart, parts = split(members, common)
        if apart > max(own, 0.0):
            return apart, parts
        return (own, [Group(members, common)]) if own > 0 else (0.0, [])

    def split(members: np.ndarray, column: int) -> tuple[float, list[Group]]:
        """The same for each set of members that agree in one more page."""
        members = members[full[members] > column]
        pages, which, counts = np.unique(table[members, column], return_inverse=True, return_counts=True)
        total, found = 0.0, []
        for i in np.flatnonzero(counts > 1) if len(pages) else ():
            value, groups = best(members[which == i], column + 1)
            total += value
            found += groups
        return total, found

    return split(np.arange(len(full)), 0)[1]


def gain(shape: Shape, rows: np.ndarray, tokens: int) -> float:
    """Seconds saved if sequences with `rows` queries each share one pass over a prefix of `tokens`."""
    if shape.device != "cpu":
        # On an H200 decode reads a shared prefix at about 4.5 TB/s, and the host takes 0.6 ms for a cascade's calls:
        # 32 sequences, 4k shared, 32/8 heads 0.12 ms by themselves; 64 sequences, 16k shared 0.87 and 0.63 ms together.
        return (len(rows) - 1) * tokens * shape.kv_heads * shape.bytes / 4.5e12 - 600e-6
    apart = sum(key_time(shape, shape.group * int(n)) for n in rows)
    together = key_time(shape, shape.group * int(rows.sum()))
    # Two sets of tables and the merge of two states: 32 sequences of 32 heads took 500 us more than by themselves where
    # they share next to nothing, 32 of 12 heads 320, 8 of 32 heads 210, 2 of 12 heads 95.
    fixed = 90e-6 + 0.4e-6 * shape.kv_heads * shape.group * int(rows.sum())
    return tokens * shape.kv_heads * (apart - together) * 1e-9 / shape.threads - fixed


def key_time(shape: Shape, rows: int) -> float:
    """Nanoseconds of a core for one key of one KV head and `rows` query rows.

    Fitted to 64 to 1024 keys in pages of 16, 2 to 32 sequences, heads 32/8 of 128, 12/12 of 64 and 9/3 of 64, float32
    and int8, on a 2-core Xeon with AVX-512: 32 sequences of 4 rows took 1370 ns by themselves and 518 together (in int8
    1080 and 487).
    """
    width = shape.width / 128
    if rows <= 16:  # decode mainloop
        return 6 + width * (7 + 4 * rows)
    return 60 + width * (25 + 1.6 * rows)


@dataclass(frozen=True, slots=True)
class Split:
    """Groups of a batch as tensors; the same at every step, until a sequence is shortened."""

    groups: list[Group]
    order: torch.Tensor | None  # int64 [T]: packed query rows, those of a group together; None if they are
    back: torch.Tensor | None  # its inverse
    cu: torch.Tensor  # int32 [groups + 1]
    longest: int  # query rows of a group
    table: torch.Tensor  # int32 [groups, pages]
    lengths: torch.Tensor  # int32 [groups]: tokens of the prefixes
    pages: int  # left out of every sequence's table, if it is the same for all
    shift: torch.Tensor | None  # int64 [B, 1]: pages left out of each sequence's, if not
    taken: torch.Tensor  # int32 [B]: tokens left out of each

    @classmethod
    def of(cls, groups: list[Group], table: np.ndarray, counts: np.ndarray, page_size: int, device: Any) -> Split:
        """Sequences of no group form one of their own, whose prefix is empty: it drops out of the merge."""
        pages = np.zeros(len(counts), dtype=np.int64)
        for group in groups:
            pages[group.members] = group.pages
        alone = np.flatnonzero(pages == 0)
        sets = [group.members for group in groups] + ([alone] if len(alone) else [])
        starts = np.cumsum(counts) - counts
        order = np.concatenate([np.arange(starts[b], starts[b] + counts[b]) for members in sets for b in members])
        rows = np.array([int(counts[members].sum()) for members in sets])
        cu = np.concatenate([[0], np.cumsum(rows)])
        lengths = np.array([group.pages * page_size for group in groups] + [0] * bool(len(alone)))
        tables = np.zeros((len(sets), max(group.pages for group in groups)), dtype=np.int32)
        for i, group in enumerate(groups):
            tables[i, : group.pages] = table[group.members[0], : group.pages]
        in_order = bool((np.diff(order) == 1).all())
        alike = bool((pages == pages[0]).all())
        cu_on_device, prefixes, taken = upload(device, cu, lengths, pages * page_size)
        rows_in_order = torch.from_numpy(order)
        return cls(
            groups=groups,
            order=None if in_order else rows_in_order.to(device),
            back=None if in_order else rows_in_order.argsort().to(device),
            cu=cu_on_device,
            longest=int(rows.max()),
            table=torch.from_numpy(tables).to(device),
            lengths=prefixes,
            pages=int(pages[0]) if alike else 0,
            shift=None if alike else torch.from_numpy(pages)[:, None].to(device),
            taken=taken,
        )

    def rest_of(self, table: torch.Tensor) -> torch.Tensor:
        """Block tables without the pages of the prefixes."""
        if self.shift is None:
            return table[:, self.pages :]
        columns = torch.arange(table.shape[1], device=table.device) + self.shift
        return table.gather(1, columns.clamp_max(table.shape[1] - 1))


def _merged(a: AttentionState, b: AttentionState) -> AttentionState:
    """`merge`, in one loop where it can be: a dozen calls of torch take as long as a small step."""
    if a.out.device.type != "cpu":
        return merge([a, b])
    x, y, x_lse, y_lse = (t.detach().float().contiguous().numpy() for t in (a.out, b.out, a.lse, b.lse))
    compiled(merge_rows)(x.reshape(-1, x.shape[-1]), x_lse.reshape(-1), y.reshape(-1, y.shape[-1]), y_lse.reshape(-1))
    return AttentionState(torch.from_numpy(x).to(a.out.dtype), torch.from_numpy(x_lse))


def _call(
    q: torch.Tensor, operands: tuple[Any, Any], tables: Any, max_q: int, options: dict[str, Any]
) -> AttentionState:
    table, lengths, cu = tables
    return paged_attention(q, *operands, table, lengths, cu_seqlens_q=cu, max_q=max_q, return_lse=True, **options)


def run(
    split: Split,
    q: Any,
    batch: int,
    longest: int,
    cu_seqlens: torch.Tensor,
    operands: tuple[Any, Any],
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    options: dict[str, Any],
) -> Any:
    """Both calls and their merge. `q` is packed `[T, H, D]`, or `[B, H, Lq, D]` with as many queries for each."""
    back, q = returner(q), to_tensor("q", q)
    seq_major, lse, out = (options.pop(name, None) for name in ("layout", "return_lse", "out"))
    packed = q.ndim == 3
    rows = q if packed else (q if seq_major == "blhd" else q.transpose(1, 2)).flatten(0, 1)  # [T, H, D]
    ordered = rows if split.order is None else rows[split.order]
    shared = Shared(ordered, split.table, split.lengths, split.cu, split.longest, split.back)
    tables = (split.rest_of(block_table), context_lens - split.taken, cu_seqlens)
    state = pairs.attend(rows, *operands, shared, (*tables, None, None), longest, options)
    if state is None:
        head = _call(ordered, operands, shared.tables, shared.max_q, options | pairs.NOT_SHARED)
        if split.back is not None:
            head = AttentionState(head.out[split.back], head.lse[split.back])
        state = _merged(_call(rows, operands, tables, longest, options), head)
    if not packed:
        state = AttentionState(*(x.unflatten(0, (batch, -1)) for x in (state.out, state.lse)))  # [B, Lq, H, Dv]
        if seq_major != "blhd":
            state = AttentionState(state.out.transpose(1, 2), state.lse.transpose(1, 2))
    if out is not None:
        state = AttentionState(into(out, state.out), state.lse)
    return AttentionState(back(state.out), back(state.lse)) if lse else back(state.out)
