"""Sends lists of ints to the device in one transfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def blocks(*sizes: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """An int32 array, and pieces of it that are aligned to 16 bytes, as kernels prefer."""
    block = np.zeros(sum(n + 3 & ~3 for n in sizes), dtype=np.int32)
    return block, pieces(block, *sizes)


def pieces(block: Any, *sizes: int) -> list[Any]:
    """The same pieces of a block, which is an array or a tensor."""
    parts, start = [], 0
    for n in sizes:
        parts.append(block[start : start + n])
        start += n + 3 & ~3
    return parts


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Arrays of ints as int32 on the device, in one transfer."""
    sizes = [len(x) for x in arrays]
    block, parts = blocks(*sizes)
    for part, x in zip(parts, arrays, strict=True):
        part[:] = x
    return pieces(torch.from_numpy(block).to(device, non_blocking=True), *sizes)
