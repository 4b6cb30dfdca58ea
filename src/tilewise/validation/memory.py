"""Memory of tensors: overlap, alignment, V as a view of K."""

from __future__ import annotations

import torch

from ..core.private.torch import storage_of


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two elements may share an address. None do if each stride exceeds the reach of all smaller ones."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def is_aligned(x: torch.Tensor) -> bool:
    """Whether bulk copies (TMA) can read it: rows begin at multiples of 16 bytes, and no dim is broadcast."""
    strides = [stride * x.element_size() for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
    return x.data_ptr() % 16 == 0 and all(stride > 0 and stride % 16 == 0 for stride in strides)


def is_large(x: torch.Tensor) -> bool:
    """Whether it spans 32 GiB or more."""
    return (_reach(x) + 1) * x.element_size() >= 1 << 35


def is_v_in_k(k: torch.Tensor | None, v: torch.Tensor | None) -> bool:
    """Whether V is a view of the first columns of K, as in latent attention (MLA), or V's scales of K's.

    A contiguous V never is (it has rows of its own, or one row). The call cache's key relies on that (`key_of`).
    """
    if k is None or v is None:
        return k is v
    if v.shape[-1] >= k.shape[-1] or v.is_contiguous() or v.dtype != k.dtype or v.stride() != k.stride():
        return False
    if k.is_meta:
        return storage_of(k) == storage_of(v) and k.storage_offset() == v.storage_offset()
    return k.data_ptr() == v.data_ptr()


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.numel() == 0 or b.numel() == 0:
        return False
    if a.is_meta and storage_of(a) != storage_of(b):
        return False
    (a0, a1), (b0, b1) = extent(a), extent(b)
    return a0 < b1 and b0 < a1


def extent(x: torch.Tensor) -> tuple[int, int]:
    """Where its memory begins and ends; on meta, in its storage."""
    start = int(x.storage_offset()) * x.element_size() if x.is_meta else x.data_ptr()
    return start, start + (_reach(x) + 1) * x.element_size()


def _reach(x: torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
