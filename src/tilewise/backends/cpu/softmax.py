"""Micro-kernels for scores. One vector holds W cells: W keys of one query row, or W query rows and one key.

Decode keeps its scores by rows, prefill by columns; `per_row` and `per_column` functions do the same to either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llvmlite import ir

from .gemm import KEYS
from .simd import F32, I32, Emit, Value, W, microkernel

LOG2E = math.log2(math.e)
INF = float("inf")
# Rows whose scores are this small, as powers of two, may have nothing subtracted from them: see `columns.calm_bound`.
MOST, NEVER = 30.0, -1.0

# tanh x = x + x^3 P(x^2) up to 0.625, to a relative 4e-9; highest power first.
TANH = (-5.704985e-3, 2.0639086e-2, -5.3739715e-2, 1.3331442e-1, -3.3333281e-1)


def _tanh(e: Emit, x: Value) -> Value:
    """Near 0 a polynomial, further out 1 - 2 / (e^2x + 1), which loses nothing there."""
    b = e.builder
    square = b.fmul(x, x)
    near = e.fma(b.fmul(e.polynomial(TANH, square), square), x, x)
    size = e.call("fabs", x)
    grown = e.exp2(b.fmul(e.call("minnum", size, e.f32s(10.0)), e.f32s(2 * LOG2E)))
    far = b.fsub(e.f32s(1.0), b.fdiv(e.f32s(2.0), b.fadd(grown, e.f32s(1.0))))
    value = b.select(b.fcmp_ordered("<", size, e.f32s(0.625)), near, e.call("copysign", far, x))
    return b.select(b.fcmp_unordered("uno", x, x), x, value)


@microkernel("iiiff")
def softcap_cells(e: Emit, s: Value, step: Value, count: Value, factor: Value, cap: Value) -> None:
    """s = cap * tanh(s * factor) of `count` vectors, `step` floats apart; factor is scale / cap."""
    b = e.builder
    factor, cap = e.splat(factor), e.splat(cap)
    with e.loop(count) as i:
        at = b.mul(i, step)
        e.store(b.fmul(_tanh(e, b.fmul(e.load(s, at), factor)), cap), s, at)


@microkernel("iiiff")
def large_softcap_cells(e: Emit, s: Value, step: Value, count: Value, factor: Value, cap: Value) -> None:
    """The same of scores that are scaled already; factor is 1 / cap, which may have lost its digits.

    What is far below the cap stays as it is, whatever its quotient by the cap has lost.
    """
    b = e.builder
    factor, cap = e.splat(factor), e.splat(cap)
    with e.loop(count) as i:
        at = b.mul(i, step)
        score = e.load(s, at)
        x = b.fmul(score, factor)
        small = b.fcmp_ordered("<", e.call("fabs", x), e.f32s(2.0**-13))  # tanh x is x to the last digit
        e.store(b.select(small, score, b.fmul(_tanh(e, x), cap)), s, at)


@microkernel("iiif")
def scale_cells(e: Emit, s: Value, step: Value, count: Value, factor: Value) -> None:
    b = e.builder
    factor = e.splat(factor)
    with e.loop(count) as i:
        at = b.mul(i, step)
        e.store(b.fmul(e.load(s, at), factor), s, at)


@microkernel("iiii")
def bias_cells(e: Emit, s: Value, step: Value, count: Value, bias: Value) -> None:
    """s += bias, and -inf where bias is, also over a NaN; vectors of `bias` stand side by side."""
    b = e.builder
    with e.loop(count) as i:
        at = b.mul(i, step)
        x = e.load(bias, b.mul(i, e.whole(W)))
        hidden = b.fcmp_ordered("==", x, e.f32s(-INF))
        e.store(b.select(hidden, e.f32s(-INF), b.fadd(e.load(s, at), x)), s, at)


# By rows


@microkernel("iifi")
def alibi_row(e: Emit, s: Value, count: Value, slope: Value, distance: Value) -> None:
    """s[j] -= slope * |distance - j| over `count` vectors of keys."""
    b = e.builder
    slope = e.splat(b.fneg(slope))
    lanes = ir.Constant(e.vector(F32), [float(i) for i in range(W)])
    with e.loop(count) as i:
        at = b.mul(i, e.whole(W))
        start = e.splat(b.sitofp(b.sub(distance, at), F32))
        e.store(e.fma(slope, e.call("fabs", b.fsub(start, lanes)), e.load(s, at)), s, at)


@microkernel("ii>f")
def max_row(e: Emit, s: Value, count: Value) -> Value:
    top = e.var(e.f32s(-INF))
    with e.loop(count) as i:
        top.set(e.max(e.load(s, e.builder.mul(i, e.whole(W))), top.get()))
    return e.reduce(top.get(), e.max)


@microkernel("iiff>f")
def exp_row(e: Emit, s: Value, count: Value, factor: Value, top: Value) -> Value:
    """s = 2 ** ((s - top) * factor); returns the sum.

    Subtracting first costs an instruction, but rounds alike in every tile, whatever its maximum, and leaves a bias near
    the least float where it is: times log2 e it would be -inf.
    """
    b = e.builder
    total, factor, top = e.var(e.zeros), e.splat(factor), e.splat(top)
    with e.loop(count) as i:
        at = b.mul(i, e.whole(W))
        p = e.exp2(b.fmul(b.fsub(e.load(s, at), top), factor))
        e.store(p, s, at)
        total.set(b.fadd(total.get(), p))
    return e.reduce(total.get(), b.fadd)


# By columns: W query rows, `count` keys, `step` floats from key to key


@microkernel("iiiiii")
def alibi_column(e: Emit, s: Value, step: Value, count: Value, slopes: Value, positions: Value, key: Value) -> None:
    """s[j, r] -= slopes[r] * |positions[r] - key - j|; positions are int32."""
    b = e.builder
    slope, position = b.fneg(e.load(slopes)), e.load_i32(positions)
    with e.loop(count) as j:
        at = b.mul(j, step)
        away = b.sub(position, e.splat_i32(b.trunc(b.add(key, j), I32)))
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
        e.store(b.select(seen, e.load(s, at), e.f32s(-INF)), s, at)


def column_max(e: Emit, s: Value, step: Value, count: Value) -> Value:
    """The largest of `count` scores of W rows."""
    b = e.builder
    tops = [e.var(e.f32s(-INF)) for _ in range(8)]  # eight, since one would wait for itself
    whole = b.mul(b.sdiv(count, e.whole(8)), e.whole(8))
    with e.loop(whole, 8) as j:
        for n, top in enumerate(tops):
            top.set(e.max(e.load(s, b.mul(b.add(j, e.whole(n)), step)), top.get()))
    with e.loop(b.sub(count, whole)) as j:
        tops[0].set(e.max(e.load(s, b.mul(b.add(j, whole), step)), tops[0].get()))
    most = tops[0].get()
    for top in tops[1:]:
        most = e.max(most, top.get())
    return most


def take_base(e: Emit, m: Value, old: Value, new: Value, factor: Value) -> tuple[Value, Value]:
    """Stores the new m of W rows: what to subtract from their scores, and what older weights fade by."""
    b = e.builder
    base = b.select(b.fcmp_ordered("==", new, e.f32s(-INF)), e.zeros, new)  # nothing seen yet
    e.store(new, m)
    return base, e.exp2(b.fmul(b.fsub(old, base), factor))


def lazy_top(e: Emit, s: Value, step: Value, count: Value, m: Value, factor: Value, most: Value) -> tuple[Value, Value]:
    """m is 0 as long as all scores are small (`most`, none if below 0), then the running maximum; see `take_base`.

    It depends on a row's own scores alone, not on those of its neighbours.
    """
    b = e.builder
    old, top = e.load(m), column_max(e, s, step, count)
    near = b.fcmp_ordered("<=", e.call("fabs", b.fmul(top, factor)), most)
    below = b.fcmp_ordered("<=", b.fmul(top, factor), most)
    first, calm = b.fcmp_ordered("==", old, e.f32s(-INF)), b.fcmp_ordered("==", old, e.zeros)
    still = b.or_(b.and_(first, near), b.and_(calm, below))
    return take_base(e, m, old, b.select(still, e.zeros, e.max(old, top)), factor)


def add_up(e: Emit, values: Sequence[Value]) -> Value:
    """Their sum, by pairs: short sums of short sums round less than a long one."""
    while len(values) > 1:
        pairs = [e.builder.fadd(x, y) for x, y in zip(values[::2], values[1::2], strict=False)]
        values = [*pairs, *values[2 * len(pairs) :]]
    return values[0]


def fade_and_store(e: Emit, l: Value, shrink: Value, fade: Value, total: Value) -> None:
    """The running sum l of W rows with `total` added, and `fade` for whoever holds older weights."""
    e.store(e.fma(e.load(l), fade, total), l)
    e.store(fade, shrink)


@microkernel("iiiiiiff")
def soften_column(
    e: Emit, s: Value, step: Value, count: Value, m: Value, l: Value, shrink: Value, factor: Value, most: Value
) -> None:
    """Scores to weights, with m by `lazy_top` and the sum l of each row; `shrink` is what older weights fade by.

    p = 2 ** ((s - m) * factor), subtracted first as in `exp_row`; they are summed as in `calm.py`.
    """
    b = e.builder
    factor = e.splat(factor)
    base, fade = lazy_top(e, s, step, count, m, factor, e.splat(most))
    total = e.var(e.zeros)
    whole = b.mul(b.sdiv(count, e.whole(KEYS)), e.whole(KEYS))

    def weigh(j: Value) -> Value:
        at = b.mul(j, step)
        p = e.exp2_of_product(b.fsub(e.load(s, at), base), factor)
        e.store(p, s, at)
        return p

    with e.loop(whole, KEYS) as j:
        total.set(b.fadd(total.get(), add_up(e, [weigh(b.add(j, e.whole(n))) for n in range(KEYS)])))
    with e.loop(b.sub(count, whole)) as j:
        total.set(b.fadd(total.get(), weigh(b.add(j, whole))))
    fade_and_store(e, l, shrink, fade, total.get())
