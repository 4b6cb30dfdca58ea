"""Minima and maxima of a tensor over many ranges of indices at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def extremes(x: Tensor, ends: Sequence[tuple[Tensor, Tensor]], wide: Sequence[int], largest: bool) -> Tensor:
    """The smallest or largest element at indices `lo` to `hi` (inclusive) of each dim, which broadcast.

    `wide` are the dims with ranges of more than one index. All but one of them are taken whole, which bounds the
    result.
    """
    if not wide:
        return x[tuple(lo.long() for lo, _ in ends)] if ends else x
    kept = max(wide, key=lambda dim: x.shape[dim])
    for dim in wide:
        if dim != kept:
            x = x.amax(dim, keepdim=True) if largest else x.amin(dim, keepdim=True)
    zero = torch.zeros((), dtype=torch.int64, device=x.device)
    places = [zero if dim in wide else lo.long() for dim, (lo, _) in enumerate(ends) if dim != kept]
    return _over_ranges(x.movedim(kept, -1), places, *(end.long() for end in ends[kept]), largest=largest)


def _over_ranges(x: Tensor, places: list[Tensor], lo: Tensor, hi: Tensor, *, largest: bool) -> Tensor:
    """Over `x[*places, lo : hi + 1]`. A range is covered by two of a power of two, which may overlap.

    Tables of those are made level by level, each from the one before, and only one is kept.
    """
    combine = torch.maximum if largest else torch.minimum
    levels = torch.frexp((hi - lo + 1).double())[1] - 1
    present = torch.bincount(levels.flatten(), minlength=1).tolist()
    shape = torch.broadcast_shapes(lo.shape, hi.shape, *(place.shape for place in places))
    result = x.new_empty(shape)
    for level in range(len(present)):
        if level:
            half = 1 << level - 1
            x = combine(x[..., :-half], x[..., half:])  # over 2 ** level elements from each on
        if present[level]:
            last = x.shape[-1] - 1
            first, second = lo.clamp_max(last), (hi - (1 << level) + 1).clamp(0, last)
            found = combine(x[(*places, first)], x[(*places, second)])
            result = found.expand(shape).clone() if present[level] == levels.numel() else torch.where(
                levels == level, found, result
            )  # fmt: skip
    return result
