"""Minima and maxima of a tensor over many ranges of indices at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

Tensor = torch.Tensor
FEW = 16  # ranges that are taken index by index


def extremes(x: Tensor, ends: Sequence[tuple[Tensor, Tensor]], wide: Sequence[int], largest: bool) -> Tensor:
    """The smallest or largest element at indices `lo` to `hi` (inclusive) of each dim, which broadcast.

    `wide` are the dims with ranges of more than one index. The widest is exact. Of the others, narrow ones are taken
    index by index (tables of blocks, whose tiles reach into two or three), and the rest whole, which bounds the result.
    """
    if not wide:
        return x[tuple(lo.long() for lo, _ in ends)] if ends else x
    widths = {dim: int((ends[dim][1] - ends[dim][0]).max()) + 1 for dim in wide}
    *others, kept = sorted(wide, key=lambda dim: (widths[dim], x.shape[dim]))
    narrow: list[int] = []
    for dim in others:
        if math.prod(widths[d] for d in (*narrow, dim)) <= FEW:
            narrow.append(dim)
        else:
            x = x.amax(dim, keepdim=True) if largest else x.amin(dim, keepdim=True)
    zero = torch.zeros((), dtype=torch.int64, device=x.device)
    whole = set(others) - set(narrow)
    places = [zero if dim in whole else lo.long() for dim, (lo, _) in enumerate(ends)]
    table, (first, last) = x.movedim(kept, -1), (end.long() for end in ends[kept])
    found: Tensor | None = None
    for steps in itertools.product(*(range(widths[dim]) for dim in narrow)):
        own = list(places)
        for dim, step in zip(narrow, steps, strict=True):
            own[dim] = torch.minimum(places[dim] + step, ends[dim][1].long())
        del own[kept]
        part = _over_ranges(table, own, first, last, largest=largest)
        found = part if found is None else torch.maximum(found, part) if largest else torch.minimum(found, part)
    assert found is not None
    return found


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
