"""Softmax whose weights are written as the tiles that P V reads.

For max-free rows (`max_free.py`) it is overlapped with the next block's scores: AMX and vector units work at the same
time. Gain: cpu/amx-overlap in benchmarks/cpu/LOG.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..codegen.vector import F32, Emit, Value, W, microkernel
from ..gemm.amx import BLOCK, KEY_PRODUCTS, TILE
from ..gemm.pack_tiles import pair, split
from .softmax import lazy_max, update_row_sums


def exp2_pair(e: Emit, parts: int, x: Sequence[Value], base: Value, factor: Value, p: Value, part: Value) -> Value:
    """Scores of two adjacent keys to a row of a tile of weights, in parts `part` bytes apart. Returns their sum."""
    b = e.builder
    weights = [e.exp2_of_product(b.fsub(score, base), factor) for score in x]
    for n, (even, odd) in enumerate(zip(*(split(e, weight, parts) for weight in weights), strict=True)):
        e.store(b.bitcast(pair(e, even, odd), e.vector(F32)), b.add(p, b.mul(part, e.i64(n))))
    return b.fadd(*weights)


def make_online_softmax(parts: int) -> Any:
    """`fn(s, count, m, l, alpha, factor, p, part, bound)`: `online_softmax_columns` with weights to `p`, as tiles.

    `count` is a multiple of 32. Returns 1 if the accumulator has to be rescaled.
    """

    @microkernel("iiiiifiif>f")
    def online_softmax(
        e: Emit, s: Value, count: Value, m: Value, l: Value, alpha: Value, factor: Value, p: Value, part: Value,
        bound: Value,
    ) -> Value:  # fmt: skip
        b = e.builder
        factor = e.splat(factor)
        base, rescale = lazy_max(e, s, e.i64(W), count, m, factor, e.splat(bound))
        total = e.var(e.zeros)
        with e.loop(b.sdiv(count, e.i64(BLOCK))) as step, e.loop(e.i64(16)) as j:
            row = b.mul(b.add(b.mul(step, e.i64(16)), j), e.i64(2 * W))
            scores = [e.load(s, row), e.load(s, b.add(row, e.i64(W)))]
            at = b.add(p, b.add(b.mul(step, e.i64(2 * TILE)), b.mul(j, e.i64(64))))
            total.set(b.fadd(total.get(), exp2_pair(e, parts, scores, base, factor, at, part)))
        update_row_sums(e, l, alpha, rescale, total.get())
        changed = b.fcmp_unordered("!=", rescale, e.f32s(1.0))
        return e.reduce(b.uitofp(changed, e.vector(F32)), e.max)

    return online_softmax


def make_max_free_products(parts: int, make_scores: Callable[..., None]) -> tuple[Any, Any]:
    """Scores of a block of 32 keys and 32 rows, overlapped with the weights of the previous block.

    `keys(k, k_part, q, q_part, s, n, before, factor, p, part, row_sums)`: s [2, 32, 16] = K Q^T, while the scores
    at `before`, if that is not 0, become weights at `p`, their sums added to `row_sums` as in `max_free.py`.
    `exp2_last(before, factor, p, part, row_sums)`: only the latter.
    """
    UNITS = 32  # pairs of keys of 16 rows

    def exp2_units(
        e: Emit, first: Value, end: Value, before: Value, factor: Value, p: Value, part: Value, row_sums: Value
    ) -> None:
        b = e.builder
        with e.loop(b.sub(end, first)) as i:
            unit = b.add(first, i)
            scores = [e.load(before, b.add(b.mul(unit, e.i64(2 * W)), e.i64(n * W))) for n in (0, 1)]
            more = exp2_pair(e, parts, scores, e.zeros, factor, b.add(p, b.mul(unit, e.i64(64))), part)
            to = b.mul(b.lshr(unit, e.i64(4)), e.i64(W))
            e.store(b.fadd(e.load(row_sums, to), more), row_sums, to)

    @microkernel("iiiiiiifiii")
    def keys(
        e: Emit, k: Value, k_part: Value, q: Value, q_part: Value, s: Value, n: Value, before: Value, factor: Value,
        p: Value, part: Value, row_sums: Value,
    ) -> None:  # fmt: skip
        b = e.builder
        factor = e.splat(factor)
        groups = b.mul(n, e.i64(len(KEY_PRODUCTS[parts])))
        units = b.select(b.icmp_signed("==", before, e.i64(0)), e.i64(0), e.i64(UNITS))

        def overlapped(group: Value) -> None:
            first, end = (b.sdiv(b.mul(units, b.add(group, e.i64(more))), groups) for more in (0, 1))
            exp2_units(e, first, end, before, factor, p, part, row_sums)

        make_scores(e, parts, k, k_part, q, q_part, s, e.i64(2 * TILE), n, overlapped)

    @microkernel("ifiii")
    def exp2_last(e: Emit, before: Value, factor: Value, p: Value, part: Value, row_sums: Value) -> None:
        exp2_units(e, e.i64(0), e.i64(UNITS), before, e.splat(factor), p, part, row_sums)

    return keys, exp2_last


@microkernel("iii")
def rescale_columns(e: Emit, acc: Value, count: Value, alpha: Value) -> None:
    """Multiplies `count` vectors by that of `alpha`."""
    rescale = e.load(alpha)
    with e.loop(e.builder.mul(count, e.i64(W)), W) as i:
        e.store(e.builder.fmul(e.load(acc, i), rescale), acc, i)
