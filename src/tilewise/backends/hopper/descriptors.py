"""TMA descriptors of tensors, for Gluon kernels."""

from __future__ import annotations

import torch

from ..gpu.flags import DTYPE_NAMES
from ..gpu.gluon import TensorDescriptor, gl

TYPES = {"bf16": gl.bfloat16, "f16": gl.float16, "f32": gl.float32}


def strides_of(x: torch.Tensor) -> list[int]:
    """Strides for TMA, multiples of 16 bytes: dims of one element may have any stride, and are given such a one."""
    return [stride if size > 1 else 8 for size, stride in zip(x.shape[:-1], x.stride(), strict=False)] + [1]


def block_descriptor(x: torch.Tensor, block: list[int], dtype: str) -> TensorDescriptor:
    """A descriptor of tiles of shape `block`; past the ends of `x` they read as zeros and are not written."""
    layout = gl.NVMMASharedLayout.get_default_for(block, TYPES[dtype])
    return TensorDescriptor(x, list(x.shape), strides_of(x), block, layout)


def descriptor(x: torch.Tensor, rows: int, columns: int, dtype: str) -> TensorDescriptor:
    """A descriptor of tiles [rows, columns] of the last two dims."""
    return block_descriptor(x, [1, 1, rows, columns], dtype)


def has_tiles(x: torch.Tensor) -> bool:
    """Whether TMA can copy tiles of a mask: contiguous rows that are aligned to 16 bytes and not broadcast."""
    rows = [stride * x.element_size() for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
    apart = x.stride(-1) == 1 and (x.stride(-2) > 0 or x.shape[-2] == 1)
    return apart and all(n % 16 == 0 for n in (x.data_ptr(), *rows))


def mask_descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of tiles [rows, 64] of a mask; broadcast dims have one element."""
    own = x[tuple(slice(None if stride else 1) for stride in x.stride()[:2])]
    return descriptor(own, rows, 64, DTYPE_NAMES[x.dtype])


def flat_descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of tiles [rows, columns] of a matrix."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], TYPES[DTYPE_NAMES[x.dtype]])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


def row_descriptor(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """A descriptor of tiles [1, columns] of a float32 matrix."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, columns], layout)
