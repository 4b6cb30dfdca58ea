"""A Gluon kernel, launched through Triton once and by addresses from then on, and the tiles that TMA copies for it.

The way through Triton takes hundreds of microseconds, the direct one a few.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any

import torch
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.kernel import CELLS, NO_CONTEXT, Driver, Launch

Given = dict[str, Any]
# Without fused multiply-adds the same expression gives the same bits in every loop of a kernel.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
TYPES = {"bf16": gl.bfloat16, "f16": gl.float16}
MAP_BYTES = 128  # of the driver's `CUtensorMap`, which begins at a multiple of 64 bytes
L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


class TileDriver(Driver):
    """What tiles need of NVIDIA's driver besides."""

    def __init__(self) -> None:
        super().__init__()
        cuda = ctypes.CDLL("libcuda.so.1")
        self.encode, self.move = cuda.cuTensorMapEncodeTiled, cuda.cuTensorMapReplaceAddress
        self.encode.argtypes = [
            ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4,
        ]  # fmt: skip
        self.move.argtypes = [ctypes.c_void_p] * 2


@cache
def tile_driver() -> TileDriver:
    return TileDriver()


class Tiles:
    """What TMA needs to know about a tensor: all but where it begins is the same from call to call."""

    def __init__(self, name: str, like: TensorDescriptor, meta: dict[str, Any], cuda: Any) -> None:
        self.name, self.replace = name, cuda.move
        self.memory = ctypes.create_string_buffer(MAP_BYTES + 64)
        start = ctypes.addressof(self.memory)
        self.at = start + -start % 64
        self.address = like.base.data_ptr()
        rank = len(like.shape)
        dims = (ctypes.c_uint64 * rank)(*reversed(like.shape))
        strides = (ctypes.c_uint64 * (rank - 1))(*(n * meta["elem_size"] for n in reversed(like.strides[:-1])))
        box = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
        steps = (ctypes.c_uint32 * rank)(*[1] * rank)
        arrays = (ctypes.addressof(x) for x in (dims, strides, box, steps))
        element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        check(cuda.encode(self.at, element, rank, self.address, *arrays, 0, meta["swizzle"], L2_128B, 0), "described")

    def move(self, address: int) -> None:
        """The tensor is there now."""
        if address != self.address:
            check(self.replace(self.at, address), "moved")
            self.address = address


class Kernel:
    """A Gluon or Triton kernel."""

    def __init__(self, function: Any, cuda: Any = None, **options: Any) -> None:
        self.function, self.options, self.cuda = function, OPTIONS | options, cuda

    def first(self, programs: int, given: Given, tiles: dict[Any, Tiles] | None = None) -> Ready:
        """Launches through Triton, with what the kernel takes of `given`; returns what later launches need.

        `tiles` are those of kernels that are launched together, by name and shape; this one's are added.
        """
        taken = {name: given[name] for name in self.function.arg_names}
        compiled = self.function[(programs,)](**taken, **self.options)
        return Ready(compiled, programs, taken, {} if tiles is None else tiles, self.cuda or tile_driver())


class Ready:
    """A compiled kernel with all arguments in place but for its stream, its pointers and its tiles.

    It is handed to the driver as Triton does it, less a look at each argument. What is launched lies in memory that all
    threads share: the caller sees to it that one launches at a time.
    """

    def __init__(self, compiled: Any, programs: int, taken: Given, tiles: dict[Any, Tiles], cuda: Any) -> None:
        meta = compiled.metadata
        assert meta.num_ctas == 1
        assert meta.global_scratch_size == meta.profile_scratch_size == 0
        assert not meta.launch_cooperative_grid
        kinds = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
        self.pointers = [name for name, kind in kinds.items() if kind[0] == "*"]
        self.pack = struct.Struct(f"={len(self.pointers)}Q").pack_into
        self.addresses = (ctypes.c_uint64 * len(self.pointers))()
        pointer_at = {name: ctypes.addressof(self.addresses) + 8 * i for i, name in enumerate(self.pointers)}
        self.cells: list[Any] = [ctypes.c_uint64(0)]  # the first for two more arguments of every kernel, not in use
        metas = iter(meta.tensordesc_meta or ())
        places: list[int] = []
        for name, kind in kinds.items():
            if kind[0] == "*":
                places.append(pointer_at[name])
                continue
            cells = []
            if kind.startswith("tensordesc"):
                like, form = taken[name], next(metas)
                key = (name, tuple(form["block_size"]))
                if key not in tiles:
                    tiles[key] = Tiles(name, like, form, cuda)
                places.append(tiles[key].at)
                cells = [*map(ctypes.c_int32, like.shape), *map(ctypes.c_int64, like.strides)]
            else:
                cells = [CELLS[kind](taken[name])]
            places += [ctypes.addressof(cell) for cell in cells]
            self.cells += cells
        nothing = ctypes.addressof(self.cells[0])
        self.parameters = (ctypes.c_void_p * (len(places) + 2))(*places, nothing, nothing)
        self.how = Launch(programs, 1, 1, 32 * meta.num_warps, 1, 1, meta.shared, None, None, 0)
        self.kept = compiled, tiles  # whose code is to be launched, and what its parameters point to
        self.arguments = (ctypes.addressof(self.how), compiled.function, ctypes.addressof(self.parameters), None)
        self.cuda, self.context = cuda, cuda.context()

    def __call__(self, at: Given, stream: int) -> None:
        """Launches with these addresses, by their names."""
        self.pack(self.addresses, 0, *[at[name] for name in self.pointers])
        self.how.stream = stream
        error = self.cuda.launch(*self.arguments)
        if error == NO_CONTEXT:  # the first launch of a new thread
            self.cuda.set_context(self.context)
            error = self.cuda.launch(*self.arguments)
        check(error, "launched")


def check(error: int, done: str) -> None:
    if error:
        raise RuntimeError(f"a kernel or its tiles could not be {done}: CUDA error {error}")


def strides_of(x: torch.Tensor) -> list[int]:
    """Strides that TMA takes: those of dims of one element may be anything, and must be multiples of 16 bytes."""
    return [stride if size > 1 else 8 for size, stride in zip(x.shape[:-1], x.stride(), strict=False)] + [1]


def descriptor(x: torch.Tensor, rows: int, columns: int, dtype: str) -> TensorDescriptor:
    """Tiles [rows, columns] of the last two dims; past the ends of `x` they read as zeros and are not written."""
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, TYPES[dtype])
    return TensorDescriptor(x, list(x.shape), strides_of(x), block, layout)
