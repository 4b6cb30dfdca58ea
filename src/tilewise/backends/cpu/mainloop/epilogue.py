"""The epilogue: rows normalised to `out` and `lse`, or kept as split-KV partials (m, l, acc); `combine` of those."""

# mypy: ignore-errors
from __future__ import annotations

import math
from collections import namedtuple

from numba import types

from ..codegen import dtypes
from ..codegen.load_store import check_finite, clear, copy_checked, get_f32, get_one, put_f32, row_add, row_fma
from ..codegen.numba_ops import INF, ZERO, F, item_at, jit, params_at, store_row, up
from ..codegen.vector import W
from ..kv_access import sequence
from ..params import WORK_ITEM_BYTES
from .nonfinite import DOWNSCALE, UPSCALE
from .scores import softmax_scale


@jit
def out_row(p, item, g, i, q_start):
    """The address of the output of query i of an item's rows, for head g of the group."""
    head, b = item.head * (p.heads // p.kv_heads) + g, types.int64(0) if p.cu_q else item.b
    return p.out + b * p.out_b + head * p.out_h + (q_start + item.row + i) * p.out_l


@jit
def finalize_row(p, item, g, i, q_start, acc, m, l):
    """Writes query i of head g of the group: the sink, the normalisation, `out` and `lse`."""
    m *= softmax_scale(p)
    head, b = item.head * (p.heads // p.kv_heads) + g, types.int64(0) if p.cu_q else item.b
    token = q_start + item.row + i
    factor = F(1)
    if l < F(0):
        l, factor = -l, UPSCALE
    sink = get_f32(p.sinks + 4 * head) if p.sinks else -INF
    if sink == INF:  # it takes all weight
        clear(acc, up(p.value_dim, W))
        m, l = INF, F(1)
    elif sink != -INF:
        top = max(m, sink)
        alpha = F(math.exp(m - top))
        l = l * alpha + F(math.exp(sink - top))
        m, factor = top, factor * alpha
    total = F(1) if l == F(0) else l
    store_row(out_row(p, item, g, i, q_start), p.q_dtype, acc, p.value_dim, factor / total)
    if p.lse:
        put_f32(p.lse + b * p.lse_b + head * p.lse_h + token * p.lse_l, m + F(math.log(total)))


@jit
def stats_at(slot, R, Dv, r):
    """The address of m of row r of a partial; l follows."""
    return slot + 4 * (R * Dv + 2 * r)


@jit
def epilogue_rows(p, t, index, first, R, q_start):
    """Writes a work item's R rows from row `first` on: normalised to `out` and `lse`, or as a split-KV partial.

    Returns NaN if a sum is not finite, else 0.
    """
    item, Dv = item_at(p.work_items + index * WORK_ITEM_BYTES), up(p.value_dim, W)
    slot, acc = p.partials + index * p.partial_bytes, t.acc + 4 * first * Dv
    part = item.splits > 1 or p.keep_partials != 0
    bad = copy_checked(slot, acc, R * Dv) if part else check_finite(acc, R * Dv)
    for r in range(R):
        m, l = get_f32(t.m + 4 * (first + r)), get_f32(t.l + 4 * (first + r))
        if part:
            put_f32(stats_at(slot, R, Dv, r), m)
            put_f32(stats_at(slot, R, Dv, r) + 4, l)
        else:
            finalize_row(p, item, r // item.rows, r % item.rows, q_start, acc + 4 * r * Dv, m, l)
    return bad


@jit
def replace_overflowed_rows(p, t, index, first, R, q_start):
    """Replaces rows that `epilogue_rows` found non-finite by sums of downscaled weights, if an element is finite."""
    item, Dv = item_at(p.work_items + index * WORK_ITEM_BYTES), up(p.value_dim, W)
    slot, part = p.partials + index * p.partial_bytes, item.splits > 1 or p.keep_partials != 0
    for r in range(R):
        acc, g, i = t.acc + 4 * (first + r) * Dv, r // item.rows, r % item.rows
        before, dtype = (slot + 4 * r * Dv, dtypes.F32) if part else (out_row(p, item, g, i, q_start), p.q_dtype)
        gained = False
        for d in range(p.value_dim):
            old, new = get_one(before, dtype, d), get_f32(acc + 4 * d)
            gained |= old - old != F(0) and new - new == F(0)
        if not gained:
            continue
        m, l = get_f32(t.m + 4 * (first + r)), get_f32(t.l + 4 * (first + r))
        if part:
            copy_checked(before, acc, Dv)
            put_f32(stats_at(slot, R, Dv, r), m)
            put_f32(stats_at(slot, R, Dv, r) + 4, -l)
        else:
            finalize_row(p, item, g, i, q_start, acc, m, -l)


# An item's split-KV partials: the index of the first, their number, their rows, and the row in question
Partials = namedtuple("Partials", "index splits rows row")


@jit
def slot_of(p, partials, split):
    """The address of a split's partial: acc [rows, Dv], then m and l of each row."""
    return p.partials + (partials.index + split * p.kv_heads) * p.partial_bytes


@jit
def max_of_partials(p, partials, Dv, m):
    """The largest of m and the maxima of a row's partials, and whether one of them is downscaled."""
    downscaled = False
    for split in range(partials.splits):
        stats = stats_at(slot_of(p, partials, split), partials.rows, Dv, partials.row)
        m = max(m, get_f32(stats))
        downscaled |= get_f32(stats + 4) < F(0)
    return m, downscaled


@jit
def add_partials(p, partials, Dv, m, to, downscaled, fused):
    """Adds a row's partials, rescaled by their maxima; returns their share of the row sum.

    `downscaled`: multiply all by DOWNSCALE. `fused`: use FMA.
    """
    l = F(0)
    for split in range(partials.splits):
        slot = slot_of(p, partials, split)
        stats = stats_at(slot, partials.rows, Dv, partials.row)
        top = get_f32(stats)
        if top != -INF:
            weight, part_l = F(math.exp((top - m) * softmax_scale(p))), get_f32(stats + 4)
            l += weight * abs(part_l)
            if downscaled and not part_l < F(0):
                weight *= DOWNSCALE
            if fused:
                row_fma(to, slot + 4 * partials.row * Dv, Dv, weight)
            else:
                row_add(to, slot + 4 * partials.row * Dv, Dv, weight)
    return l


@jit
def combine_row(p, own, shared_p, shared, Dv, to, fused):
    """Combines a row's partials, and those over shared keys, in `to`. Returns m, and l, negative if downscaled."""
    m, downscaled = max_of_partials(p, own, Dv, -INF)
    m, more = max_of_partials(shared_p, shared, Dv, m)
    downscaled |= more
    l = F(0)
    for _ in range(2):
        clear(to, Dv)
        l = add_partials(p, own, Dv, m, to, downscaled, fused)
        l += add_partials(shared_p, shared, Dv, m, to, downscaled, fused)
        if downscaled or check_finite(to, Dv) == F(0):
            break
        downscaled = True
    return m, -l if downscaled else l


def combine(params, scratch):
    """Combines the split-KV partials, in one thread, after all items."""
    p = params_at(params)
    none = Partials(ZERO, ZERO, ZERO, ZERO)
    for index in range(p.items):
        item = item_at(p.work_items + index * WORK_ITEM_BYTES)
        if item.splits < 2 or item.split:
            continue
        R = p.heads // p.kv_heads * item.rows
        q_start = sequence(p, item.b)[0]
        for r in range(R):
            m, l = combine_row(p, Partials(index, item.splits, R, r), p, none, up(p.value_dim, W), scratch, False)
            finalize_row(p, item, r // item.rows, r % item.rows, q_start, scratch, m, l)
