"""Micro-kernels for weights that are written as the matrix tiles which the product with V reads (`amx.py`).

Weights of calm rows (`calm.py`) are made beside the next block's scores: nothing has to be known of all keys before,
and tiles and vectors work at the same time. (One core, f16, L 512, in turns with scores of all keys of a tile before
their weights: 1.26x at D 64, 1.22x at D 128, 1.19x at D 256.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..codegen.vector import F32, Emit, Value, W, microkernel
from ..gemm.amx import BLOCK, KEY_PRODUCTS, TILE, make_scores
from ..gemm.amx_pack import pair, split
from .softmax import fade_and_store, lazy_top


def weigh_pair(e: Emit, parts: int, x: Sequence[Value], base: Value, factor: Value, p: Value, part: Value) -> Value:
    """Scores of two neighbouring keys as a row of a tile of weights, in parts `part` bytes apart. Returns their sum."""
    b = e.builder
    weights = [e.exp2_of_product(b.fsub(score, base), factor) for score in x]
    for n, (even, odd) in enumerate(zip(*(split(e, weight, parts) for weight in weights), strict=True)):
        e.store(b.bitcast(pair(e, even, odd), e.vector(F32)), b.add(p, b.mul(part, e.whole(n))))
    return b.fadd(*weights)


def make_soften(parts: int) -> Any:
    """`fn(s, count, m, l, shrink, factor, p, part, most)`: as `softmax.soften_column`, but weights go to `p` as tiles.

    `count` is a multiple of 32. Returns 1 if older weights fade.
    """

    @microkernel("iiiiifiif>f")
    def soften(
        e: Emit, s: Value, count: Value, m: Value, l: Value, shrink: Value, factor: Value, p: Value, part: Value,
        most: Value,
    ) -> Value:  # fmt: skip
        b = e.builder
        factor = e.splat(factor)
        base, fade = lazy_top(e, s, e.whole(W), count, m, factor, e.splat(most))
        total = e.var(e.zeros)
        with e.loop(b.sdiv(count, e.whole(BLOCK))) as step, e.loop(e.whole(16)) as j:
            row = b.mul(b.add(b.mul(step, e.whole(16)), j), e.whole(2 * W))
            scores = [e.load(s, row), e.load(s, b.add(row, e.whole(W)))]
            at = b.add(p, b.add(b.mul(step, e.whole(2 * TILE)), b.mul(j, e.whole(64))))
            total.set(b.fadd(total.get(), weigh_pair(e, parts, scores, base, factor, at, part)))
        fade_and_store(e, l, shrink, fade, total.get())
        fades = b.fcmp_unordered("!=", fade, e.f32s(1.0))
        return e.reduce(b.uitofp(fades, e.vector(F32)), e.max)

    return soften


def make_calm_products(parts: int) -> tuple[Any, Any]:
    """Scores of a block of 32 keys and 32 rows beside the weights of the block before: tiles and vectors work at once.

    `keys(k, k_part, q, q_part, s, n, before, factor, p, part, totals)`: s [2, 32, 16] = K Q^T, while the scores
    at `before`, if that is not 0, become weights at `p`, their sums added to `totals` as in `calm.py`.
    `weigh(before, factor, p, part, totals)`: the latter alone.
    """
    UNITS = 32  # pairs of keys of 16 rows

    def weigh_units(
        e: Emit, first: Value, end: Value, before: Value, factor: Value, p: Value, part: Value, totals: Value
    ) -> None:
        b = e.builder
        with e.loop(b.sub(end, first)) as i:
            unit = b.add(first, i)
            scores = [e.load(before, b.add(b.mul(unit, e.whole(2 * W)), e.whole(n * W))) for n in (0, 1)]
            more = weigh_pair(e, parts, scores, e.zeros, factor, b.add(p, b.mul(unit, e.whole(64))), part)
            to = b.mul(b.lshr(unit, e.whole(4)), e.whole(W))
            e.store(b.fadd(e.load(totals, to), more), totals, to)

    @microkernel("iiiiiiifiii")
    def keys(
        e: Emit, k: Value, k_part: Value, q: Value, q_part: Value, s: Value, n: Value, before: Value, factor: Value,
        p: Value, part: Value, totals: Value,
    ) -> None:  # fmt: skip
        b = e.builder
        factor = e.splat(factor)
        groups = b.mul(n, e.whole(len(KEY_PRODUCTS[parts])))
        units = b.select(b.icmp_signed("==", before, e.whole(0)), e.whole(0), e.whole(UNITS))

        def beside(group: Value) -> None:
            first, end = (b.sdiv(b.mul(units, b.add(group, e.whole(more))), groups) for more in (0, 1))
            weigh_units(e, first, end, before, factor, p, part, totals)

        make_scores(e, parts, k, k_part, q, q_part, s, e.whole(2 * TILE), n, beside)

    @microkernel("ifiii")
    def weigh(e: Emit, before: Value, factor: Value, p: Value, part: Value, totals: Value) -> None:
        weigh_units(e, e.whole(0), e.whole(UNITS), before, e.splat(factor), p, part, totals)

    return keys, weigh


@microkernel("iii")
def fade_columns(e: Emit, acc: Value, count: Value, shrink: Value) -> None:
    """`count` vectors times that of `shrink`."""
    fade = e.load(shrink)
    with e.loop(e.builder.mul(count, e.whole(W)), W) as i:
        e.store(e.builder.fmul(e.load(acc, i), fade), acc, i)
