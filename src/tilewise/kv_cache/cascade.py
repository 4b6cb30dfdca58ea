"""Cascades: attention over a shared prefix, once for all its sequences, merged with attention over each one's rest.

Pages at the start of several sequences are one set of keys for all their queries. Many rows over the same keys are one
matrix product, where each sequence alone would read the keys again. The groups of sequences and the lengths of their
prefixes come from the block tables; the backend says where a cascade is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from ..api import paged_attention
from ..core.arrays import converter_back, to_tensor
from ..core.mask_rules import MaskRules
from ..core.options import PLACES
from ..core.tensors import SharedPrefix
from ..dispatch import cascade
from ..state import AttentionState, merge
from .attend_call import copy_to_out
from .block_loops import compiled, merge_rows
from .upload import upload

# Options that rule a cascade out: those by position (queries of one prefix have different positions), and those that
# ask for the same bits in every batch
AGAINST = (
    *(f.name for f in fields(MaskRules) if f.name not in ("causal", "kv_lengths", "places")),
    *PLACES,
    *(
        "return_aux",
        "mask",
        "score_mod",
        "mask_mod",
        "tree_mask",
        "tile_map",
        "alibi_slopes",
        "q_bias",
        "k_bias",
        "key_indices",
        "block_indices",
        "split_size",
        "dropout_p",
    ),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of a batch whose first `pages` pages are the same."""

    members: np.ndarray
    pages: int


Gain = Callable[[np.ndarray, int], float]
Groups = tuple[float, list[Group]]  # with their total gain


def shared(table: np.ndarray, full: np.ndarray, gain: Gain) -> list[Group]:
    """The groups with the largest total gain, by `gain(members, pages)`; none with a loss.

    Sequences that share pages form a tree. At each node either all sequences below form one group, or the branches are
    considered separately, where fewer sequences share more pages.

    Args:
        table: `[B, n]`, block tables.
        full: `[B]`: leading pages of each sequence that may be shared.

    >>> table = np.array([[3, 1, 5, 6], [3, 1, 5, 8], [3, 1, 9, 0], [7, 2, 0, 0]])
    >>> for group in shared(table, np.array([4, 4, 3, 2]), lambda members, pages: (len(members) - 1) * pages):
    ...     print(group.members, group.pages)
    [0 1 2] 2
    """

    return _split(table, full, gain, np.arange(len(full)), 0)[1]


def _best(table: np.ndarray, full: np.ndarray, gain: Gain, members: np.ndarray, known: int) -> Groups:
    """The best groups of members that share their first `known` pages."""
    most = int(full[members].min())
    same = (table[members, known:most] == table[members[0], known:most]).all(0)
    common = most if same.all() else known + int(same.argmin())
    own = gain(members, common)
    apart, parts = _split(table, full, gain, members, common)
    if apart > max(own, 0.0):
        return apart, parts
    return (own, [Group(members, common)]) if own > 0 else (0.0, [])


def _split(table: np.ndarray, full: np.ndarray, gain: Gain, members: np.ndarray, column: int) -> Groups:
    """The same for each set of members that share one more page."""
    members = members[full[members] > column]
    pages, which, counts = np.unique(table[members, column], return_inverse=True, return_counts=True)
    total, chosen = 0.0, []
    for i in np.flatnonzero(counts > 1) if len(pages) else ():
        value, groups = _best(table, full, gain, members[which == i], column + 1)
        total += value
        chosen += groups
    return total, chosen


@dataclass(frozen=True, slots=True)
class Split:
    """Groups of a batch as tensors; valid for every step until a sequence is shortened."""

    groups: list[Group]
    order: torch.Tensor | None  # int64 [T]: packed query rows sorted by group; None if they are already
    back: torch.Tensor | None  # its inverse
    cu: torch.Tensor  # int32 [groups + 1]
    longest: int  # most query rows of a group
    table: torch.Tensor  # int32 [groups, pages]
    lengths: torch.Tensor  # int32 [groups]: tokens of the prefixes
    pages: int  # prefix pages of every sequence, if all have the same number
    shift: torch.Tensor | None  # int64 [B, 1]: prefix pages of each sequence, if not
    prefix_tokens: torch.Tensor  # int32 [B]

    @classmethod
    def of(cls, groups: list[Group], table: np.ndarray, counts: np.ndarray, page_size: int, device: Any) -> Split:
        """Sequences outside all groups form one with an empty prefix, which the merge ignores."""
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
        cu_on_device, prefixes, prefix_tokens = upload(device, cu, lengths, pages * page_size)
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
            prefix_tokens=prefix_tokens,
        )

    def rest_of(self, table: torch.Tensor) -> torch.Tensor:
        """Block tables without the pages of the prefixes."""
        if self.shift is None:
            return table[:, self.pages :]
        columns = torch.arange(table.shape[1], device=table.device) + self.shift
        return table.gather(1, columns.clamp_max(table.shape[1] - 1))


def _merged(a: AttentionState, b: AttentionState) -> AttentionState:
    """`merge`, on a CPU in one loop: a dozen calls of torch take as long as a small step."""
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
    """Runs both calls and merges them. `q` is packed `[T, H, D]`, or `[B, H, Lq, D]`, all of whose rows are queries."""
    back, q = converter_back(q), to_tensor("q", q)
    seq_major, lse, out = (options.pop(name, None) for name in ("layout", "return_lse", "out"))
    packed = q.ndim == 3
    rows = q if packed else (q if seq_major == "blhd" else q.transpose(1, 2)).flatten(0, 1)  # [T, H, D]
    ordered = rows if split.order is None else rows[split.order]
    shared = SharedPrefix(ordered, split.table, split.lengths, split.cu, split.longest, split.back)
    tables = (split.rest_of(block_table), context_lens - split.prefix_tokens, cu_seqlens)
    state = cascade.attend(rows, *operands, shared, tables, longest, options)
    if state is None:
        head = _call(ordered, operands, shared.tables, shared.max_q, options | cascade.NOT_SHARED)
        if split.back is not None:
            head = AttentionState(head.out[split.back], head.lse[split.back])
        state = _merged(_call(rows, operands, tables, longest, options), head)
    if not packed:
        state = AttentionState(*(x.unflatten(0, (batch, -1)) for x in (state.out, state.lse)))  # [B, Lq, H, Dv]
        if seq_major != "blhd":
            state = AttentionState(state.out.transpose(1, 2), state.lse.transpose(1, 2))
    if out is not None:
        state = AttentionState(copy_to_out(out, state.out), state.lse)
    return AttentionState(back(state.out), back(state.lse)) if lse else back(state.out)
