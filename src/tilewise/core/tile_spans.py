"""Tiles of the score matrix by the keys that rows see: which are skipped, mixed or full, without building a mask."""

from __future__ import annotations

import torch


def span_counts(lo: torch.Tensor, hi: torch.Tensor, Lk: int, tile: tuple[int, int]) -> tuple[int, int, int]:
    """Tiles (skip, mixed, full) of one sequence's spans `lo`, `hi` `[Lq]`: what `span_tiles` marks, only counted.

    The rows of a tile see one interval, for spans of neighbouring rows touch (not so with strides: `span_tiles`); it is
    full where its last row's span has begun and its first row's has not ended.
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

    Rows whose span ends after a tile's first column are a suffix and those whose span begins before its end a prefix:
    a tile holds a visible cell iff a row that sees any key is in the run that both share.
    """
    BQ, BK = tile
    R, Lq = lo.shape
    if Lq == 0 or Lk == 0:
        return torch.zeros(R, -(-Lq // BQ), -(-Lk // BK), dtype=torch.uint8, device=lo.device)
    top = torch.arange(0, Lq, BQ, device=lo.device)  # [nq]
    bottom = (top + BQ).clamp_max(Lq)
    start = torch.arange(0, Lk, BK, device=lo.device)  # [nk]
    end = (start + BK).clamp_max(Lk)

    # An empty row's ends may cross (a query before the first key, or whose window has left the last one), and with
    # strides a row between others may see nothing.
    seeing = torch.nn.functional.pad((lo < hi).cumsum(1), (1, 0))  # [R, Lq + 1] rows before that see a key
    columns = torch.stack([start, end - 1])[:, None].expand(-1, R, -1).contiguous()  # [2, R, nk]
    after = torch.searchsorted(hi.contiguous(), columns[0], right=True)  # [R, nk] first row with hi > start
    before = torch.searchsorted(lo.contiguous(), columns[1], right=True)  # [R, nk] first row with lo >= end
    low = torch.maximum(top[:, None], after[:, None, :])  # [R, nq, nk]
    high = torch.minimum(bottom[:, None], before[:, None, :])
    found = seeing.gather(1, high.flatten(1)) > seeing.gather(1, low.flatten(1))
    full = (lo[:, bottom - 1, None] <= start) & (hi[:, top, None] >= end)
    return found.view_as(low).to(torch.uint8) + full.to(torch.uint8)
