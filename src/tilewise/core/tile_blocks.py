"""Tile states: of cells, in other tiles, and as lists of block indices."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidArgument
from .arrays import to_tensor
from .options import is_int, to_int

MIXED, FULL = 1, 2  # as in `tile_map.py`, which imports this module


def any_in_tiles(cells: torch.Tensor, BQ: int, BK: int) -> torch.Tensor:
    """Whether a tile of bool `cells` `[B, H, Lq, Lk]` holds a True one: `[B, H, nq, nk]`."""
    for dim, tile in ((3, BK), (2, BQ)):
        size = min(tile, max(1, cells.shape[dim]))  # no padding past the edges
        tail = -cells.shape[dim] % size
        pad = (0, tail) if dim == 3 else (0, 0, 0, tail)
        cells = torch.nn.functional.pad(cells, pad, value=False).unflatten(dim, (-1, size)).any(dim + 1)
    return cells


def regroup(states: torch.Tensor, dim: int, size: int, old: int, new: int) -> torch.Tensor:
    """Regroups one dim of `states` from tiles of `old` to tiles of `new` cells, `size` cells in all."""
    if old == new or size == 0:
        return states
    starts = torch.arange(0, size, new, device=states.device)
    first = starts // old
    last = ((starts + new).clamp_max(size) - 1) // old
    index = first[:, None] + torch.arange(int(new // old + 2), device=states.device)  # [n, reach]
    index = torch.minimum(index, last[:, None])  # repeats the last tile, which changes neither min nor max
    parts = states.index_select(dim, index.flatten()).unflatten(dim, index.shape)
    low, high = parts.amin(dim + 1), parts.amax(dim + 1)
    return torch.where(low == high, low, MIXED).to(torch.uint8)


def states_of(indices: Any, columns: int) -> torch.Tensor:
    """`block_indices` `[B, rows, n]` or `[B, heads, rows, n]` as states `[B, 1 or heads, rows, columns]`: full for
    each block in the list.
    """
    x = to_tensor("block_indices", indices)
    if x.dtype not in (torch.int32, torch.int64) or x.ndim not in (3, 4):
        raise InvalidArgument("block_indices", f"{x.dtype} of rank {x.ndim}", "int32 [B, rows, n] or [B, Hkv, rows, n]")
    x = (x[:, None] if x.ndim == 3 else x).long()
    if x.is_cpu and x.numel() and not (int(x.min()) >= -1 and int(x.max()) < columns):
        wrong = int(x.min()) if int(x.min()) < -1 else int(x.max())
        raise InvalidArgument("block_indices", f"an index of {wrong}", f"-1 (none) to {columns - 1}")
    states = torch.zeros((*x.shape[:3], columns + 1), dtype=torch.uint8, device=x.device)
    return states.scatter_(3, torch.where(x < 0, columns, x), FULL)[..., :columns].contiguous()


def best_of(scores: Any, count: Any) -> torch.Tensor:
    """States `[B, H, rows, columns]`: the `count` best tiles of each row are full, except scores of -inf or NaN."""
    x = to_tensor("scores", scores)
    if not x.is_floating_point() or x.ndim not in (2, 3, 4):
        raise InvalidArgument("scores", f"{x.dtype} of rank {x.ndim}", "floats [B, H, nq, nk], [H, nq, nk] or [nq, nk]")
    count = to_int(count)
    if not is_int(count) or count < 0:
        raise InvalidArgument("count", repr(count), "an int of 0 or more tiles")
    x = x[(None,) * (4 - x.ndim)]
    x = torch.where(x.isnan(), -torch.inf, x)
    values, best = x.topk(min(count, x.shape[3]), 3)
    states = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    return states.scatter_(3, best, torch.where(values == -torch.inf, 0, FULL).to(torch.uint8))


def indices_of(states: torch.Tensor) -> torch.Tensor:
    """The tiles of each row that are not skipped, in order: int32 `[B, H, rows, n]`, padded with -1.

    n is the longest list, so a GPU is waited for.
    """
    seen = states != 0
    counts = seen.sum(3)
    most = int(counts.max()) if counts.numel() else 0
    order = torch.argsort(~seen, dim=3, stable=True)[..., :most]  # tiles that are not skipped come first
    there = torch.arange(most, device=states.device) < counts[..., None]
    return torch.where(there, order, -1).to(torch.int32)
