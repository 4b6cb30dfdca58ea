"""Tensors whose memory has no values yet: reading it in a kernel, before a kernel has written it, is a mistake."""

import weakref
from typing import Any, TypeVar

import numpy as np
import torch

from mslsim.arguments import of_tensor

T = TypeVar("T", torch.Tensor, np.ndarray)

# By address: of each byte, whether it has been written.
_MARKED: dict[int, np.ndarray] = {}


def _forget(address: int, marks: Any) -> None:
    if _MARKED.get(address) is marks:
        del _MARKED[address]


def unwritten(x: T) -> T:
    """Marks the tensor's memory as unwritten, as long as this very tensor lives, and gives it back. Writes of the host
    are not seen: fill a tensor first, then mark it, if it is to hold poison."""
    memory = of_tensor(x)
    if memory.bytes:
        marks = np.zeros(memory.bytes, np.uint8)
        _MARKED[memory.address] = marks
        weakref.finalize(x, _forget, memory.address, marks)
    return x


def marks(start: int, end: int) -> np.ndarray | None:
    """The marks of the bytes from `start` to `end`, if a marked tensor spans them all; kernels set them."""
    for address, written in _MARKED.items():
        if address <= start and end <= address + len(written):
            return written[start - address : end - address]
    return None
