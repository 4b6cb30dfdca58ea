"""Max-free softmax for bounded logits, fused into the epilogue of K Q^T.

While every logit of a row stays below `MAX_FREE_LIMIT` (in log2), exp2 needs no running max and the accumulator no
rescale. The row sums tell whether the bound held; if not, the tile is recomputed by the online softmax
(`softmax.online_softmax_columns`). Bit-equal to it for bounded rows. Gain: cpu/max-free in benchmarks/cpu/LOG.md.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from ..codegen.vector import I64, Emit, Value, W, microkernel
from ..gemm.fp32 import KEYS, PANEL, dot_products
from .softmax import MAX_FREE_LIMIT, pairwise_sum

VECTORS = PANEL // W
MIN_ROW_SUM = 2.0 ** (8 - MAX_FREE_LIMIT)  # of up to 2 ** 8 weights: then one is at least 2 ** -MAX_FREE_LIMIT


def _in_all(e: Emit, lanes: list[Value]) -> Value:
    """1 if a condition holds in every lane of all vectors."""
    b = e.builder
    together = lanes[0]
    for more in lanes[1:]:
        together = b.and_(together, more)
    bits = ir.IntType(W)
    return b.zext(b.icmp_unsigned("==", b.bitcast(together, bits), ir.Constant(bits, 2**W - 1)), I64)


@microkernel("iiiiifi")
def gemm_keys_exp2(
    e: Emit, keys: Value, offset: Value, q: Value, s: Value, depth: Value, factor: Value, row_sums: Value
) -> None:
    """s[KEYS, PANEL] = 2 ** (factor K Q^T), and their sums added to `row_sums`; s holds what comes before `offset`."""
    b = e.builder
    sums = dot_products(e, keys, offset, q, depth, VECTORS)
    with b.if_then(b.icmp_signed("!=", offset, e.i64(0))):
        for i in range(KEYS):
            for j in range(VECTORS):
                sums[i][j].set(b.fadd(e.load(s, i * PANEL + j * W), sums[i][j].get()))
    factor = e.splat(factor)
    for j in range(VECTORS):
        weights = [e.exp2_of_product(sums[i][j].get(), factor) for i in range(KEYS)]
        for i, weight in enumerate(weights):
            e.store(weight, s, i * PANEL + j * W)
        e.store(b.fadd(e.load(row_sums, j * W), pairwise_sum(e, weights)), row_sums, j * W)


@microkernel("iifi")
def exp2_rest(e: Emit, s: Value, count: Value, factor: Value, row_sums: Value) -> None:
    """s[count, PANEL] = 2 ** (factor s) of the keys after the last whole block."""
    b = e.builder
    factor = e.splat(factor)
    with e.loop(count) as i:
        for j in range(VECTORS):
            at = b.add(b.mul(i, e.i64(PANEL)), e.i64(j * W))
            weight = e.exp2_of_product(e.load(s, at), factor)
            e.store(weight, s, at)
            e.store(b.fadd(e.load(row_sums, j * W), weight), row_sums, j * W)


def _checks(vectors: int) -> tuple[Any, Any]:
    """`is_max_free` and `commit_row_sums` of `vectors` vectors of rows."""

    @microkernel("i>i")
    def is_max_free(e: Emit, m: Value) -> Value:
        """Whether no running max is subtracted for these rows, or no key is seen yet."""
        b = e.builder
        maxima = [e.load(m, j * W) for j in range(vectors)]
        lanes = [b.or_(b.fcmp_ordered("==", x, e.zeros), b.fcmp_ordered("==", x, e.f32s(-math.inf))) for x in maxima]
        return _in_all(e, lanes)

    @microkernel("iiii>i")
    def commit_row_sums(e: Emit, row_sums: Value, m: Value, l: Value, alpha: Value) -> Value:
        """Adds a tile's row sums to l if all logits were bounded; returns whether they were."""
        b = e.builder
        sums = [e.load(row_sums, j * W) for j in range(vectors)]
        lanes = []
        for j, x in enumerate(sums):
            seen = b.fcmp_ordered("==", e.load(m, j * W), e.zeros)
            enough = b.or_(seen, b.fcmp_ordered(">=", x, e.f32s(MIN_ROW_SUM)))
            some = b.fcmp_ordered(">=", x, e.zeros)  # scores past 2 ** 22 give infinities of either sign
            lanes.append(b.and_(b.and_(enough, some), b.fcmp_ordered("<=", x, e.f32s(2.0**MAX_FREE_LIMIT))))
        max_free = _in_all(e, lanes)
        with b.if_then(b.icmp_signed("!=", max_free, e.i64(0))):
            for j, x in enumerate(sums):
                e.store(e.zeros, m, j * W)
                e.store(b.fadd(e.load(l, j * W), x), l, j * W)
                e.store(e.f32s(1.0), alpha, j * W)
        return max_free

    return is_max_free, commit_row_sums


is_max_free, commit_row_sums = _checks(VECTORS)
is_max_free_2, commit_row_sums_2 = _checks(2)  # for the panels of `prefill_tiles.py`
