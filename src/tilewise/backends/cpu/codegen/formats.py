"""Storage formats in vector code: decode to float32 on load, encode on cache writes.

A new format is an entry of `DECODE` and, if it is quantised, of `ENCODE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ....core.storage import LEVEL_WORDS, MIDPOINTS

Value = Any  # of LLVM
F32, F16, I8, I16, I32 = ir.FloatType(), ir.HalfType(), *(ir.IntType(n) for n in (8, 16, 32))


class Lanes:
    """Types and constants of one element, or of vectors of `width`."""

    def __init__(self, width: int = 0) -> None:
        self.width = width
        self.f32, self.f16, self.i16, self.i32 = map(self._of, (F32, F16, I16, I32))

    def _of(self, element: ir.Type) -> ir.Type:
        return ir.VectorType(element, self.width) if self.width else element

    def int(self, n: int) -> ir.Constant:
        return ir.Constant(self.i32, [n] * self.width if self.width else n)


def _f32(b: Any, t: Lanes, data: Value) -> Value:
    return data


def _f16(b: Any, t: Lanes, data: Value) -> Value:
    return b.fpext(data, t.f32)


def _bf16(b: Any, t: Lanes, data: Value) -> Value:
    return b.bitcast(b.shl(b.zext(data, t.i32), t.int(16)), t.f32)


def _int8(b: Any, t: Lanes, data: Value) -> Value:
    return b.sitofp(b.sext(data, t.i32), t.f32)


def _nibble(b: Any, t: Lanes, data: Value, above: int) -> Value:
    """Four bits as two's complement, with `above` bits of the int32 above them."""
    return b.sitofp(b.ashr(b.shl(b.zext(data, t.i32), t.int(above)), t.int(28)), t.f32)


def _int4_low(b: Any, t: Lanes, data: Value) -> Value:
    return _nibble(b, t, data, 28)


def _int4_high(b: Any, t: Lanes, data: Value) -> Value:
    return _nibble(b, t, data, 24)


def _level(b: Any, t: Lanes, data: Value, shift: int) -> Value:
    """The level of four bits with `shift` bits below them: a byte of one of two words, and a sign."""
    code = b.lshr(b.zext(data, t.i32), t.int(shift))
    low, high = map(t.int, LEVEL_WORDS)
    word = b.select(b.icmp_unsigned("!=", b.and_(code, t.int(4)), t.int(0)), high, low)
    level = b.and_(b.lshr(word, b.shl(b.and_(code, t.int(3)), t.int(3))), t.int(255))
    sign = b.shl(b.and_(code, t.int(8)), t.int(28))
    return b.bitcast(b.or_(b.bitcast(b.uitofp(level, t.f32), t.i32), sign), t.f32)


def _codebook4_low(b: Any, t: Lanes, data: Value) -> Value:
    return _level(b, t, data, 0)


def _codebook4_high(b: Any, t: Lanes, data: Value) -> Value:
    return _level(b, t, data, 4)


def _fp8(b: Any, t: Lanes, data: Value) -> Value:
    # Its bits, shifted, are a float16 256 times as small; all ones is NaN here, but not in float16.
    wide = b.zext(data, t.i32)
    magnitude = b.and_(wide, t.int(0x7F))
    bits = b.or_(b.shl(b.and_(wide, t.int(0x80)), t.int(8)), b.shl(magnitude, t.int(7)))
    value = b.fmul(b.fpext(b.bitcast(b.trunc(bits, t.i16), t.f16), t.f32), b.uitofp(t.int(256), t.f32))
    nan = b.fdiv(b.uitofp(t.int(0), t.f32), b.uitofp(t.int(0), t.f32))
    return b.select(b.icmp_unsigned("==", magnitude, t.int(0x7F)), nan, value)


# The type in memory, and a decoder for each element of a stored number (half a row apart). Plain floats come first.
DECODE: dict[str, tuple[ir.Type, tuple[Callable[..., Value], ...]]] = {
    "f32": (F32, (_f32,)),
    "f16": (F16, (_f16,)),
    "bf16": (I16, (_bf16,)),
    "int8": (I8, (_int8,)),
    "int4": (I8, (_int4_low, _int4_high)),
    "codebook4": (I8, (_codebook4_low, _codebook4_high)),
    "fp8_e4m3": (I8, (_fp8,)),
}


def _rounded(e: Any, x: Value) -> Value:
    """Rounds to the nearest integer, as int32; NaN to 0."""
    b = e.builder
    x = b.select(b.fcmp_ordered("ord", x, x), x, e.zeros)
    return b.fptosi(e.call("rint", x), e.vector(I32))


def _to_int4(e: Any, low: Value, high: Value) -> Value:
    b = e.builder
    first, second = _rounded(e, low), _rounded(e, high)
    return b.or_(b.and_(first, e.i32s(15)), b.shl(second, e.i32s(4)))


def _code(e: Any, x: Value) -> Value:
    """The sign and index of the nearest level, as int32; 0 for NaN."""
    b, size = e.builder, e.call("fabs", x)
    code = b.select(b.fcmp_ordered("<", x, e.zeros), e.i32s(8), e.i32s(0))
    for middle in MIDPOINTS:
        code = b.add(code, b.zext(b.fcmp_ordered(">", size, e.f32s(middle)), e.vector(I32)))
    return code


def _to_codebook4(e: Any, low: Value, high: Value) -> Value:
    return e.builder.or_(_code(e, low), e.builder.shl(_code(e, high), e.i32s(4)))


def _to_fp8(e: Any, x: Value) -> Value:
    """float32 to float8_e4m3fn, to nearest even; NaN if out of range."""
    b, i32 = e.builder, e.vector(I32)
    bits = b.bitcast(x, i32)
    sign = b.and_(b.lshr(bits, e.i32s(24)), e.i32s(0x80))
    magnitude = b.and_(bits, e.i32s(0x7FFFFFFF))
    # Normal numbers: the exponent's bias changes from 127 to 7, and 20 bits are rounded off.
    odd = b.and_(b.lshr(magnitude, e.i32s(20)), e.i32s(1))
    normal = b.lshr(b.add(magnitude, b.add(odd, e.i32s(0x7FFFF - (120 << 23)))), e.i32s(20))
    # Below 2^-6: added to 2^14, a float32 has its last bit at 2^-9, which is this type's.
    small = b.fadd(b.bitcast(magnitude, e.vector(F32)), e.f32s(2.0**14))
    small = b.sub(b.bitcast(small, i32), e.i32s(141 << 23))
    value = b.select(b.icmp_unsigned("<", magnitude, e.i32s(121 << 23)), small, normal)
    too_large = b.icmp_unsigned(">=", magnitude, e.i32s(1087 << 20))  # 480: past 448, whatever the rounding
    return b.or_(b.select(too_large, e.i32s(0x7F), value), sign)


# Encoders: vectors of elements divided by their scales to their bytes, in int32
ENCODE: dict[str, Callable[..., Value]] = {
    "int8": _rounded,
    "int4": _to_int4,
    "codebook4": _to_codebook4,
    "fp8_e4m3": _to_fp8,
}
