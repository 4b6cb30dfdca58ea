"""The tiles that TMA copies for Gluon kernels, as descriptors of tensors."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TYPES = {"bf16": gl.bfloat16, "f16": gl.float16}


def strides_of(x: torch.Tensor) -> list[int]:
    """Strides that TMA takes: those of dims of one element may be anything, and must be multiples of 16 bytes."""
    return [stride if size > 1 else 8 for size, stride in zip(x.shape[:-1], x.stride(), strict=False)] + [1]


def block_descriptor(x: torch.Tensor, block: list[int], dtype: str) -> TensorDescriptor:
    """Tiles of shape `block`; past the ends of `x` they read as zeros and are not written."""
    layout = gl.NVMMASharedLayout.get_default_for(block, TYPES[dtype])
    return TensorDescriptor(x, list(x.shape), strides_of(x), block, layout)


def descriptor(x: torch.Tensor, rows: int, columns: int, dtype: str) -> TensorDescriptor:
    """Tiles [rows, columns] of the last two dims."""
    return block_descriptor(x, [1, 1, rows, columns], dtype)
