"""The softmax of a decode tile, with all options that change or hide scores."""

# mypy: ignore-errors
from __future__ import annotations

import math

import numpy as np

from ..codegen.load_store import get_f32, get_i32, get_i64, put_f32, row_scale
from ..codegen.numba_ops import INF, ZERO, F, fill, jit, up
from ..codegen.vector import W
from ..kv_access import affine
from ..scratch import SCORES
from .dropout import drop_keys_of_row, has_dropout
from .mask import BIASES, FULL, MASKS, SKIP, has_bias_or_tree, last_parts, list_added
from .mods import mods_apply, mods_row
from .nonfinite import DOWNSCALE, is_downscaled
from .score_mod import alibi_row, alibi_strided, bias_cells
from .scores import scale_scores, softmax_scale
from .selected_keys import selected_key, selected_list
from .softmax import LOG2E, exp_row, max_row

W_ = np.int64(W)


@jit
def has_nan(row, lo, hi):
    """Whether one of the scores `lo` to `hi` of a row is NaN."""
    for j in range(lo, hi):
        x = get_f32(row + 4 * j)
        if x != x:
            return True
    return False


@jit
def alibi_cells(p, t, item, r, row, origin, count):
    """Subtracts the ALiBi bias from `count` scores of row r, over keys from `origin` on."""
    slope, position, stride = get_f32(t.slopes + 4 * r), get_i32(t.positions + 4 * r), affine(p, item.b, ZERO).k_stride
    vectors, distance = up(count, W) // W, position - stride * origin
    if p.indices:
        for j in range(count):
            away = F(abs(position - stride * selected_key(t.selected, origin + j)))
            put_f32(row + 4 * j, get_f32(row + 4 * j) - slope * away)
    elif stride == 1:
        alibi_row(row, vectors, slope, distance)
    else:
        alibi_strided(row, vectors, slope, distance, stride)


@jit
def online_softmax(p, t, item, r, origin, count, Dv):
    """Turns one row of scores over `count` keys from `origin` on into softmax weights; rescales the accumulator.

    Returns whether a function of the user hides a cell of it.
    """
    row, m, l = t.s + 4 * r * SCORES, t.m + 4 * r, t.l + 4 * r
    lo, hi = max(get_i32(t.lo + 4 * r) - origin, 0), min(get_i32(t.hi + 4 * r) - origin, count)
    g = r // item.rows
    state = get_i64(t.states + 8 * g)
    if lo >= hi or state == SKIP:
        fill(row, ZERO, count, F(0))
        return False
    vectors, keep, hides = up(count, W) // W, False, False
    scale_scores(p, row, W_, vectors)
    if p.slopes:
        alibi_cells(p, t, item, r, row, origin, count)
    if (p.mask and state != FULL) or has_bias_or_tree(p, item.b, origin + count):
        at = item.b, item.head * (p.heads // p.kv_heads) + g, item.row + r % item.rows
        last = last_parts(p)
        if last == MASKS:
            list_added(p, at, t.mask_rows, origin, count, vectors * W_, state, selected_list(p, t), BIASES)
            bias_cells(row, W, vectors, t.mask_rows)
        list_added(p, at, t.mask_rows, origin, count, vectors * W_, state, selected_list(p, t), last)
        bias_cells(row, W, vectors, t.mask_rows)
        keep = True
    if (p.mod_scores or p.mod_masks) and mods_apply(p, get_i64(t.mod_state)):
        hides = mods_row(p, t, item, r, row, origin, vectors, keep)
    fill(row, ZERO, lo, -INF)
    fill(row, hi, vectors * W, -INF)

    old = get_f32(m)
    new = max(old, max_row(row, vectors))
    if new == -INF:
        if has_nan(row, lo, hi):  # a maximum ignores NaN
            put_f32(m, F(0))
            put_f32(l, F(math.nan))
        fill(row, ZERO, count, F(0))
        return hides
    total = exp_row(row, vectors, softmax_scale(p) * F(LOG2E), new)
    alpha = F(math.exp((old - new) * softmax_scale(p)))
    put_f32(m, new)
    put_f32(l, get_f32(l) * alpha + total)
    if alpha != F(1) and old != -INF:
        row_scale(t.acc + 4 * r * Dv, Dv, alpha)
    if is_downscaled(t):
        row_scale(row, vectors * W, DOWNSCALE)
    if has_dropout(p):
        drop_keys_of_row(p, t, item, r, row, origin, count)
    return hides
