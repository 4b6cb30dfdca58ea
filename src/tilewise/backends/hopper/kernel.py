"""A Gluon kernel, launched through Triton once and directly from then on, and the tiles that TMA copies for it.

The way through Triton takes hundreds of microseconds, the direct one tens.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

Given = dict[str, Any]
# Without fused multiply-adds the same expression gives the same bits in every loop of a kernel.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
TYPES = {"bf16": gl.bfloat16, "f16": gl.float16}


class Kernel:
    """A kernel and the builds of it that calls have needed."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.ready: dict[Any, tuple[Any, list[Any]]] = {}

    def __call__(self, programs: int, given: Given, key: Any) -> None:
        """Launches with what the kernel takes of `given`; equal keys mean equal strides, alignments and constants."""
        names = self.function.arg_names
        kept = self.ready.get(key)
        if kept is None:
            compiled = self.function[(programs,)](**{name: given[name] for name in names}, **OPTIONS)
            run = compiled.run
            middle = [
                compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata,
                None, None, None,
            ]  # fmt: skip
            self.ready[key] = (run.launch, middle)
            return
        launch, middle = kept
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        launch(programs, 1, 1, stream, *middle, *[given[name] for name in names])


class Tile:
    """What a direct launch reads of a `TensorDescriptor`, without its checks."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, x: torch.Tensor) -> None:
        self.base, self.shape, self.strides, self.padding = x, list(x.shape), strides_of(x), "zero"


def strides_of(x: torch.Tensor) -> list[int]:
    """Strides that TMA takes: those of dims of one element may be anything, and must be multiples of 16 bytes."""
    return [stride if size > 1 else 8 for size, stride in zip(x.shape[:-1], x.stride(), strict=False)] + [1]


def descriptor(x: torch.Tensor, rows: int, columns: int, dtype: str) -> TensorDescriptor:
    """Tiles [rows, columns] of the last two dims; past the ends of `x` they read as zeros and are not written."""
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, TYPES[dtype])
    return TensorDescriptor(x, list(x.shape), strides_of(x), block, layout)
