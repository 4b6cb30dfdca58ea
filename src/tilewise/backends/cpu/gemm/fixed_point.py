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
LINE = 64  # elements that share what their sum starts with
LINE_ = np.int64(LINE)
MOST = F(127 * 65536)  # of a number of three limbs with a sign
SIGNED = W == 4  # both sides of NEON's `sdot` have a sign; VNNI takes K and weights without one
MOST_WEIGHT = MOST if SIGNED else F(2**24 - 256)
LEAST_TOP, MOST_TOP = F(1e-30), F(1e30)  # of the largest number of a row
OFFSET_INT8, OFFSET_INT4 = np.int64(128), np.int64(8)  # what is added to K


def fits(stored: StorageFormat, width: int) -> bool:
    """Whether rows of `width` elements are whole lines of integers, none of them of two scales."""
    return stored.name in PARTS and width % (LINE * stored.packing) == 0 and stored.group >= LINE


def _products(weights: bool) -> tuple[Any, Any]:
    """`top` and `pack_limbs` of x, or of x times y for weights, which are not below 0."""

    def value(e: Emit, x: Value, y: Value, at: Value) -> Value:
        return e.builder.fmul(e.load(x, at), e.load(y, at)) if weights else e.load(x, at)

    @microkernel("iii>f")
    def top(e: Emit, x: Value, y: Value, count: Value) -> Value:
        """The largest of `count` numbers, a multiple of W: a magnitude; of weights, one below 0 or NaN if there is."""
        b = e.builder

        def larger(p: Value, q: Value) -> Value:  # as bits without a sign: those of NaN and below 0 are the largest
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


def weights_at(e: Emit, queries: int, element: Value, bits: Value, ldp: Value, line: Value) -> list[Value]:
    """Where the packed weights of each row begin, of the group that an element is in: `2**bits` share a scale."""
    b = e.builder
    first = b.mul(b.lshr(element, bits), line)
    return [b.add(first, b.mul(ldp, e.i64(i))) for i in range(queries)]


def weight_factor(e: Emit, kind: str, p: Value, at: Value, room: Value) -> Value:
    """What a row's sums are multiplied by; elements of int4 were taken 16 times as large."""
    factor = e.load_scalar(p, e.builder.add(at, e.builder.mul(room, e.i64(LIMBS))), F32)
    return e.splat(e.builder.fmul(factor, ir.Constant(F32, 1 / 16)) if kind == "int4" else factor)


@microkernel("iii")
def pack_offset(e: Emit, to: Value, limbs: Value, offset: Value) -> None:
    """What a sum starts with: minus `offset` times the sum of its 64 limbs."""
    b = e.builder
    total = e.i32s(0)
    for n in range(4):
        total = b.add(total, b.sext(e._load(limbs, n * W, I8, W), e.vector(I32)))
    start = b.mul(e.reduce(total, b.add), b.sub(ir.Constant(I32, 0), b.trunc(offset, I32)))
    b.store(start, e.pointer(to, 0, I32, I32))


@jit
def query_words(width):  # type: ignore[no-untyped-def]
    """Words of a query row: limbs, what sums of 64 elements start with, the factor."""
    return LIMBS * (width // 4 + width // LINE_) + 1


@jit
def quantise_queries(to, q, rows, width, dtype):  # type: ignore[no-untyped-def]
    """Rows of float32 as `make_qk` reads them, or a first factor below 0 if they are out of range."""
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
    return get_f32(queries + 4 * query_words(width) - 4) >= F(0)


@jit
def are_finite(scales, line, count, groups):  # type: ignore[no-untyped-def]
    """Whether `count` scales of each group are: an integer sum hides what an infinite one makes of each."""
    for g in range(groups):
        row = scales + 4 * g * line
        if not max_query(row, row, (count + W - 1) // W * W) <= MOST_TOP:
            return False
    return True


@jit
def pack_weights(to, p, scales, count, room):  # type: ignore[no-untyped-def]
    """`count` weights, p times V's scales, as `make_pv` reads them; False if they are out of range.

    `count` is a multiple of W; there are `room` bytes for a limb.
    """
    top = max_weight(p, scales, count)
    if top != F(0) and not LEAST_TOP <= top <= MOST_TOP:
        return False
    pack_weight(to, p, scales, count, F(0) if top == F(0) else MOST_WEIGHT / top, room)
    put_f32(to + LIMBS * room, top / MOST_WEIGHT)
    return True
