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
    return _matrix(width, device)


mark_constant(matrix)


@lru_cache(maxsize=64)
def _matrix(width: int, device: torch.device) -> torch.Tensor:
    block = block_of(width)
    H = np.ones((1, 1))
    while len(H) < block:
        H = np.block([[H, H], [H, -H]])
    R = np.kron(np.eye(width // block), H / block**0.5)
    signs = np.array([_sign(i) for i in range(width)])
    with torch.inference_mode(False):  # it is cached, and may be used outside
        return torch.from_numpy((signs[:, None] * R).astype(np.float32)).to(device)


def _sign(i: int) -> float:
    """A pseudo-random sign from a hash of `i` that is simple to write in any language."""
    bits = (i + 1) * 0x9E3779B1 & 0xFFFFFFFF
    bits = (bits ^ bits >> 15) * 0x85EBCA6B & 0xFFFFFFFF
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return -1.0 if (bits ^ bits >> 16) & 1 else 1.0


def rotate(x: torch.Tensor) -> torch.Tensor:
    """`x R` over the last dim, multiplied in float32, in x's dtype."""
    return _times(x, matrix(x.shape[-1], x.device))


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """`x R^T`."""
    return _times(x, matrix(x.shape[-1], x.device).T)


def _times(x: torch.Tensor, R: torch.Tensor) -> torch.Tensor:
    if not torch.is_autocast_enabled(x.device.type):
        return (x.float() @ R).to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):  # it would multiply in 16 bits
        return (x.float() @ R).to(x.dtype)
