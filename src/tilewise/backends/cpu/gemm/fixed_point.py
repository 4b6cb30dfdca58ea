"""Float32 rows as 24-bit fixed point: three 8-bit limbs and one factor for a row, for integer dots (`gemv_vnni.py`,
`gemv_sdot.py`).

As exact as float32 is next to the largest number of a row. Rows out of range are left to fp32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from ....core.storage import StorageFormat
from ..codegen import dtypes
from ..codegen.load_store import get_f32, put_f32
from ..codegen.numba_ops import F, jit
from ..codegen.vector import F32, I8, I32, Emit, Value, W, microkernel

LIMBS = 3
PARTS = {"int8": 1, "int4": 2}  # elements of a byte
LINE = 64  # elements that share the initial value of their sum
LINE_ = np.int64(LINE)
MOST = F(127 * 65536)  # largest signed number of three limbs
SIGNED = W == 4  # NEON's `sdot` is signed on both sides; for VNNI K and weights are unsigned
MOST_WEIGHT = MOST if SIGNED else F(2**24 - 256)
LEAST_TOP, MOST_TOP = F(1e-30), F(1e30)  # range of a row's largest number
OFFSET_INT8, OFFSET_INT4 = np.int64(128), np.int64(8)  # added to K to make it unsigned


def fits(stored: StorageFormat, width: int) -> bool:
    """Whether rows of `width` elements are whole lines of integers, each with one scale."""
    return stored.name in PARTS and width % (LINE * stored.packing) == 0 and stored.group >= LINE


def _products(weights: bool) -> tuple[Any, Any]:
    """`top` and `pack_limbs` of x, or of x times y for weights, which are not negative."""

    def value(e: Emit, x: Value, y: Value, at: Value) -> Value:
        return e.builder.fmul(e.load(x, at), e.load(y, at)) if weights else e.load(x, at)

    @microkernel("iii>f")
    def top(e: Emit, x: Value, y: Value, count: Value) -> Value:
        """The largest magnitude of `count` numbers, a multiple of W; of weights, one that is negative or NaN if any."""
        b = e.builder

        def larger(p: Value, q: Value) -> Value:  # as unsigned bits, in which NaN and negative numbers are the largest
            return b.select(b.icmp_unsigned(">", p, q), p, q)

        largest = e.var(e.i32s(0))
        with e.loop(count, W) as i:
            bits = b.bitcast(value(e, x, y, i), e.vector(I32))
            if not weights:
                bits = b.and_(bits, e.i32s(0x7FFFFFFF))
            largest.set(larger(bits, largest.get()))
        return b.bitcast(e.reduce(largest.get(), larger), F32)

    @microkernel("iiiifi")
    def pack_limbs(e: Emit, to: Value, x: Value, y: Value, count: Value, factor: Value, room: Value) -> None:
        """`count` numbers times `factor` as three limbs, the lowest first, `room` bytes for each."""
        b = e.builder
        factor = e.splat(factor)
        with e.loop(count, W) as i:
            number = b.fptosi(e.call("nearbyint", b.fmul(value(e, x, y, i), factor)), e.vector(I32))
            for m in range(LIMBS):
                limb = b.trunc(number, e.vector(I8))
                at = b.add(b.mul(room, e.i64(m)), i)
                b.store(limb, e.pointer(to, at, I8, limb.type)).align = 1
                if SIGNED or not weights:
                    number = b.sub(number, b.sext(limb, e.vector(I32)))
                number = b.ashr(number, e.i32s(8))

    return top, pack_limbs


(max_query, pack_query), (max_weight, pack_weight) = _products(False), _products(True)


def join_limbs(e: Emit, limbs: list[Value]) -> Value:
    """Sums of three limbs, the lowest first, as float32."""
    b, f32 = e.builder, e.vector(F32)
    low = b.sitofp(b.add(limbs[0], b.shl(limbs[1], e.i32s(8))), f32)
    return e.fma(b.sitofp(limbs[2], f32), e.f32s(65536.0), low)


def weights_at(e: Emit, queries: int, element: Value, bits: Value, ldp: Value, group_stride: Value) -> list[Value]:
    """Offsets of each row's packed weights for the scale group of `element`: `2**bits` elements share a scale."""
    b = e.builder
    first = b.mul(b.lshr(element, bits), group_stride)
    return [b.add(first, b.mul(ldp, e.i64(i))) for i in range(queries)]


def weight_factor(e: Emit, kind: str, p: Value, at: Value, room: Value) -> Value:
    """The factor of a row's sums; int4 elements were multiplied by 16."""
    factor = e.load_scalar(p, e.builder.add(at, e.builder.mul(room, e.i64(LIMBS))), F32)
    return e.splat(e.builder.fmul(factor, ir.Constant(F32, 1 / 16)) if kind == "int4" else factor)


@microkernel("iii")
def pack_offset(e: Emit, to: Value, limbs: Value, offset: Value) -> None:
    """The initial value of a sum: minus `offset` times the sum of its 64 limbs."""
    b = e.builder
    total = e.i32s(0)
    for n in range(4):
        total = b.add(total, b.sext(e._load(limbs, n * W, I8, W), e.vector(I32)))
    start = b.mul(e.reduce(total, b.add), b.sub(ir.Constant(I32, 0), b.trunc(offset, I32)))
    b.store(start, e.pointer(to, 0, I32, I32))


@jit
def query_words(width):  # type: ignore[no-untyped-def]
    """Words of a packed query row: limbs, initial values of sums of 64 elements, the factor."""
    return LIMBS * (width // 4 + width // LINE_) + 1


@jit
def quantise_queries(to, q, rows, width, dtype):  # type: ignore[no-untyped-def]
    """Packs rows of float32 for `make_qk`; the first factor is negative if they are out of range."""
    words, spans, size = width // 4, width // LINE_, 4 * query_words(width)
    for r in range(rows):
        row, factor_at = to + r * size, size - 4
        x = q + 4 * r * width
        top = max_query(x, x, width)
        if top != F(0) and not LEAST_TOP <= top <= MOST_TOP:
            put_f32(to + factor_at, F(-1))
            return
        pack_query(row, x, x, width, F(0) if top == F(0) else MOST / top, width)
        for n in range(0 if SIGNED else LIMBS):
            for span in range(spans):
                start = row + 4 * (LIMBS * words + n * spans + span)
                pack_offset(start, row + n * width + span * LINE_, OFFSET_INT8 if dtype == dtypes.INT8 else OFFSET_INT4)
        put_f32(row + factor_at, top / MOST)


@jit
def are_quantised(queries, width):  # type: ignore[no-untyped-def]
    """Whether `quantise_queries` could pack the rows."""
    return get_f32(queries + 4 * query_words(width) - 4) >= F(0)


@jit
def are_finite(scales, ld, count, groups):  # type: ignore[no-untyped-def]
    """Whether `count` scales of each group are finite: integer sums would hide an infinite one."""
    for g in range(groups):
        row = scales + 4 * g * ld
        if not max_query(row, row, (count + W - 1) // W * W) <= MOST_TOP:
            return False
    return True


@jit
def pack_weights(to, p, scales, count, room):  # type: ignore[no-untyped-def]
    """Packs `count` weights, p times V's scales, for `make_pv`; False if they are out of range.

    `count` is a multiple of W; there are `room` bytes for a limb.
    """
    top = max_weight(p, scales, count)
    if top != F(0) and not LEAST_TOP <= top <= MOST_TOP:
        return False
    pack_weight(to, p, scales, count, F(0) if top == F(0) else MOST_WEIGHT / top, room)
    put_f32(to + LIMBS * room, top / MOST_WEIGHT)
    return True
