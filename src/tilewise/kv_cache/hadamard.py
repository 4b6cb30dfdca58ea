"""Rotation of heads by a Hadamard matrix: it spreads outliers over all elements and leaves scores unchanged.

R is orthogonal, so (q R) . (k R) = q . k, and (P (V R)) R^T = P V. R = S H: S flips signs by a fixed pattern, so that
a row of equal elements does not become a single large one; H is made of Walsh-Hadamard blocks, the largest power
of two that divides the width.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from ..core.private.torch import mark_constant
from ..errors import InvalidArgument

LEAST = 8  # elements of a block; smaller ones would spread outliers too little


def block_of(width: int) -> int:
    """The largest power of two that divides `width`."""
    return width & -width


def check(argument: str, width: int) -> None:
    if block_of(width) < LEAST:
        raise InvalidArgument(argument, f"a head of {width}", f"a multiple of {LEAST}, to be rotated", "rotate=False")


def matrix(width: int, device: torch.device) -> torch.Tensor:
    """R `[width, width]`, float32: the same in every process and version, since stored caches depend on it.

    >>> R = matrix(96, torch.device("cpu"))
    >>> torch.allclose(R @ R.T, torch.eye(96), atol=1e-6)
    True
    """
    return (signs(width, device) * block_of(width) ** -0.5).float()


def signs(width: int, device: torch.device) -> torch.Tensor:
    """R times the root of its block: 1 and -1, and 0 outside of the blocks. In float64 on a CPU."""
    return _signs(width, device)


mark_constant(signs)


@lru_cache(maxsize=64)
def _signs(width: int, device: torch.device) -> torch.Tensor:
    block = block_of(width)
    H = np.ones((1, 1))
    while len(H) < block:
        H = np.block([[H, H], [H, -H]])
    R = np.kron(np.eye(width // block), H) * np.array([_sign(i) for i in range(width)])[:, None]
    with torch.inference_mode(False):  # it is cached, and may be used outside
        return torch.from_numpy(R).to(device, torch.float64 if device.type == "cpu" else torch.float32)


def _sign(i: int) -> float:
    """A pseudo-random sign from a hash of `i` that is simple to write in any language."""
    bits = (i + 1) * 0x9E3779B1 & 0xFFFFFFFF
    bits = (bits ^ bits >> 15) * 0x85EBCA6B & 0xFFFFFFFF
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return -1.0 if (bits ^ bits >> 16) & 1 else 1.0


def rotate(x: torch.Tensor) -> torch.Tensor:
    """`x R` over the last dim, in x's dtype."""
    return _times(x, signs(x.shape[-1], x.device))


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """`x R^T`."""
    return _times(x, signs(x.shape[-1], x.device).T)


def _times(x: torch.Tensor, S: torch.Tensor) -> torch.Tensor:
    """In float64 on a CPU: sums of up to 576 float32 hardly ever round, so their order, which in MKL depends on the
    number of rows, does not show: a row is rotated to the same bits in any batch.
    """
    factor = block_of(len(S)) ** -0.5
    if not torch.is_autocast_enabled(x.device.type):
        return (x.to(S.dtype) @ S * factor).to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):  # it would multiply in 16 bits
        return (x.to(S.dtype) @ S * factor).to(x.dtype)
