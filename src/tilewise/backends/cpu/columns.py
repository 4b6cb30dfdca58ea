"""Scores by columns: W query rows side by side, one key under the other. What the blocked and tiled walks share."""

# mypy: ignore-errors
from __future__ import annotations

from numba import types

from .access import INF, ZERO, F, fill, is_plain, jit, up
from .gemm import ROWS
from .masks import FULL, SKIP, list_mask, mask_row
from .micro import get_i32, get_i64, put_i32, transpose
from .rows import is_shrunk, scale_scores
from .simd import W
from .softmax import MOST, NEVER, alibi_column, bias_cells, hide_column

NO_KEY = 2**31 - 1
LEAST_KEYS = 16


@jit
def list_spans(t, rows):
    """Keys that some row of each block of ROWS sees, and that all rows of each vector see: the same for every tile."""
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
    """The keys that every one of R rows sees."""
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
    """The keys that some row from `first` to `end` sees; both are multiples of ROWS."""
    lo, hi = types.int32(NO_KEY), types.int32(0)
    for i in range(first // ROWS, end // ROWS):
        lo, hi = min(lo, get_i32(t.some_lo + 4 * i)), max(hi, get_i32(t.some_hi + 4 * i))
    return lo, hi


@jit
def calm_bound(p, t, kv_len):
    """How large scores may be for nothing to be subtracted from them (`calm.py`), below 0 for never.

    Only of plain dot products: others have a maximum subtracted, which rounds less. And not of a few keys: of one, the
    maximum is the lse, and the weight is 1.
    """
    return F(MOST) if is_plain(p) and kv_len >= LEAST_KEYS and not is_shrunk(t) else F(NEVER)


@jit
def mask_columns(p, t, item, first, R, key, count):
    """The mask of W query rows from `first` on and `count` keys from `key` on, by columns. False if it adds nothing."""
    n = item.rows
    needed = False
    for r in range(first, min(first + W, R)):
        needed |= get_i64(t.states + 8 * (r // n)) != FULL
    if not needed:
        return False
    width = up(count, W)
    for r in range(first, first + W):
        row = t.mask_rows + 4 * (r - first) * width
        state = get_i64(t.states + 8 * (r // n)) if r < R else FULL
        if state == FULL:
            fill(row, ZERO, width, F(0))
        elif state == SKIP:
            fill(row, ZERO, width, -INF)
        else:
            head = item.head * (p.heads // p.kv_heads) + r // n
            list_mask(p, mask_row(p, item.b, head, item.row + r % n), row, key, count, width)
    for j in range(0, width, W):
        transpose(t.mask_columns + 4 * j * W, W, t.mask_rows + 4 * j, width)
    return True


@jit
def shape_scores(p, t, item, s, step, first, R, key, count):
    """Dot products of W query rows from `first` on and `count` keys from `key` on: all that comes before the softmax.

    From key to key it is `step` floats.
    """
    scale_scores(p, s, step, count)
    if p.slopes:
        alibi_column(s, step, count, t.slopes + 4 * first, t.positions + 4 * first, key)
    if p.mask and mask_columns(p, t, item, first, R, key, count):
        bias_cells(s, step, count, t.mask_columns)
    if get_i32(t.all_lo + 4 * (first // W)) > key or get_i32(t.all_hi + 4 * (first // W)) < key + count:
        hide_column(s, step, count, t.lo + 4 * first, t.hi + 4 * first, key)
