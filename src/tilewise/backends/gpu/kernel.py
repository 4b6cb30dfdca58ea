"""A Triton or Gluon kernel, launched through Triton, and a compiled one as the driver launches it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ...core.private.triton import INTERPRETED, launch_of
from ...core.storage import as_bytes
from .driver import CELLS, EARLY, CULaunchAttribute, CULaunchConfig
from .signature import captured_names

Arguments = dict[str, Any]
# Without fused multiply-adds the same expression gives the same bits in every loop of a kernel.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def stride_arguments(name: str, dims: str, x: torch.Tensor | None, grain: int = 1) -> Arguments:
    """`q_b`, `q_h` and so on: strides of a tensor's first dims in units of `grain`; 0 for an absent tensor."""
    strides = (0,) * len(dims) if x is None else x.stride()
    return {f"{name}_{dim}": stride // grain for dim, stride in zip(dims, strides, strict=False)}


def captured_arguments(tensors: Sequence[torch.Tensor]) -> Arguments:
    """What kernels for captured tensors take of these."""
    given: Arguments = {}
    for x, (pointer, *places) in zip(tensors, captured_names([x.ndim for x in tensors]), strict=True):
        numbers = (number for dim in zip(x.shape, x.stride(), strict=True) for number in dim)
        given |= {pointer: as_bytes(x)} | dict(zip(places, numbers, strict=True))
    return given


class Kernel:
    """A kernel with its compile-time arguments and options."""

    def __init__(self, function: Any, constants: Arguments | None = None, **options: Any) -> None:
        self.function, self.constants = function, constants or {}
        self.options = OPTIONS | options

    def arguments(self, given: Arguments) -> Arguments:
        """All arguments of the kernel: those in `given`, and compile-time ones."""
        given = given | self.constants
        return {name: given[name] for name in self.function.arg_names}

    def launch(self, grid: tuple[int, int], taken: Arguments) -> Any:
        """Launches through Triton, which compiles if needed; returns the compiled kernel."""
        return self.function[grid](**taken, **({} if INTERPRETED else self.options))


class KernelLaunch:
    """A compiled kernel with all arguments in place, to be launched through the driver as Triton does, but without
    inspecting each argument, most of which are compile-time ones.

    `places` says where pointers and tensor maps are: `pointer(tensor)`, `tensor_map(descriptor, form)`.
    """

    def __init__(self, compiled: Any, grid: tuple[int, int], given: Arguments, places: Any) -> None:
        of = launch_of(compiled)
        self.cells: list[Any] = [ctypes.c_uint64(0)]  # the first: two more arguments of every kernel, unused
        forms = iter(of.forms)
        found: list[int] = []
        for name, kind in of.kinds.items():
            if kind[0] == "*":
                found.append(places.pointer(given[name]))
                continue
            if kind.startswith("tensordesc"):
                like = given[name]
                found.append(places.tensor_map(like, next(forms)))
                cells = [*map(ctypes.c_int32, like.shape), *map(ctypes.c_int64, like.strides)]
            else:
                cells = [CELLS[kind](given[name])]
            found += [ctypes.addressof(cell) for cell in cells]
            self.cells += cells
        nothing = ctypes.addressof(self.cells[0])
        self.parameters = (ctypes.c_void_p * (len(found) + 2))(*found, nothing, nothing)
        self.early = CULaunchAttribute(EARLY, 0, 1)
        early = (ctypes.addressof(self.early), 1) if of.early else (None, 0)
        self.config = CULaunchConfig(*grid, 1, 32 * of.warps, 1, 1, of.shared, None, *early)
        self.compiled = compiled  # keeps the code that is launched
        config, parameters = ctypes.addressof(self.config), ctypes.addressof(self.parameters)
        self.arguments = (config, of.function, parameters, None)
