"""Calls of NVIDIA's driver, for launches by address."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
CELLS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class CULaunchConfig(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class CULaunchAttribute(ctypes.Structure):
    _fields_ = (("name", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class Driver:
    """Driver functions for launches."""

    def __init__(self) -> None:
        cuda = ctypes.CDLL("libcuda.so.1")
        self.launch, self.get_context = cuda.cuLaunchKernelEx, cuda.cuCtxGetCurrent
        self.set_context = cuda.cuCtxSetCurrent
        self.launch.argtypes = [ctypes.c_void_p] * 4
        self.set_context.argtypes = [ctypes.c_void_p]

    def context(self) -> int | None:
        """The current context of this thread."""
        context = ctypes.c_void_p()
        self.get_context(ctypes.byref(context))
        return context.value


class TensorMapDriver(Driver):
    """The same, with those for TMA tensor maps."""

    def __init__(self) -> None:
        super().__init__()
        cuda = ctypes.CDLL("libcuda.so.1")
        self.encode, self.move = cuda.cuTensorMapEncodeTiled, cuda.cuTensorMapReplaceAddress
        self.encode.argtypes = [
            ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4,
        ]  # fmt: skip
        self.move.argtypes = [ctypes.c_void_p] * 2


@cache
def driver() -> Driver:
    return Driver()


@cache
def tensor_map_driver() -> TensorMapDriver:
    return TensorMapDriver()


def check(error: int, done: str) -> None:
    if error:
        raise RuntimeError(f"a kernel or its tensor maps could not be {done}: CUDA error {error}")
