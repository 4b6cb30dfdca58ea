"""The epilogue: rows normalised to `out` and `lse`, or kept as split-KV partials (m, l, acc); `combine` of those."""

# mypy: ignore-errors
from __future__ import annotations

import math

from numba import carray, types

from ..codegen.load_store import check_finite, clear, get_f32, get_i64, get_one, put_f32, widen_f32
from ..codegen.numba_ops import INF, ZERO, F, fill, item_at, jit, params_at, pointer, store_row, up
from ..codegen.vector import W
from ..kv_access import sequence
from ..params import WORK_ITEM
from .nonfinite import DOWNSCALE, UPSCALE
from .scores import unit

WORK_ITEM_BYTES = WORK_ITEM.itemsize


@jit
def out_row(p, item, g, i, q_start):
    """Where the output of query i of an item's rows is, for head g of the group."""
    head, b = item.head * (p.heads // p.kv_heads) + g, types.int64(0) if p.cu_q else item.b
    return p.out + b * p.out_b + head * p.out_h + (q_start + item.row + i) * p.out_l


@jit
def finalize_row(p, item, g, i, q_start, acc, m, l):
    """Writes query i of head g of the group: the sink, the normalisation, `out` and `lse`."""
    m *= unit(p)
    head, b = item.head * (p.heads // p.kv_heads) + g, types.int64(0) if p.cu_q else item.b
    line = q_start + item.row + i
    factor = F(1)
    if l < F(0):
        l, factor = -l, UPSCALE
    sink = get_f32(p.sinks + 4 * head) if p.sinks else -INF
    if sink == INF:  # it takes all weight
        clear(acc, up(p.value_dim, W))
        m, l = INF, F(1)
    elif sink != -INF:
        top = max(m, sink)
        less = F(math.exp(m - top))
        l = l * less + F(math.exp(sink - top))
        m, factor = top, factor * less
    total = F(1) if l == F(0) else l
    store_row(out_row(p, item, g, i, q_start), p.q_code, acc, p.value_dim, factor / total)
    if p.lse:
        put_f32(p.lse + b * p.lse_b + head * p.lse_h + line * p.lse_l, m + F(math.log(total)))


@jit
def epilogue_rows(p, t, index, first, R, q_start):
    """Writes a work item's R rows from row `first` on: normalised to `out` and `lse`, or as a split-KV partial.

    Returns NaN if a sum is not finite, else 0.
    """
    item, Dv = item_at(p.work_items + index * WORK_ITEM_BYTES), up(p.value_dim, W)
    slot, acc = p.partials + index * p.partial_bytes, t.acc + 4 * first * Dv
    part = item.splits > 1 or p.keep_partials != 0
    bad = widen_f32(slot, acc, R * Dv) if part else check_finite(acc, R * Dv)
    for r in range(R):
        m, l = get_f32(t.m + 4 * (first + r)), get_f32(t.l + 4 * (first + r))
        if part:
            put_f32(slot + 4 * (R * Dv + 2 * r), m)
            put_f32(slot + 4 * (R * Dv + 2 * r + 1), l)
        else:
            finalize_row(p, item, r // item.rows, r % item.rows, q_start, acc + 4 * r * Dv, m, l)
    return bad


@jit
def replace_overflowed_rows(p, t, index, first, R, q_start):
    """Rows that `epilogue_rows` has found not finite, from sums of downscaled weights: those of which a cell now is."""
    item, Dv = item_at(p.work_items + index * WORK_ITEM_BYTES), up(p.value_dim, W)
    slot, part = p.partials + index * p.partial_bytes, item.splits > 1 or p.keep_partials != 0
    for r in range(R):
        acc, g, i = t.acc + 4 * (first + r) * Dv, r // item.rows, r % item.rows
        before, code = (slot + 4 * r * Dv, ZERO) if part else (out_row(p, item, g, i, q_start), p.q_code)
        gained = False
        for d in range(p.value_dim):
            old, new = get_one(before, code, d), get_f32(acc + 4 * d)
            gained |= old - old != F(0) and new - new == F(0)
        if not gained:
            continue
        m, l = get_f32(t.m + 4 * (first + r)), get_f32(t.l + 4 * (first + r))
        if part:
            widen_f32(before, acc, Dv)
            put_f32(slot + 4 * (R * Dv + 2 * r), m)
            put_f32(slot + 4 * (R * Dv + 2 * r + 1), -l)
        else:
            finalize_row(p, item, g, i, q_start, acc, m, -l)


def combine(params, scratch):
    """Combines the split-KV partials; run by one thread when all are there."""
    p = params_at(params)
    count = get_i64(p.counter + 8)
    work_items = carray(pointer(p.work_items), count, dtype=WORK_ITEM)
    Dv = up(p.value_dim, W)
    for index in range(count):
        item = work_items[index]
        if item.splits < 2 or item.split:
            continue
        R = p.heads // p.kv_heads * item.rows
        q_start = sequence(p, item.b)[0]
        for r in range(R):
            m, downscaled = -INF, False
            for part in range(item.splits):
                slot = p.partials + (index + part * p.kv_heads) * p.partial_bytes
                m = max(m, get_f32(slot + 4 * (R * Dv + 2 * r)))
                downscaled |= get_f32(slot + 4 * (R * Dv + 2 * r + 1)) < F(0)
            l = combine_row(p, index, item.splits, R, r, Dv, m, scratch, downscaled)
            if not downscaled and check_finite(scratch, Dv) != F(0):
                l = -combine_row(p, index, item.splits, R, r, Dv, m, scratch, True)
            finalize_row(p, item, r // item.rows, r % item.rows, q_start, scratch, m, -l if downscaled else l)


@jit
def combine_row(p, index, parts, R, r, Dv, m, to, downscaled):
    """Row r combined over an item's splits; returns its row sum. `downscaled`: of weights times DOWNSCALE."""
    l = F(0)
    fill(to, ZERO, Dv, F(0))
    for part in range(parts):
        slot = p.partials + (index + part * p.kv_heads) * p.partial_bytes
        top = get_f32(slot + 4 * (R * Dv + 2 * r))
        if top == -INF:
            continue
        weight, own = F(math.exp((top - m) * unit(p))), get_f32(slot + 4 * (R * Dv + 2 * r + 1))
        l += weight * abs(own)
        if downscaled and not own < F(0):
            weight *= DOWNSCALE
        for d in range(Dv):
            x = get_f32(slot + 4 * (r * Dv + d))
            put_f32(to + 4 * d, get_f32(to + 4 * d) + weight * x)
    return l
