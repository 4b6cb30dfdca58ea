"""ALiBi slopes."""

from __future__ import annotations

import torch

from .core.options import is_int, to_int
from .errors import InvalidArgument

MOST_HEADS = 65536


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The slopes of the ALiBi paper for `heads` heads: float32 `[heads]`, all positive.

    If `heads` is a power of two, they are `2 ** (-8 / heads * (h + 1))`. Otherwise they are the slopes for the next
    lower power of two, followed by every second slope for the next higher one, as in the paper's code.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    heads = to_int(heads)
    if not is_int(heads) or not 1 <= heads <= MOST_HEADS:
        raise InvalidArgument("heads", repr(heads), f"an int of 1 to {MOST_HEADS}")
    power = 1 << (heads.bit_length() - 1)
    exponents = [8 / power * (h + 1) for h in range(power)]
    exponents += [4 / power * (2 * h + 1) for h in range(heads - power)]
    return torch.tensor([2.0**-e for e in exponents], dtype=torch.float32, device=device)
