"""Micro-kernels for weights of calm rows: 2 ** score as it is, made where the scores are, in registers.

A row is calm as long as nothing has to be subtracted from its scores (as powers of two): float32 holds 2 ** s of all
that count. No maximum is looked for then, and older sums never fade. Whether that was right is seen by the sums of the
weights: if one is too large, the tile is done again by `softmax.soften_column`, which then subtracts. Both give a calm
row the same bits. (A pass over the scores less: two cores took 0.94 of the time at D 32 and 64, 0.97 at D 128, in turns
with the maximum always subtracted.)
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from ..codegen.vector import I64, Emit, Value, W, microkernel
from ..gemm.fp32 import KEYS, PANEL, dot_products
from .softmax import MOST, add_up

VECTORS = PANEL // W
LEAST_TOTAL = 2.0 ** (8 - MOST)  # of up to 2 ** 8 weights: one of them is at least 2 ** -MOST


def _in_all(e: Emit, lanes: list[Value]) -> Value:
    """1 if a condition holds in every lane of all vectors."""
    b = e.builder
    together = lanes[0]
    for more in lanes[1:]:
        together = b.and_(together, more)
    bits = ir.IntType(W)
    return b.zext(b.icmp_unsigned("==", b.bitcast(together, bits), ir.Constant(bits, 2**W - 1)), I64)


@microkernel("iiiiifi")
def gemm_weights(
    e: Emit, keys: Value, offset: Value, q: Value, s: Value, depth: Value, factor: Value, totals: Value
) -> None:
    """s[KEYS, PANEL] = 2 ** (factor K Q^T), and their sums added to `totals`; s holds what comes before `offset`."""
    b = e.builder
    sums = dot_products(e, keys, offset, q, depth, VECTORS)
    with b.if_then(b.icmp_signed("!=", offset, e.whole(0))):
        for i in range(KEYS):
            for j in range(VECTORS):
                sums[i][j].set(b.fadd(e.load(s, i * PANEL + j * W), sums[i][j].get()))
    factor = e.splat(factor)
    for j in range(VECTORS):
        weights = [e.exp2_of_product(sums[i][j].get(), factor) for i in range(KEYS)]
        for i, weight in enumerate(weights):
            e.store(weight, s, i * PANEL + j * W)
        e.store(b.fadd(e.load(totals, j * W), add_up(e, weights)), totals, j * W)


@microkernel("iifi")
def weigh_rest(e: Emit, s: Value, count: Value, factor: Value, totals: Value) -> None:
    """s[count, PANEL] = 2 ** (factor s) of the keys that make no block."""
    b = e.builder
    factor = e.splat(factor)
    with e.loop(count) as i:
        for j in range(VECTORS):
            at = b.add(b.mul(i, e.whole(PANEL)), e.whole(j * W))
            weight = e.exp2_of_product(e.load(s, at), factor)
            e.store(weight, s, at)
            e.store(b.fadd(e.load(totals, j * W), weight), totals, j * W)


def _checks(vectors: int) -> tuple[Any, Any]:
    @microkernel("i>i")
    def is_calm(e: Emit, m: Value) -> Value:
        """Whether nothing is subtracted from the scores of these rows, or nothing is seen yet."""
        b = e.builder
        tops = [e.load(m, j * W) for j in range(vectors)]
        lanes = [b.or_(b.fcmp_ordered("==", x, e.zeros), b.fcmp_ordered("==", x, e.f32s(-math.inf))) for x in tops]
        return _in_all(e, lanes)

    @microkernel("iiii>i")
    def take_totals(e: Emit, totals: Value, m: Value, l: Value, shrink: Value) -> Value:
        """Adds the sums of a tile's weights to l, if the rows are calm with them; were they?"""
        b = e.builder
        sums = [e.load(totals, j * W) for j in range(vectors)]
        lanes = []
        for j, x in enumerate(sums):
            seen = b.fcmp_ordered("==", e.load(m, j * W), e.zeros)
            enough = b.or_(seen, b.fcmp_ordered(">=", x, e.f32s(LEAST_TOTAL)))
            some = b.fcmp_ordered(">=", x, e.zeros)  # of scores past 2 ** 22 come infinities of either sign
            lanes.append(b.and_(b.and_(enough, some), b.fcmp_ordered("<=", x, e.f32s(2.0**MOST))))
        calm = _in_all(e, lanes)
        with b.if_then(b.icmp_signed("!=", calm, e.whole(0))):
            for j, x in enumerate(sums):
                e.store(e.zeros, m, j * W)
                e.store(b.fadd(e.load(l, j * W), x), l, j * W)
                e.store(e.f32s(1.0), shrink, j * W)
        return calm

    return is_calm, take_totals


is_calm, take_totals = _checks(VECTORS)
is_calm_2, take_totals_2 = _checks(2)  # for the panels of matrix tiles
