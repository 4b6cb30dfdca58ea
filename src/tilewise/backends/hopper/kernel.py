"""A Gluon kernel, launched through Triton once and by addresses from then on, and the tiles that TMA copies for it.

The way through Triton takes hundreds of microseconds, the direct one a few.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

Given = dict[str, Any]
# Without fused multiply-adds the same expression gives the same bits in every loop of a kernel.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
TYPES = {"bf16": gl.bfloat16, "f16": gl.float16}


class Kernel:
    """A Gluon or Triton kernel."""

    def __init__(self, function: Any, **options: Any) -> None:
        self.function, self.options = function, OPTIONS | options

    def first(self, programs: int, given: Given) -> Ready:
        """Launches through Triton, with what the kernel takes of `given`; returns what later launches need."""
        taken = {name: given[name] for name in self.function.arg_names}
        return Ready(self.function[(programs,)](**taken, **self.options), programs, taken)


class Ready:
    """A compiled kernel with all arguments in place but for its stream, its pointers and its tiles."""

    def __init__(self, compiled: Any, programs: int, taken: Given) -> None:
        run = compiled.run
        # Triton's own launch, less its look at every argument.
        self.launch = run.launch
        arguments: list[Any] = [
            programs, 1, 1, None, compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
            compiled.packed_metadata, None, None, None,
        ]  # fmt: skip
        self.stream = arguments.index(None)
        self.places: list[tuple[int, str]] = []  # arguments that change, and their names
        self.tiles: dict[str, Tiles] = {}
        for name, value in taken.items():
            if isinstance(value, torch.Tensor | TensorDescriptor):
                self.places.append((len(arguments), name))
            if isinstance(value, TensorDescriptor):
                self.tiles[name] = Tiles(value, compiled.metadata.tensordesc_meta[len(self.tiles)])
                arguments += [None, *value.shape, *value.strides]
            else:
                arguments.append(None if isinstance(value, torch.Tensor) else value)
        if self.tiles:  # beneath what makes tiles of descriptors, which has been done here
            self.launch = inspect.getclosurevars(self.launch).nonlocals["launcher"]
        self.arguments = arguments

    def __call__(self, at: Given, stream: int) -> None:
        """Launches with these addresses, and tiles, by their names."""
        arguments = self.arguments.copy()
        for place, name in self.places:
            arguments[place] = at[name]
        arguments[self.stream] = stream
        self.launch(*arguments)


class Tiles:
    """Makes what TMA needs to know about a tensor, of its address."""

    __slots__ = ("form", "make")

    def __init__(self, like: TensorDescriptor, meta: dict[str, Any]) -> None:
        element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        self.form = (meta["swizzle"], meta["elem_size"], element, meta["block_size"], like.shape, like.strides, 0)
        self.make = driver.active.utils.fill_tma_descriptor

    def __call__(self, address: int) -> Any:
        return self.make(address, *self.form)


def strides_of(x: torch.Tensor) -> list[int]:
    """Strides that TMA takes: those of dims of one element may be anything, and must be multiples of 16 bytes."""
    return [stride if size > 1 else 8 for size, stride in zip(x.shape[:-1], x.stride(), strict=False)] + [1]


def descriptor(x: torch.Tensor, rows: int, columns: int, dtype: str) -> TensorDescriptor:
    """Tiles [rows, columns] of the last two dims; past the ends of `x` they read as zeros and are not written."""
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, TYPES[dtype])
    return TensorDescriptor(x, list(x.shape), strides_of(x), block, layout)
