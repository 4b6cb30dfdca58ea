"""Micro-kernels of the softmax. One vector holds W cells: W keys of one query row, or W query rows of one key.

Decode keeps scores by rows (`max_row`, `exp_row`), prefill by columns (`online_softmax_columns`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..codegen.vector import Emit, Value, W, microkernel
from ..gemm.fp32 import KEYS

LOG2E = math.log2(math.e)
# The bound on logits (log2) under which a row needs no running max: see `scores.max_free_bound`.
MAX_FREE_LIMIT, NEVER_MAX_FREE = 30.0, -1.0


@microkernel("ii>f")
def max_row(e: Emit, s: Value, count: Value) -> Value:
    """The largest of `count` vectors of scores."""
    top = e.var(e.f32s(-math.inf))
    with e.loop(count) as i:
        top.set(e.max(e.load(s, e.builder.mul(i, e.i64(W))), top.get()))
    return e.reduce(top.get(), e.max)


@microkernel("iiff>f")
def exp_row(e: Emit, s: Value, count: Value, factor: Value, top: Value) -> Value:
    """s = 2 ** ((s - top) * factor); returns the sum.

    Subtracting first costs an instruction, but rounds the same in every tile, whatever its maximum, and a bias near the
    least float does not overflow: times log2 e it would be -inf.
    """
    b = e.builder
    total, factor, top = e.var(e.zeros), e.splat(factor), e.splat(top)
    with e.loop(count) as i:
        at = b.mul(i, e.i64(W))
        p = e.exp2(b.fmul(b.fsub(e.load(s, at), top), factor))
        e.store(p, s, at)
        total.set(b.fadd(total.get(), p))
    return e.reduce(total.get(), b.fadd)


def column_max(e: Emit, s: Value, step: Value, count: Value) -> Value:
    """The largest of `count` scores of W rows."""
    b = e.builder
    maxima = [e.var(e.f32s(-math.inf)) for _ in range(8)]  # eight, to hide latency
    whole = b.mul(b.sdiv(count, e.i64(8)), e.i64(8))
    with e.loop(whole, 8) as j:
        for n, top in enumerate(maxima):
            top.set(e.max(e.load(s, b.mul(b.add(j, e.i64(n)), step)), top.get()))
    with e.loop(b.sub(count, whole)) as j:
        maxima[0].set(e.max(e.load(s, b.mul(b.add(j, whole), step)), maxima[0].get()))
    bound = maxima[0].get()
    for top in maxima[1:]:
        bound = e.max(bound, top.get())
    return bound


def take_base(e: Emit, m: Value, old: Value, new: Value, factor: Value) -> tuple[Value, Value]:
    """Stores the new m of W rows. Returns what to subtract from their scores, and the rescale factor of older sums."""
    b = e.builder
    base = b.select(b.fcmp_ordered("==", new, e.f32s(-math.inf)), e.zeros, new)  # nothing seen yet
    e.store(new, m)
    return base, e.exp2(b.fmul(b.fsub(old, base), factor))


def lazy_max(
    e: Emit, s: Value, step: Value, count: Value, m: Value, factor: Value, bound: Value
) -> tuple[Value, Value]:
    """m is 0 while all scores are below `bound` (never if that is negative), then the running maximum; see `take_base`.

    It depends on a row's own scores only.
    """
    b = e.builder
    old, top = e.load(m), column_max(e, s, step, count)
    near = b.fcmp_ordered("<=", e.call("fabs", b.fmul(top, factor)), bound)
    below = b.fcmp_ordered("<=", b.fmul(top, factor), bound)
    first, max_free = b.fcmp_ordered("==", old, e.f32s(-math.inf)), b.fcmp_ordered("==", old, e.zeros)
    still = b.or_(b.and_(first, near), b.and_(max_free, below))
    return take_base(e, m, old, b.select(still, e.zeros, e.max(old, top)), factor)


def pairwise_sum(e: Emit, values: Sequence[Value]) -> Value:
    """Pairwise summation, which rounds less."""
    while len(values) > 1:
        pairs = [e.builder.fadd(x, y) for x, y in zip(values[::2], values[1::2], strict=False)]
        values = [*pairs, *values[2 * len(pairs) :]]
    return values[0]


def update_row_sums(e: Emit, l: Value, alpha: Value, rescale: Value, total: Value) -> None:
    """Adds `total` to the running sum l of W rows, and stores `rescale` for the accumulator."""
    e.store(e.fma(e.load(l), rescale, total), l)
    e.store(rescale, alpha)


@microkernel("iiiiiiff")
def online_softmax_columns(
    e: Emit, s: Value, step: Value, count: Value, m: Value, l: Value, alpha: Value, factor: Value, bound: Value
) -> None:
    """Online softmax of W rows: scores to weights, m by `lazy_max`, row sums l, rescale factors `alpha`.

    p = 2 ** ((s - m) * factor), subtracted first as in `exp_row`; they are summed as in `max_free.py`.
    """
    b = e.builder
    factor = e.splat(factor)
    base, rescale = lazy_max(e, s, step, count, m, factor, e.splat(bound))
    total = e.var(e.zeros)
    whole = b.mul(b.sdiv(count, e.i64(KEYS)), e.i64(KEYS))

    def exp2_at(j: Value) -> Value:
        at = b.mul(j, step)
        p = e.exp2_of_product(b.fsub(e.load(s, at), base), factor)
        e.store(p, s, at)
        return p

    with e.loop(whole, KEYS) as j:
        total.set(b.fadd(total.get(), pairwise_sum(e, [exp2_at(b.add(j, e.i64(n))) for n in range(KEYS)])))
    with e.loop(b.sub(count, whole)) as j:
        total.set(b.fadd(total.get(), exp2_at(b.add(j, whole))))
    update_row_sums(e, l, alpha, rescale, total.get())
