"""Classifies tiles of the score matrix as skip, mixed or full by the rows' key spans, without building a mask."""

from __future__ import annotations

import torch


def span_counts(lo: torch.Tensor, hi: torch.Tensor, Lk: int, tile: tuple[int, int]) -> tuple[int, int, int]:
    """Numbers of (skip, mixed, full) tiles of one sequence's spans `lo`, `hi` `[Lq]`: `span_tiles`, only counted.

    The rows of a tile together see one interval, since spans of neighbouring rows touch (with strides they do not: use
    `span_tiles`). A tile is full if it begins at or after the last row's `lo` and ends by the first row's `hi`.
    """
    BQ, BK = tile
    Lq = len(lo)
    nk = -(-Lk // BK)
    if Lq == 0 or Lk == 0:
        return -(-Lq // BQ) * nk, 0, 0
    top = torch.arange(0, Lq, BQ, device=lo.device)
    bottom = (top + BQ).clamp_max(Lq) - 1
    seeing = lo < hi
    pad = (0, -Lq % BQ)
    first = torch.nn.functional.pad(torch.where(seeing, lo, Lk), pad, value=Lk).unflatten(0, (-1, BQ)).amin(1)
    last = torch.nn.functional.pad(torch.where(seeing, hi, 0), pad, value=0).unflatten(0, (-1, BQ)).amax(1)
    seen = int(((last + BK - 1) // BK - first // BK).clamp_min(0).sum())
    whole = torch.where(hi[top] >= Lk, nk, hi[top] // BK)  # tiles that end before the first row's span does
    full = int((whole - (lo[bottom] + BK - 1) // BK).clamp_min(0).sum())
    return len(top) * nk - seen, seen - full, full


def span_tiles(lo: torch.Tensor, hi: torch.Tensor, Lk: int, tile: tuple[int, int]) -> torch.Tensor:
    """Classifies tiles `[R, nq, nk]` (0 skip, 1 mixed, 2 full) of spans `lo`, `hi` `[R, Lq]`, without building a mask.

    The rows with `hi` past a tile's first column are a suffix, those with `lo` before its end a prefix. The tile has a
    visible cell iff a row in both sees any key.
    """
    BQ, BK = tile
    R, Lq = lo.shape
    if Lq == 0 or Lk == 0:
        return torch.zeros(R, -(-Lq // BQ), -(-Lk // BK), dtype=torch.uint8, device=lo.device)
    top = torch.arange(0, Lq, BQ, device=lo.device)  # [nq]
    bottom = (top + BQ).clamp_max(Lq)
    start = torch.arange(0, Lk, BK, device=lo.device)  # [nk]
    end = (start + BK).clamp_max(Lk)

    # A row that sees nothing may have lo > hi (a query before the first key, or a window past the last one), and with
    # strides there may be such rows between others.
    seeing = torch.nn.functional.pad((lo < hi).cumsum(1), (1, 0))  # [R, Lq + 1]: rows before this one that see a key
    columns = torch.stack([start, end - 1])[:, None].expand(-1, R, -1).contiguous()  # [2, R, nk]
    after = torch.searchsorted(hi.contiguous(), columns[0], right=True)  # [R, nk] first row with hi > start
    before = torch.searchsorted(lo.contiguous(), columns[1], right=True)  # [R, nk] first row with lo >= end
    low = torch.maximum(top[:, None], after[:, None, :])  # [R, nq, nk]
    high = torch.minimum(bottom[:, None], before[:, None, :])
    found = seeing.gather(1, high.flatten(1)) > seeing.gather(1, low.flatten(1))
    full = (lo[:, bottom - 1, None] <= start) & (hi[:, top, None] >= end)
    return found.view_as(low).to(torch.uint8) + full.to(torch.uint8)
