"""New keys and values of `flash_attn_with_kvcache`: checks, rotary embedding, writing to the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...errors import InvalidArgument
from ...validation import values
from .. import rotary
from .inputs import FP8, Rows


class Tables(NamedTuple):
    """Rotary tables, the position of each row's first new token `[B]`, and whether pairs are interleaved."""

    cos: torch.Tensor
    sin: torch.Tensor
    start: torch.Tensor
    interleaved: bool


def check_new_tokens(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: int | None
) -> None:
    """Checks new keys and values against their caches: `[B, n, Hkv, D]` or, without `batch`, packed `[T, Hkv, D]`."""
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        want = (k.shape[0] if batch is None else batch, *k.shape[1 : k.ndim - 2], *cache.shape[2:])
        rank = 3 if batch is None else 4
        if x.ndim != rank or tuple(x.shape) != want or x.dtype != cache.dtype or x.device != cache.device:
            given = f"{tuple(x.shape)} {x.dtype} on {x.device}"
            raise InvalidArgument(name, given, f"{want} {cache.dtype} on {cache.device}, as {name}_cache")


def checked_tables(
    cos: torch.Tensor,
    sin: torch.Tensor,
    starts: torch.Tensor,
    interleaved: bool,
    head_dim: int,
    capacity: int,
    rows: torch.Tensor | int,
) -> Tables:
    """Checks that rotary tables cover the capacity and, if lengths can be read, `rows` tokens from each start."""
    rotary.check(cos, sin, head_dim, capacity)
    reach = starts + rows
    if values.readable(reach, None) and len(reach) and int(reach.max()) > len(cos):
        need = f"{int(reach.max())} or more, as the tokens reach"
        raise InvalidArgument("rotary_cos", f"{cos.shape[0]} positions", need)
    if FP8 in (cos.dtype, sin.dtype):
        cos, sin = cos.float(), sin.float()
    return Tables(cos, sin, starts, interleaved)


def rotate_tokens(x: torch.Tensor, t: Tables, rows: Rows | None, by_position: bool) -> torch.Tensor:
    """Rotates each token of `x` `[B, L, H, D]`, or packed `[T, H, D]` with its `rows`, by its position.

    If not `by_position`, all tokens of a sequence are at its first position.
    """
    if rows is None:
        at = t.start[:, None].long()
        steps = torch.arange(x.shape[1], device=x.device)
        at = at + steps if by_position else at.expand(-1, x.shape[1])
    else:
        at = t.start[rows.sequence].long()
        at = at + rows.place if by_position else at
    at = at.clamp(0, len(t.cos) - 1)  # values on a device are not checked: they must not index past the tables
    wide = x.float() if x.dtype == FP8 else x
    if rows is not None:
        return rotary.rotate(wide[None], t.cos, t.sin, at[None], t.interleaved)[0].to(x.dtype)
    return rotary.rotate(wide, t.cos, t.sin, at, t.interleaved).to(x.dtype)


def write_tokens(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor | None,
    rows: Rows | None,
) -> None:
    """Writes new tokens after the `lengths` tokens of their sequences, to rows or pages `[., size, Hkv, D]`."""
    pick = None
    if rows is None:
        sequence = None
        place = lengths[:, None]  # [B, n]
        if k.shape[1] > 1:
            place = place + torch.arange(k.shape[1], device=k.device)
    else:
        # Padding rows repeat the write of the last row of a sequence.
        last = (rows.valid.sum() - 1).clamp_min(0)
        pick = torch.arange(len(k), device=k.device).clamp(max=last)
        sequence = rows.sequence[pick]  # [T]
        place = lengths[sequence] + rows.place[pick]
    size = k_cache.shape[1]
    if rows is not None:  # without any sequence, the index of row 0 may be past the end
        place = place.clamp(max=size * (1 if table is None else table.shape[1]) - 1)
    if table is None:
        index = torch.arange(len(lengths), device=k.device)[:, None] if sequence is None else sequence, place
    elif sequence is None:
        index = table.gather(1, (place // size).long()), place % size
    else:
        index = table[sequence, place // size], place % size
    for cache, x in ((k_cache, k), (v_cache, v)):
        if cache.dtype == FP8:  # torch cannot index-copy float8, but bytes
            cache, x = cache.view(torch.int8), x.view(torch.int8)
        if rows is not None:
            x = torch.where(rows.valid.any(), x[pick], cache[index])
        cache.index_put_(index, x)
