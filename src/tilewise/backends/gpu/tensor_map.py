"""TMA tensor maps, kept from call to call."""

from __future__ import annotations

import ctypes
from typing import Any

from ...core.private.triton import TMA_DTYPES
from .driver import check

MAP_BYTES = 128  # of the driver's `CUtensorMap`, which begins at a multiple of 64 bytes
L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


class TensorMap:
    """The TMA map of a tensor. Only the tensor's address changes from call to call."""

    def __init__(self, like: Any, meta: dict[str, Any], cuda: Any) -> None:
        self.replace = cuda.move
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
        element = TMA_DTYPES[meta["elem_type"]]
        check(cuda.encode(self.at, element, rank, self.address, *arrays, 0, meta["swizzle"], L2_128B, 0), "described")

    def move(self, address: int) -> None:
        """Sets the tensor's address."""
        if address != self.address:
            check(self.replace(self.at, address), "moved")
            self.address = address
