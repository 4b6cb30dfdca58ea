"""Every name of Gluon, and every private one of Triton, that kernels use: one definition for each version of Triton.

Gluon is experimental: names change from version to version. Kernels import them from here alone.
"""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate
from triton.language.core import base_value

import triton

from ...core.private import number

__all__ = [
    "TensorDescriptor", "aggregate", "base_value", "cp_async", "cp_async_arrive", "fence_async_shared", "gl", "gluon",
    "mbarrier", "reinterpret", "thread_barrier", "tma_add", "tma_load", "tma_store", "tma_store_wait", "warpgroup_mma",
    "warpgroup_mma_wait",
]  # fmt: skip
VERSION = number(triton.__version__)
ALL = "3.6 3.7 3.8 3.9"
GLUON, HOPPER = "triton.experimental.gluon", "triton.experimental.gluon.language.nvidia.hopper"
SEEN = {
    GLUON: {ALL: "constexpr_function jit nvidia.hopper.TensorDescriptor"},
    f"{GLUON}.language": {
        ALL: """
        BlockedLayout DistributedLinearLayout DotOperandLayout NVMMADistributedLayout NVMMASharedLayout
        NVMMASharedLayout.get_default_for SliceLayout SwizzledSharedLayout _core.builtin abs allocate_shared_memory
        arange associative_scan atomic_add bfloat16 cdiv constexpr convert_layout exp2 expand_dims float16 float32 fma
        full full_like int32 int64 inline_asm_elementwise load log log2 max maximum minimum num_programs num_warps
        permute program_id reshape shared_memory_descriptor shared_memory_descriptor.index
        shared_memory_descriptor.load shared_memory_descriptor.permute shared_memory_descriptor.reshape
        shared_memory_descriptor.slice shared_memory_descriptor.store split static_assert static_range store sum tensor
        to_tensor tuple warp_specialize where zeros zeros_like
        """,
        "3.6": "thread_barrier",
        "3.7 3.8 3.9": "barrier",
        "3.6 3.7 3.8": "shared_memory_descriptor._reinterpret",
        "3.9": "shared_memory_descriptor.reinterpret",
    },
    HOPPER: {
        ALL: """
        async_copy.mbarrier_arrive fence_async_shared mbarrier.MBarrierLayout mbarrier.arrive mbarrier.expect
        mbarrier.init mbarrier.wait tma.store_wait warpgroup_mma warpgroup_mma_wait
        """,
        "3.6 3.7": """
        async_copy.async_copy_global_to_shared tma.async_copy_global_to_shared tma.async_copy_shared_to_global
        """,
        "3.8 3.9": "async_copy.async_load tma.async_load tma.async_store tma.async_atomic_add",
    },
    "triton.language.core": {ALL: "_aggregate base_value"},
    "triton._C.libtriton": {"3.6 3.7": "ir.DESCRIPTOR_REDUCE_KIND.ADD"},
}


if VERSION >= (3, 7):
    thread_barrier = gl.barrier
else:
    thread_barrier = gl.thread_barrier

cp_async_arrive = async_copy.mbarrier_arrive
tma_store_wait = tma.store_wait
if VERSION >= (3, 8):
    cp_async, tma_load, tma_store, tma_add = (
        async_copy.async_load,
        tma.async_load,
        tma.async_store,
        tma.async_atomic_add,
    )
else:
    cp_async = async_copy.async_copy_global_to_shared
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

    @_core.builtin  # type: ignore[untyped-decorator]
    def tma_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        """TMA reduce-add of a tile from shared to global memory, in the current bulk group."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@_core.builtin  # type: ignore[untyped-decorator]
def reinterpret(tile: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """A tile of shared memory with another type, shape and layout."""
    method = tile.reinterpret if VERSION >= (3, 9) else tile._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)
