"""Scores between Q K^T and the softmax: scale, softcap, ALiBi, masks and hidden keys, for W query rows at a time."""

# mypy: ignore-errors
from __future__ import annotations

import math

import numpy as np

from ..codegen import dtypes
from ..codegen.load_store import get_i32, get_i64, transpose
from ..codegen.numba_ops import INF, ONE, ZERO, F, fill, jit, up
from ..codegen.vector import W
from ..kv_access import affine
from .mask import BIASES, FULL, MASKS, has_bias, has_bias_or_tree, last_parts, list_added
from .mods import mods_apply, mods_columns, scale_in_mods
from .nonfinite import is_downscaled
from .score_mod import alibi_column, bias_cells, hide_column, large_softcap_cells, scale_cells, softcap_cells
from .selected_keys import selected_key, selected_list
from .softmax import MAX_FREE_LIMIT, NEVER_MAX_FREE

# Below this scale / cap, which is rounded, costs more than a pass over the scores: cap tanh(s / cap) is s, nearly.
LEAST_FACTOR, LARGEST = F(2.0**-16), float(np.finfo(np.float32).max)


@jit
def scale_scores(p, s, step, count):
    """Applies scale and softcap to dot products: `count` vectors, `step` floats apart."""
    scale = F(p.scale)
    if p.softcap > 0:
        cap = F(min(p.softcap, LARGEST))
        factor = scale / cap
        if abs(factor) == INF:  # 0 * inf would be NaN
            factor = F(math.copysign(LARGEST, factor))
        if abs(factor) >= LEAST_FACTOR:
            softcap_cells(s, step, count, factor, cap)
        else:  # also where the product would overflow float32
            scale_cells(s, step, count, scale)
            large_softcap_cells(s, step, count, F(1) / cap, cap)
    elif not scale_in_softmax(p) and not scale_in_mods(p):
        scale_cells(s, step, count, scale)


@jit
def scale_in_softmax(p):
    """Whether scores stay dot products, which the softmax scales."""
    biased = (p.mask != 0 and p.mask_dtype != dtypes.BOOL) or has_bias(p)
    return not (p.softcap > 0 or p.slopes != 0 or p.scale <= 0 or biased or p.mod_scores)


@jit
def softmax_scale(p):
    """The factor of scores, and of their maximum m, in the softmax: 1 if they are scaled already."""
    return F(p.scale) if scale_in_softmax(p) else F(1)


MAX_FREE_MIN_KEYS = 16


@jit
def max_free_bound(p, t, kv_len):
    """The bound on logits under which a row needs no running max (`max_free.py`); below 0 for never.

    Only if the softmax scales: for other scores subtracting a maximum rounds less. Not for few keys either: with one,
    the maximum is the lse, and the weight exactly 1.
    """
    many = kv_len >= MAX_FREE_MIN_KEYS
    return F(MAX_FREE_LIMIT) if scale_in_softmax(p) and many and not is_downscaled(t) else F(NEVER_MAX_FREE)


@jit
def mask_columns(p, t, item, first, R, key, count, parts):
    """Lists mask and biases, or `parts` of them, of W query rows from `first` on and `count` keys from `key` on, by
    columns. False if there is nothing to add.
    """
    n = item.rows
    needed = has_bias_or_tree(p, item.b, key + count)
    for r in range(first, min(first + W, R)):
        needed |= get_i64(t.states + 8 * (r // n)) != FULL
    if not needed:
        return False
    width = up(count, W)
    for r in range(first, first + W):
        row = t.mask_rows + 4 * (r - first) * width
        if r < R:
            head = item.head * (p.heads // p.kv_heads) + r // n
            at, state = (item.b, head, item.row + r % n), get_i64(t.states + 8 * (r // n))
            list_added(p, at, row, key, count, width, state, selected_list(p, t), parts)
        else:
            fill(row, ZERO, width, F(0))
    for j in range(0, width, W):
        transpose(t.mask_columns + 4 * j * W, W, t.mask_rows + 4 * j, width)
    return True


@jit
def apply_score_mods(p, t, item, s, step, first, R, key, count):
    """All steps before the softmax, for W query rows from `first` on and `count` keys from `key` on.

    Keys are `step` floats apart.
    """
    scale_scores(p, s, step, count)
    bias_scores(p, t, item, s, step, first, R, key, count)


@jit
def bias_scores(p, t, item, s, step, first, R, key, count):
    """The steps after scale and softcap: ALiBi, masks, functions, hidden keys. Returns whether a cell may be hidden."""
    hiding = False
    if p.slopes:
        stride = affine(p, item.b, ZERO).k_stride
        slopes, positions = t.slopes + 4 * first, t.positions + 4 * first
        if p.indices:
            for j in range(count):
                alibi_column(s + 4 * j * step, step, ONE, slopes, positions, selected_key(t.selected, key + j), stride)
        else:
            alibi_column(s, step, count, slopes, positions, key, stride)
    if p.mask or has_bias_or_tree(p, item.b, key + count):
        last = last_parts(p)
        if last == MASKS and mask_columns(p, t, item, first, R, key, count, BIASES):
            bias_cells(s, step, count, t.mask_columns)
            hiding = True
        if mask_columns(p, t, item, first, R, key, count, last):
            bias_cells(s, step, count, t.mask_columns)
            hiding = True
    if (p.mod_scores or p.mod_masks) and mods_apply(p, get_i64(t.mod_state)):
        mods_columns(p, t, item, s, step, first, key, count, hiding)
        hiding = True
    if get_i32(t.all_lo + 4 * (first // W)) > key or get_i32(t.all_hi + 4 * (first // W)) < key + count:
        hide_column(s, step, count, t.lo + 4 * first, t.hi + 4 * first, key)
        hiding = True
    return hiding
