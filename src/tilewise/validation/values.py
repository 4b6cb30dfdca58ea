"""Checks of the values inside lengths, offsets and tables.

`validate=None` checks values on the CPU, `True` all values (which synchronises with a GPU), `False` none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ..core.options import LIMIT, Options, as_offset, as_places, is_int, to_int
from ..core.problem import Problem
from ..core.tensors import Tensors, sequences
from ..core.tracing import is_traced
from ..errors import InvalidArgument


def readable(x: torch.Tensor, validate: Any) -> bool:
    """Whether `validate` lets the values of `x` be read. Traced tensors have none yet."""
    return (validate is True or (validate is None and x.device.type == "cpu")) and not is_traced()


def check_lengths(name: str, lengths: torch.Tensor, limit: torch.Tensor | int, what: str, validate: Any) -> None:
    """Every length is between 0 and its limit."""
    if not readable(lengths, validate):
        return
    limits = limit.tolist() if isinstance(limit, torch.Tensor) else [limit] * len(lengths)
    for b, (length, most) in enumerate(zip(lengths.tolist(), limits, strict=True)):
        if not 0 <= length <= most:
            raise InvalidArgument(f"{name}[{b}]", length, f"0 to {most}, the {what}")


def check_tables(
    p: Problem,
    rows: int,
    validate: Any,
    kv_lengths: torch.Tensor | None,
    q_offset: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> None:
    """Checks the values inside lengths, offsets and tables; `rows` is the number of rows of a packed k, or of pages."""
    if cu_q is not None:
        check_cu_seqlens("cu_seqlens_q", cu_q, p.total_q, "max_q", p.q_len, validate)
    if cu_k is not None:
        check_cu_seqlens("cu_seqlens_k", cu_k, rows, "max_k", p.kv_len, validate)
    if kv_lengths is not None and block_table is not None:
        fewer = p.kv_len < block_table.shape[1] * p.page_size
        of = "mask" if p.mask is not None else "k_bias" if p.k_bias else "tile_map"
        what = f"keys in {of}" if fewer else "tokens in block_table's pages"
        check_lengths("context_lens", kv_lengths, p.kv_len, what, validate)
        check_block_table(block_table, kv_lengths, p.page_size, rows, validate)
    elif kv_lengths is not None and cu_k is not None:
        check_lengths("kv_lengths", kv_lengths, cu_k.diff(), "keys in the sequence", validate)
    elif kv_lengths is not None:
        check_lengths("kv_lengths", kv_lengths, p.kv_len, "keys in k", validate)
    if q_offset is not None and readable(q_offset, validate):
        for b, offset in enumerate(q_offset.tolist()):
            as_offset(offset, p.q_len, p.kv_len, f"q_offset[{b}]")


def check_indices(p: Problem, indices: torch.Tensor | None, validate: Any) -> None:
    """Checks key or block indices `[..., n]`: each is -1 or in range, and none is repeated for a query."""
    if indices is None or p.selection is None or not indices.numel() or not readable(indices, validate):
        return
    block = p.selection.block
    name, most = ("key_indices", p.kv_len) if block == 1 else ("block_indices", -(-p.kv_len // block))
    if indices.ndim == 4 and not p.selection.by_head:
        indices = indices[:, :1]
    # On the CPU NumPy sorts several times faster than torch, and a decode step waits for it.
    ordered = np.sort(indices.numpy(), -1) if indices.is_cpu else indices.sort(-1).values.cpu().numpy()
    if (least := ordered[..., 0].min()) < -1 or (largest := ordered[..., -1].max()) >= most:
        wrong, what = least if least < -1 else largest, "keys" if block == 1 else f"blocks of {block} keys"
        if wrong in (-2, LIMIT):  # int64 was clamped to these
            wrong = f"{wrong} or {'less' if least < -1 else 'more'}"
        raise InvalidArgument(name, f"an index of {wrong}", f"-1 (none) to {most - 1}: there are {most} {what}")
    later = ordered[..., 1:]
    twice = (later == ordered[..., :-1]) & (later >= 0)
    if twice.any():
        wrong = later[twice][0]
        raise InvalidArgument(name, f"{wrong} twice for one query", "each index once", "-1 is none, as often as needed")


def check_positions(p: Problem, t: Tensors, validate: Any) -> None:
    """Checks the positions of a tree's nodes: none is before the keys that precede the tree."""
    given = (t.positions, t.kv_lengths, t.cu_seqlens_q, t.cu_seqlens_k)
    if t.positions is None or not all(readable(x, validate) for x in given if x is not None):
        return
    for seq in sequences(p, t):
        own = t.positions[seq.b, : seq.q_len]
        if seq.q_len and not seq.own_keys <= (least := int(own.min())) <= int(own.max()) <= LIMIT:
            wrong, where = (least if least < seq.own_keys else int(own.max())), f"positions[{seq.b}]"
            ends = {-(2**31): f"{wrong} or less", 2**31 - 1: f"{wrong} or more"}  # of int64
            want = f"{seq.own_keys} to {LIMIT}: {max(0, seq.own_keys)} keys come first"
            raise InvalidArgument(where, ends.get(wrong, wrong), want)


