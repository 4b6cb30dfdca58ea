"""What both ways of walking the keys share: setting up an item's rows, values that are not finite, finished rows."""

# mypy: ignore-errors
from __future__ import annotations

import math

import numpy as np
from numba import types

from .access import INF, F, is_plain, jit, key_span, sequence, store_row, unit, up
from .masks import FULL, SKIP, mask_cell, mask_row
from .micro import clear, get_f32, get_i32, get_i64, put_f32, put_i32
from .simd import W
from .softmax import large_softcap_cells, scale_cells, softcap_cells

# Sums of large values may pass float32's range where their mean does not: they are then made again of weights times
# SHRUNK. A row's l is stored below 0 if its acc is of such weights.
SHRUNK, GROWN = F(2.0**-32), F(2.0**32)
LEAST_FACTOR, LARGEST = F(1e-20), float(np.finfo(np.float32).max)


@jit
def set_up(p, t, item, count, Dv):
    """m, l, acc, spans, positions and slopes of the item's rows, then of rows up to `count`, which see nothing.

    Returns the first and last key that any row sees (first >= last if none does).
    """
    _, _, _, kv_len, offset = sequence(p, item.b)
    group, n = p.heads // p.kv_heads, item.rows
    first, last = item.end, item.start
    for g in range(group):
        slope = F(0)
        if p.slopes:
            slope = get_f32(p.slopes + item.b * p.slopes_b + (item.head * group + g) * p.slopes_h)
        for i in range(n):
            position = offset + item.row + i
            lo, hi = key_span(p, position, kv_len)
            lo, hi = max(lo, item.start), min(hi, item.end)
            if lo < hi:
                first, last = min(first, lo), max(last, hi)
            else:
                lo, hi = types.int64(0), types.int64(0)
            set_row(t, g * n + i, lo, hi, position, slope)
    for r in range(group * n, count):
        set_row(t, r, types.int64(0), types.int64(0), types.int64(0), F(0))
    clear(t.acc, count * Dv)
    return first, last


@jit
def set_row(t, r, lo, hi, position, slope):
    put_i32(t.lo + 4 * r, types.int32(lo))
    put_i32(t.hi + 4 * r, types.int32(hi))
    put_i32(t.positions + 4 * r, types.int32(position))
    put_f32(t.slopes + 4 * r, slope)
    put_f32(t.m + 4 * r, -INF)
    put_f32(t.l + 4 * r, F(0))


@jit
def take_out_strays(t, count, width):
    """Moves every value that is not finite from `values` to the same place in `strays`, which else holds zeros."""
    for at in range(0, 4 * count * width, 4):
        x = get_f32(t.values + at)
        finite = x - x == F(0)
        put_f32(t.strays + at, F(0) if finite else x)
        if not finite:
            put_f32(t.values + at, F(0))


@jit
def sees(p, t, item, r, key):
    """Whether row r of the item sees a key of the tile whose mask states are in `states`."""
    if not get_i32(t.lo + 4 * r) <= key < get_i32(t.hi + 4 * r):
        return False
    state = get_i64(t.states + 8 * (r // item.rows))
    if p.mask == 0 or state == FULL:
        return True
    head = item.head * (p.heads // p.kv_heads) + r // item.rows
    return state != SKIP and mask_cell(p, mask_row(p, item.b, head, item.row + r % item.rows), key) != -INF


@jit
def add_strays(p, t, item, first_row, rows, count, width, origin, key_step, row_step):
    """acc += p * stray, in those of `rows` rows from `first_row` on that see it; steps are those of p, in floats."""
    for r in range(first_row, first_row + rows):
        for j in range(count):
            if not sees(p, t, item, r, origin + j):
                continue
            weight = get_f32(t.s + 4 * (j * key_step + (r - first_row) * row_step))
            for d in range(width):
                stray = get_f32(t.strays + 4 * (j * width + d))
                if stray != F(0):
                    at = t.acc + 4 * (r * width + d)
                    put_f32(at, get_f32(at) + weight * stray)


@jit
def is_shrunk(t):
    """Whether weights are to be times SHRUNK, see there."""
    return get_i64(t.done + 8) != 0


@jit
def scale_scores(p, s, step, count):
    """Dot products to scores: scale and softcap, of `count` vectors `step` floats apart."""
    scale = F(p.scale)
    if p.softcap > 0:
        cap = F(min(p.softcap, LARGEST))
        factor = scale / cap
        if abs(factor) == INF:  # times a dot product of 0 it would be NaN
            factor = F(math.copysign(LARGEST, factor))
        if abs(factor) >= LEAST_FACTOR:
            softcap_cells(s, step, count, factor, cap)
        else:  # times dot products it may leave float32's range
            scale_cells(s, step, count, scale)
            large_softcap_cells(s, step, count, F(1) / cap, cap)
    elif not is_plain(p):
        scale_cells(s, step, count, scale)


@jit
def out_row(p, item, g, i, q_start):
    """Where the output of query i of an item's rows is, for head g of the group."""
    head, b = item.head * (p.heads // p.kv_heads) + g, types.int64(0) if p.cu_q else item.b
    return p.out + b * p.out_b + head * p.out_h + (q_start + item.row + i) * p.out_l


@jit
def finish(p, item, g, i, q_start, acc, m, l):
    """A finished row, query i of head g of the group: the sink, the division, `out` and `lse`."""
    m *= unit(p)
    head, b = item.head * (p.heads // p.kv_heads) + g, types.int64(0) if p.cu_q else item.b
    line = q_start + item.row + i
    factor = F(1)
    if l < F(0):
        l, factor = -l, GROWN
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
