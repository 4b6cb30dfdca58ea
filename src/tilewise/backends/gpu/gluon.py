"""Every name of Gluon, and every private one of Triton, that kernels use: one definition for each version of Triton.

Gluon is experimental: names change from version to version. Kernels import them from here alone.
"""

from __future__ import annotations

from typing import Any

import triton

from ...core.private import find, number

__all__ = [
    "PAIRED_WEIGHTS", "TensorDescriptor", "aggregate", "base_value", "cp_async", "cp_async_arrive",
    "fence_async_shared", "gl", "gluon", "mbarrier", "opaque", "reinterpret", "thread_barrier", "tma_add", "tma_load",
    "tma_store", "tma_store_wait", "warpgroup_mma", "warpgroup_mma_wait",
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
    "triton._C.libtriton": {ALL: "ir.DESCRIPTOR_REDUCE_KIND.ADD"},
}


gluon, gl = find(GLUON), find(f"{GLUON}.language")
builtin = find(f"{GLUON}.language._core.builtin")
TensorDescriptor = find(f"{GLUON}.nvidia.hopper.TensorDescriptor")
aggregate, base_value = find("triton.language.core._aggregate"), find("triton.language.core.base_value")
async_copy, tma, mbarrier = find(f"{HOPPER}.async_copy"), find(f"{HOPPER}.tma"), find(f"{HOPPER}.mbarrier")
fence_async_shared = find(f"{HOPPER}.fence_async_shared")
warpgroup_mma, warpgroup_mma_wait = find(f"{HOPPER}.warpgroup_mma"), find(f"{HOPPER}.warpgroup_mma_wait")

thread_barrier = find(f"{GLUON}.language.{'barrier' if VERSION >= (3, 7) else 'thread_barrier'}")
cp_async_arrive = find(f"{HOPPER}.async_copy.mbarrier_arrive")
tma_store_wait = find(f"{HOPPER}.tma.store_wait")
if VERSION >= (3, 8):
    cp_async, tma_load = find(f"{HOPPER}.async_copy.async_load"), find(f"{HOPPER}.tma.async_load")
    tma_store, tma_add = find(f"{HOPPER}.tma.async_store"), find(f"{HOPPER}.tma.async_atomic_add")
else:
    cp_async = find(f"{HOPPER}.async_copy.async_copy_global_to_shared")
    tma_load = find(f"{HOPPER}.tma.async_copy_global_to_shared")
    tma_store = find(f"{HOPPER}.tma.async_copy_shared_to_global")
    kinds = find("triton._C.libtriton.ir.DESCRIPTOR_REDUCE_KIND")

    @builtin  # type: ignore[untyped-decorator]
    def tma_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        """TMA reduce-add of a tile from shared to global memory, in the current bulk group."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(kinds.ADD, desc.handle, coord, src.handle)


# Schedules by version; what each is for, docs/platforms.md, "Hopper kernels by version of Triton".
PAIRED_WEIGHTS = gl.constexpr(VERSION >= (3, 7))  # else LLVM carries P through a loop in a register for each 16 bits
OPAQUE_PLACES = gl.constexpr(VERSION >= (3, 9))  # else LLVM computes the wgmma descriptors of a step all at once


@gluon.jit
def opaque(n):  # type: ignore[no-untyped-def]
    """`n`, with OPAQUE_PLACES as a value of which LLVM knows nothing: what is made of it is made here, not before."""
    if OPAQUE_PLACES:
        n = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n], gl.int32, is_pure=False, pack=1)
    return n


@builtin  # type: ignore[untyped-decorator]
def reinterpret(tile: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """A tile of shared memory with another type, shape and layout."""
    method = tile.reinterpret if VERSION >= (3, 9) else tile._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)
