"""The rows of a work item: running max m, row sums l, accumulators, and key spans."""

# mypy: ignore-errors
from __future__ import annotations

from numba import types

from ..codegen.load_store import clear, get_f32, get_i32, put_f32, put_i32
from ..codegen.numba_ops import INF, F, jit
from ..codegen.vector import W
from ..gemm.fp32 import ROWS
from ..kv_access import affine, key_span, sequence
from .mask import mask_span
from .selected_keys import first_key, selected_count, selected_span


@jit
def init_rows(p, t, item, count, Dv):
    """Initialises m, l, acc, spans, positions and slopes of the item's rows, and of padding rows up to `count`.

    Returns the first and last key that any row sees (first >= last if none does), and whether the spans express all of
    the mask. With key indices these are entries of the list.
    """
    _, _, _, kv_len, offset = sequence(p, item.b)
    group, n, positions = p.heads // p.kv_heads, item.rows, affine(p, item.b, offset)
    first, last = selected_count(p, t, item.end), first_key(p, item)
    unmasked = p.mask == 0 or p.spans != 0
    for g in range(group):
        slope = F(0)
        if p.slopes:
            slope = get_f32(p.slopes + item.b * p.slopes_b + (item.head * group + g) * p.slopes_h)
        for i in range(n):
            lo, hi = key_span(p, positions, item.row + i, kv_len)
            if p.spans:
                lo, hi, plain = mask_span(p, item.b, item.head * group + g, item.row + i, lo, hi)
                unmasked &= plain
            if p.indices:
                lo, hi = selected_span(t, item, lo, hi)
            else:
                lo, hi = max(lo, item.start), min(hi, item.end)
            if lo < hi:
                first, last = min(first, lo), max(last, hi)
            else:
                lo, hi = types.int64(0), types.int64(0)
            set_row(t, g * n + i, lo, hi, from_first_key(positions, item.row + i), slope, item.head * group + g)
    for r in range(group * n, count):
        set_row(t, r, types.int64(0), types.int64(0), types.int64(0), F(0), item.head * group)
    clear(t.acc, count * Dv)
    return first, last, unmasked


@jit
def from_first_key(positions, row):
    """The distance of query `row` from the first key."""
    return positions.offset + positions.q_stride * row - positions.k_start


@jit
def set_row(t, r, lo, hi, position, slope, head):
    """Initialises row r: its key span [lo, hi), position, ALiBi slope and query head; m = -inf, l = 0."""
    put_i32(t.lo + 4 * r, types.int32(lo))
    put_i32(t.hi + 4 * r, types.int32(hi))
    put_i32(t.positions + 4 * r, types.int32(position))
    put_i32(t.heads + 4 * r, types.int32(head))
    put_f32(t.slopes + 4 * r, slope)
    put_f32(t.m + 4 * r, -INF)
    put_f32(t.l + 4 * r, F(0))


NO_KEY = 2**31 - 1


@jit
def list_spans(t, rows):
    """The keys that any row of each block of ROWS sees, and that all rows of each vector see; once for all tiles."""
    for i in range(0, rows, ROWS):
        lo, hi = types.int32(NO_KEY), types.int32(0)
        for r in range(i, i + ROWS):
            if get_i32(t.lo + 4 * r) < get_i32(t.hi + 4 * r):
                lo, hi = min(lo, get_i32(t.lo + 4 * r)), max(hi, get_i32(t.hi + 4 * r))
        put_i32(t.some_lo + 4 * (i // ROWS), lo)
        put_i32(t.some_hi + 4 * (i // ROWS), hi)
    for i in range(0, rows, W):
        lo, hi = types.int32(0), types.int32(NO_KEY)
        for r in range(i, i + W):
            lo, hi = max(lo, get_i32(t.lo + 4 * r)), min(hi, get_i32(t.hi + 4 * r))
        put_i32(t.all_lo + 4 * (i // W), lo)
        put_i32(t.all_hi + 4 * (i // W), hi)


@jit
def seen_by_all(t, R):
    """The keys that all of R rows see."""
    lo, hi = types.int32(0), types.int32(NO_KEY)
    for r in range(R):
        lo, hi = max(lo, get_i32(t.lo + 4 * r)), min(hi, get_i32(t.hi + 4 * r))
    return lo, hi


@jit
def sees_all(t, first, end, start, stop):
    """Whether all rows from `first` to `end`, multiples of W, see all keys from `start` to `stop`."""
    for i in range(first // W, end // W):
        if get_i32(t.all_lo + 4 * i) > start or get_i32(t.all_hi + 4 * i) < stop:
            return False
    return True


@jit
def seen_by_some(t, first, end):
    """The keys that any row from `first` to `end` sees; both are multiples of ROWS."""
    lo, hi = types.int32(NO_KEY), types.int32(0)
    for i in range(first // ROWS, end // ROWS):
        lo, hi = min(lo, get_i32(t.some_lo + 4 * i)), max(hi, get_i32(t.some_hi + 4 * i))
    return lo, hi
