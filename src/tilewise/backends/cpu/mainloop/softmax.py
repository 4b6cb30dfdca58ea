"""Micro-kernels for scores. One vector holds W cells: W keys of one query row, or W query rows and one key.

Decode keeps its scores by rows, prefill by columns; `per_row` and `per_column` functions do the same to either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..codegen.vector import Emit, Value, W, microkernel
from ..gemm.fp32 import KEYS

LOG2E = math.log2(math.e)
# Rows whose scores are this small, as powers of two, may have nothing subtracted from them: see `columns.calm_bound`.
MOST, NEVER = 30.0, -1.0


@microkernel("ii>f")
def max_row(e: Emit, s: Value, count: Value) -> Value:
    top = e.var(e.f32s(-math.inf))
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


def column_max(e: Emit, s: Value, step: Value, count: Value) -> Value:
    """The largest of `count` scores of W rows."""
    b = e.builder
    tops = [e.var(e.f32s(-math.inf)) for _ in range(8)]  # eight, since one would wait for itself
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
    base = b.select(b.fcmp_ordered("==", new, e.f32s(-math.inf)), e.zeros, new)  # nothing seen yet
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
    first, calm = b.fcmp_ordered("==", old, e.f32s(-math.inf)), b.fcmp_ordered("==", old, e.zeros)
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
