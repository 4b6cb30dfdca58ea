"""Checks that read what is inside lengths, offsets and tables.

`validate=None` makes them where the values are on the CPU, `True` everywhere (a GPU then waits), `False` nowhere.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ..core.options import LIMIT, Options, as_offset, is_int
from ..core.tracing import is_traced
from ..errors import InvalidArgument


def readable(x: torch.Tensor, validate: Any) -> bool:
    """Whether the values are to be checked; a tensor that is traced has none yet."""
    return (validate is True or (validate is None and x.device.type == "cpu")) and not is_traced()


def check_lengths(name: str, lengths: torch.Tensor, limit: torch.Tensor | int, what: str, validate: Any) -> None:
    """Every length is between 0 and its limit."""
    if not readable(lengths, validate):
        return
    limits = limit.tolist() if isinstance(limit, torch.Tensor) else [limit] * len(lengths)
    for b, (length, most) in enumerate(zip(lengths.tolist(), limits, strict=True)):
        if not 0 <= length <= most:
            raise InvalidArgument(f"{name}[{b}]", length, f"0 to {most}, the {what}")


def as_int32(x: torch.Tensor, least: int = -(2**31), most: int = 2**31 - 1) -> torch.Tensor:
    """Lengths, offsets or pages as kernels read them. What does not fit was not checked, or is never read: it goes to
    the end of its range, which no device waits for, and does not wrap to a number that looks right.
    """
    return x if x.dtype == torch.int32 else x.clamp(least, most).to(torch.int32)


def row_offsets(offsets: torch.Tensor, q_len: int, kv_len: int, validate: Any) -> torch.Tensor:
    """`q_offset` of each row as int32, each in the range of positions."""
    if readable(offsets, validate):
        for b, offset in enumerate(offsets.tolist()):
            as_offset(offset, q_len, kv_len, f"q_offset[{b}]")
    return as_int32(offsets, -LIMIT, LIMIT)


def check_cu_seqlens(name: str, cu: torch.Tensor, rows: int, longest: Any, longest_name: str, o: Options) -> int:
    """Offsets that start at 0, never fall and stay within `rows`; returns the longest sequence, or a bound on it."""
    if len(cu) == 0:
        raise InvalidArgument(name, "shape (0,)", "[B + 1]: one more than there are sequences")
    if longest is not None and (not is_int(longest) or longest < 0):
        raise InvalidArgument(longest_name, repr(longest), "None or an int of 0 or more")
    if not readable(cu, o.validate):
        if longest is None and o.mask is not None:
            raise InvalidArgument(longest_name, None, "the longest sequence", "a mask of packed rows is of that size")
        # The longest sequence cannot be known without waiting for the device; all rows are a safe bound.
        return rows if longest is None else min(rows, longest)
    offsets = cu.tolist()
    if offsets[0] != 0:
        raise InvalidArgument(f"{name}[0]", offsets[0], "0")
    actual = 0
    for b, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise InvalidArgument(f"{name}[{b + 1}]", end, f"at least {start}: offsets never fall")
        actual = max(actual, end - start)
    if offsets[-1] > rows:
        raise InvalidArgument(f"{name}[-1]", offsets[-1], f"at most {rows}, the packed rows")
    if longest is not None and longest < actual:
        raise InvalidArgument(longest_name, longest, f"at least {actual}, the longest sequence")
    return actual if longest is None else min(rows, longest)


def check_block_table(table: torch.Tensor, lengths: torch.Tensor, page_size: int, pages: int, validate: Any) -> None:
    """Every entry that a length reaches names a page; what lies past it is never read."""
    if not readable(table, validate):
        return
    used = torch.arange(table.shape[1], device=table.device)[None, :] * page_size < lengths[:, None]
    bad = used & ((table < 0) | (table >= pages))
    if bool(bad.any()):
        b, slot = bad.nonzero()[0].tolist()
        raise InvalidArgument(f"block_table[{b}, {slot}]", int(table[b, slot]), f"a page, 0 to {pages - 1}")
