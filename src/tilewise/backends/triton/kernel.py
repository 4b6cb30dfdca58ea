"""A Triton kernel, launched through Triton once and by addresses from then on."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any

import torch

import triton

Arguments = dict[str, Any]
INTERPRETED = triton.knobs.runtime.interpret
# Without fused multiply-adds the same expression gives the same bits in every loop of a kernel.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Triton has no bool in memory, and not every GPU has float8: both are read as bytes."""
    return x.view(torch.uint8) if x.dtype in (torch.bool, torch.float8_e4m3fn) else x


def in_pairs(x: torch.Tensor) -> bool:
    """Whether a tensor of bytes can be read in units of two."""
    return x.shape[-1] % 2 == 0 and not any(n % 2 for n in (x.data_ptr(), *x.stride()[:-1]))


class Kernel:
    """A Triton kernel with its compile-time arguments."""

    def __init__(self, function: Any, constants: Arguments, **options: Any) -> None:
        self.function, self.constants, self.options = function, constants, OPTIONS | options

    def first(self, grid: tuple[int, int], given: Arguments) -> Ready | None:
        """Launches through Triton, which compiles if it must; returns what later launches need, if they can do without
        Triton.
        """
        if INTERPRETED:
            self.function[grid](**given, **self.constants)
            return None
        compiled = self.function[grid](**given, **self.constants, **self.options)
        if torch.version.cuda is None:
            return None
        return Ready(compiled, grid, given | self.constants)


class Launch(ctypes.Structure):
    """The driver's `CUlaunchConfig`."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "threads_y", "threads_z", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class Attribute(ctypes.Structure):
    """The driver's `CUlaunchAttribute`."""

    _fields_ = (("name", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
CELLS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class Driver:
    """What is needed of NVIDIA's driver."""

    def __init__(self) -> None:
        cuda = ctypes.CDLL("libcuda.so.1")
        self.launch, self.get_context = cuda.cuLaunchKernelEx, cuda.cuCtxGetCurrent
        self.set_context = cuda.cuCtxSetCurrent
        self.launch.argtypes = [ctypes.c_void_p] * 4
        self.set_context.argtypes = [ctypes.c_void_p]

    def context(self) -> int | None:
        """This thread's."""
        context = ctypes.c_void_p()
        self.get_context(ctypes.byref(context))
        return context.value


@cache
def driver() -> Driver:
    return Driver()


class Ready:
    """A compiled kernel with all arguments in place but for its stream and its pointers.

    It is handed to the driver as Triton does it, less a look at each of 80 arguments, most of which are not the
    kernel's but compile-time ones.
    """

    def __init__(self, compiled: Any, grid: tuple[int, int], given: Arguments, cuda: Any = None) -> None:
        meta = compiled.metadata
        assert meta.num_ctas == 1
        assert meta.global_scratch_size == meta.profile_scratch_size == 0
        assert not meta.launch_cooperative_grid
        kinds = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
        pointers = [name for name, kind in kinds.items() if kind[0] == "*"]
        self.pack = struct.Struct(f"={len(pointers)}Q").pack_into
        self.addresses = (ctypes.c_uint64 * len(pointers))()
        at = {name: ctypes.addressof(self.addresses) + 8 * i for i, name in enumerate(pointers)}
        self.cells = {name: CELLS[kind](given[name]) for name, kind in kinds.items() if kind[0] != "*"}
        at |= {name: ctypes.addressof(cell) for name, cell in self.cells.items()}
        self.scratch = ctypes.c_uint64(0)  # two more arguments of every kernel, not in use
        nothing = ctypes.addressof(self.scratch)
        self.parameters = (ctypes.c_void_p * (len(kinds) + 2))(*(at[name] for name in kinds), nothing, nothing)
        self.early = Attribute(EARLY, 0, 1)
        early = (ctypes.addressof(self.early), 1) if meta.launch_pdl else (None, 0)
        self.how = Launch(*grid, 1, 32 * meta.num_warps, 1, 1, meta.shared, None, *early)
        self.compiled = compiled  # whose code is to be launched
        self.arguments = (ctypes.addressof(self.how), compiled.function, ctypes.addressof(self.parameters), None)
        self.driver = cuda or driver()
        self.launch = self.driver.launch
        self.context = self.driver.context()
        self.lock = Lock()

    def __call__(self, addresses: Sequence[int], stream: int | None = None) -> None:
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        with self.lock:  # what is launched lies in memory that all threads share
            self.pack(self.addresses, 0, *addresses)
            self.how.stream = stream
            error = self.launch(*self.arguments)
            if error == NO_CONTEXT:  # the first launch of a new thread
                self.driver.set_context(self.context)
                error = self.launch(*self.arguments)
        if error:
            raise RuntimeError(f"a kernel could not be launched: CUDA error {error}")