def check_places(p: Problem, places: Sequence[torch.Tensor | int], offsets: torch.Tensor | None, validate: Any) -> None:
    """Checks the positions of keys and queries of each sequence, as far as `validate` lets their values be read."""
    given = (*places, p.rules.q_offset if offsets is None else offsets)
    if not all(readable(x, validate) for x in given if isinstance(x, torch.Tensor)):
        return
    rows = zip(*(x.tolist() if isinstance(x, torch.Tensor) else [x] * p.batch for x in given), strict=True)
    for b, (k_start, k_stride, q_stride, offset) in enumerate(rows):
        as_places((k_start, k_stride, q_stride), offset, p.q_len, p.kv_len, f"[{b}]")


def as_int32(x: torch.Tensor, least: int = -(2**31), most: int = 2**31 - 1) -> torch.Tensor:
    """Lengths, offsets or pages as int32 with unit stride.

    Values out of range were either not checked or are never read. They are clamped, which needs no synchronisation and
    does not wrap around to a plausible number.
    """
    x = x if x.dtype == torch.int32 else x.clamp(least, most).to(torch.int32)
    return x if x.stride(-1) == 1 else x.contiguous()


def longest(name: str, given: Any, cu_name: str, cu: torch.Tensor, rows: int, o: Options) -> int:
    """The longest sequence of packed rows: as given, else from the offsets if they may be read, else all rows."""
    if len(cu) == 0:
        raise InvalidArgument(cu_name, "shape (0,)", "[B + 1]: one more than there are sequences")
    if given is not None:
        given = to_int(given)
        if not is_int(given) or given < 0:
            raise InvalidArgument(name, repr(given), "None or an int of 0 or more")
        # A mask has the given size, even if that is more than there are rows.
        return min(LIMIT, int(given)) if _sizes_a_mask(name, o) else min(rows, int(given))
    if readable(cu, o.validate):
        return max(0, min(rows, max((end - start for start, end in pairwise(cu.tolist())), default=0)))
    if _sizes_a_mask(name, o):
        raise InvalidArgument(name, None, "the longest sequence", "a mask of packed rows is of that size")
    return rows  # a safe bound: the offsets are on a device that is not waited for


def _sizes_a_mask(name: str, o: Options) -> bool:
    """Whether a mask has a dim of the size `name`, "max_q" or "max_k"."""
    return o.mask is not None or (o.tree_mask is not None and name == "max_q")


def check_cu_seqlens(
    name: str, cu: torch.Tensor, rows: int, longest_name: str, longest: int | None, validate: Any
) -> None:
    """Checks that offsets start at 0, never fall and stay within `rows`, and that no sequence exceeds `longest`."""
    if not readable(cu, validate):
        return
    offsets = cu.tolist()
    if offsets[0] != 0:
        remedy = "these are offsets, not lengths: 0, then the sums of the lengths so far"
        raise InvalidArgument(f"{name}[0]", offsets[0], "0", remedy)
    actual = 0
    for b, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise InvalidArgument(f"{name}[{b + 1}]", end, f"at least {start}: offsets must not decrease")
        actual = max(actual, end - start)
    if offsets[-1] > rows:
        raise InvalidArgument(f"{name}[-1]", offsets[-1], f"at most {rows}, the packed rows")
    if longest is not None and longest < actual:
        raise InvalidArgument(longest_name, longest, f"at least {actual}, the longest sequence")


def check_block_table(table: torch.Tensor, lengths: torch.Tensor, page_size: int, pages: int, validate: Any) -> None:
    """Checks the entries of a block table that are within the lengths; the others are never read."""
    if not readable(table, validate) or not table.numel():
        return
    least, most = table.aminmax()
    if least >= 0 and most < pages:  # all are right, whatever the lengths
        return
    used = torch.arange(table.shape[1], device=table.device)[None, :] * page_size < lengths[:, None]
    bad = used & ((table < 0) | (table >= pages))
    if bool(bad.any()):
        b, slot = bad.nonzero()[0].tolist()
        raise InvalidArgument(f"block_table[{b}, {slot}]", int(table[b, slot]), f"a page, 0 to {pages - 1}")
