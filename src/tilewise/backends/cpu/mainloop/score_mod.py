"""Micro-kernels that change scores: scale, softcap, bias, ALiBi, hidden keys.

One vector holds W cells: W keys of one query row (decode), or W query rows of one key (prefill).
"""

from __future__ import annotations

import math

from llvmlite import ir

from ..codegen.functions import tanh
from ..codegen.vector import F32, I32, Emit, Value, W, microkernel


@microkernel("iiiff")
def softcap_cells(e: Emit, s: Value, step: Value, count: Value, factor: Value, cap: Value) -> None:
    """s = cap * tanh(s * factor) of `count` vectors, `step` floats apart; factor is scale / cap."""
    b = e.builder
    factor, cap = e.splat(factor), e.splat(cap)
    with e.loop(count) as i:
        at = b.mul(i, step)
        e.store(b.fmul(tanh(e, b.fmul(e.load(s, at), factor)), cap), s, at)


@microkernel("iiiff")
def large_softcap_cells(e: Emit, s: Value, step: Value, count: Value, factor: Value, cap: Value) -> None:
    """The same for scores that are scaled already; factor is 1 / cap, which may be subnormal.

    Scores far below the cap are not changed, so an inaccurate quotient does not matter.
    """
    b = e.builder
    factor, cap = e.splat(factor), e.splat(cap)
    with e.loop(count) as i:
        at = b.mul(i, step)
        score = e.load(s, at)
        x = b.fmul(score, factor)
        small = b.fcmp_ordered("<", e.call("fabs", x), e.f32s(2.0**-13))  # tanh x is x to the last digit
        e.store(b.select(small, score, b.fmul(tanh(e, x), cap)), s, at)


@microkernel("iiif")
def scale_cells(e: Emit, s: Value, step: Value, count: Value, factor: Value) -> None:
    """s *= factor, of `count` vectors, `step` floats apart."""
    b = e.builder
    factor = e.splat(factor)
    with e.loop(count) as i:
        at = b.mul(i, step)
        e.store(b.fmul(e.load(s, at), factor), s, at)


@microkernel("iiii")
def bias_cells(e: Emit, s: Value, step: Value, count: Value, bias: Value) -> None:
    """s += bias, and -inf where bias is -inf, even if s is NaN; vectors of `bias` are contiguous."""
    b = e.builder
    with e.loop(count) as i:
        at = b.mul(i, step)
        x = e.load(bias, b.mul(i, e.i64(W)))
        hidden = b.fcmp_ordered("==", x, e.f32s(-math.inf))
        e.store(b.select(hidden, e.f32s(-math.inf), b.fadd(e.load(s, at), x)), s, at)


# By rows


@microkernel("iifi")
def alibi_row(e: Emit, s: Value, count: Value, slope: Value, distance: Value) -> None:
    """s[j] -= slope * |distance - j| over `count` vectors of keys."""
    b = e.builder
    slope = e.splat(b.fneg(slope))
    lanes = ir.Constant(e.vector(F32), [float(i) for i in range(W)])
    with e.loop(count) as i:
        at = b.mul(i, e.i64(W))
        start = e.splat(b.sitofp(b.sub(distance, at), F32))
        e.store(e.fma(slope, e.call("fabs", b.fsub(start, lanes)), e.load(s, at)), s, at)


@microkernel("iifii")
def alibi_strided(e: Emit, s: Value, count: Value, slope: Value, distance: Value, stride: Value) -> None:
    """s[j] -= slope * |distance - stride j| over `count` vectors of keys."""
    b = e.builder
    slope, step = e.splat(b.fneg(slope)), e.splat_i32(b.trunc(stride, I32))
    lanes = b.mul(step, ir.Constant(e.vector(I32), list(range(W))))
    with e.loop(count) as i:
        at = b.mul(i, e.i64(W))
        start = e.splat_i32(b.trunc(b.sub(distance, b.mul(stride, at)), I32))
        away = b.sitofp(b.sub(start, lanes), e.vector(F32))
        e.store(e.fma(slope, e.call("fabs", away), e.load(s, at)), s, at)


# By columns: W query rows, `count` keys, `step` floats from key to key


@microkernel("iiiiiii")
def alibi_column(
    e: Emit, s: Value, step: Value, count: Value, slopes: Value, positions: Value, key: Value, stride: Value
) -> None:
    """s[j, r] -= slopes[r] * |positions[r] - stride (key + j)|; positions are int32."""
    b = e.builder
    slope, position = b.fneg(e.load(slopes)), e.load_i32(positions)
    with e.loop(count) as j:
        at = b.mul(j, step)
        away = b.sub(position, e.splat_i32(b.trunc(b.mul(stride, b.add(key, j)), I32)))
        e.store(e.fma(slope, e.call("fabs", b.sitofp(away, e.vector(F32))), e.load(s, at)), s, at)


@microkernel("iiiiii")
def hide_column(e: Emit, s: Value, step: Value, count: Value, lo: Value, hi: Value, key: Value) -> None:
    """s[j, r] = -inf unless lo[r] <= key + j < hi[r]; lo and hi are int32."""
    b = e.builder
    first, end = e.load_i32(lo), e.load_i32(hi)
    with e.loop(count) as j:
        at = b.mul(j, step)
        here = e.splat_i32(b.trunc(b.add(key, j), I32))
        seen = b.and_(b.icmp_signed("<=", first, here), b.icmp_signed("<", here, end))
        e.store(b.select(seen, e.load(s, at), e.f32s(-math.inf)), s, at)
