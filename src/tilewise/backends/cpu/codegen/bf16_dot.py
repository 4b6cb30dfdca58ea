"""AVX-512 BF16: dot products of pairs of bf16 numbers (VDPBF16PS)."""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir

from ....core.private.numba import bfloat, cgutils
from ..isa import cpu_features
from .vector import Emit, Value, W


def has_bf16() -> bool:
    """Whether AVX-512 BF16 can be used. LLVM has bfloat in these instructions from version 16 (Numba 0.62) on."""
    return W == 16 and "avx512bf16" in cpu_features() and llvm.llvm_version_info >= (16,)


def dot_pairs(e: Emit, a: Value, b: Value, c: Value) -> Value:
    """c plus the products of both bf16 numbers in each lane of a and b."""
    pairs = ir.VectorType(bfloat(), 2 * W)
    kind = ir.FunctionType(c.type, [c.type, pairs, pairs])
    function = cgutils.get_or_insert_function(e.builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return e.builder.call(function, [c, e.builder.bitcast(a, pairs), e.builder.bitcast(b, pairs)])
