"""A tile of the backward pass: its rows, the rows that see each block of keys, and P and dS from s and dP."""

# mypy: ignore-errors
from __future__ import annotations

from collections import namedtuple

import numpy as np

from ..codegen.load_store import clear, get_f32, get_i64, put_f32, put_i64
from ..codegen.numba_ops import INF, ONE, ZERO, F, jit, up
from ..codegen.vector import W
from ..gemm.fp32 import KEYS, PANEL, ROWS, WHOLE_ROWS
from ..kv_access import affine, key_span, sequence
from .backward_cells import add_distances, multiply_cells, probs_full, probs_masked, softcap_derivative
from .backward_mask import add_bias, add_mask
from .backward_mods import add_loads
from .backward_selected import hide_unselected
from .dropout import has_dropout, probs_of_columns
from .mask import mask_span
from .rows import from_first_key, list_spans, seen_by_some, set_row
from .scores import LARGEST, bias_scores, scale_scores
from .selected_keys import first_entry, selected_key

W_ = np.int64(W)
# Rows `row` to `row + rows` of each head of a group, and keys `start` to `end`, block `block` of them; with indices,
# keys may be entries of the tile's list (`backward_selected.py`)
Tile = namedtuple("Tile", "b head row rows start end block")


@jit
def init_tile_rows(p, g, t, tile, R):
    """Spans, positions, slopes, lse (m) and delta (l) of a tile's rows. Rows whose lse is infinite see nothing."""
    q_start, _, _, kv_len, offset = sequence(p, tile.b)
    group, n, positions = p.heads // p.kv_heads, tile.rows, affine(p, tile.b, offset)
    b = ZERO if p.cu_q else tile.b
    for h in range(group):
        head, slope = tile.head * group + h, F(0)
        if p.slopes:
            slope = get_f32(p.slopes + tile.b * p.slopes_b + head * p.slopes_h)
        lses = p.lse + b * p.lse_b + head * p.lse_h
        deltas = g.delta + b * g.delta_b + head * g.delta_h
        for i in range(n):
            token = q_start + tile.row + i
            lo, hi = key_span(p, positions, tile.row + i, kv_len)
            if p.spans:
                lo, hi, _ = mask_span(p, tile.b, head, tile.row + i, lo, hi)
            if p.indices:
                lo, hi = first_entry(t, tile.end, lo), first_entry(t, tile.end, hi)
            else:
                lo, hi = max(lo, tile.start), min(hi, tile.end)
            lse = get_f32(lses + token * p.lse_l)
            if lo >= hi or abs(lse) == INF:
                lo, hi = ZERO, ZERO
            set_row(t, h * n + i, lo, hi, from_first_key(positions, tile.row + i), slope, head)
            put_f32(t.m + 4 * (h * n + i), lse)
            put_f32(t.l + 4 * (h * n + i), get_f32(deltas + token * g.delta_l))
    for r in range(R, up(R, PANEL)):
        set_row(t, r, ZERO, ZERO, ZERO, F(0), tile.head * group)
    list_spans(t, up(R, PANEL))


@jit
def list_blocks(t, tile, R, count):
    """For each block of KEYS keys, the first to the last row that sees any of it, in blocks of ROWS."""
    for k in range(0, count, KEYS):
        first, last = R, ZERO
        for i in range(0, R, ROWS):
            lo, hi = seen_by_some(t, i, i + ROWS)
            if lo < tile.start + k + KEYS and hi > tile.start + k:
                first, last = min(first, i), i + ROWS
        put_i64(t.first_row + 8 * (k // KEYS), first)
        put_i64(t.last_row + 8 * (k // KEYS), last)


@jit
def differentiate(p, g, t, tile, R, ld, count, factor):
    """Turns dot products s and dP into P and dS, and adds to the gradients of the mask and of ALiBi slopes.

    `factor`: what scores are still to be multiplied by (`softmax_scale`).
    """
    cap = F(min(p.softcap, LARGEST))
    clear(t.distances, up(R, WHOLE_ROWS))
    for first in range(0, up(R, WHOLE_ROWS), W):
        k0, k1 = count, ZERO
        for k in range(0, count, KEYS):
            if get_i64(t.first_row + 8 * (k // KEYS)) < first + W and get_i64(t.last_row + 8 * (k // KEYS)) > first:
                k0, k1 = min(k0, k), min(count, k + KEYS)
        if k0 >= k1:
            continue
        at, n, key = 4 * (k0 * ld + first), k1 - k0, tile.start + k0
        s, ds, m, l = t.s + at, t.ds + at, t.m + 4 * first, t.l + 4 * first
        scale_scores(p, s, ld, n)
        if p.softcap > 0:
            softcap_derivative(s, t.dcap + at, ld, n, cap)
        hiding = bias_scores(p, t, tile, s, ld, first, R, key, n)
        if p.indices:
            hiding |= hide_unselected(p, t, tile, s, ld, first, key, n)
        if has_dropout(p):
            probs_of_columns(p, t, tile, s, ds, ld, first, key, n, factor)
        elif hiding:
            probs_masked(s, ds, ld, n, m, l, factor)
        else:
            probs_full(s, ds, ld, n, m, l, factor)
        if g.load_count:
            add_loads(p, g, t, tile, ds, ld, first, R, key, n)
        if g.by_score:
            multiply_cells(ds, ld, t.derivatives, p.mod_vectors * W_, n)
        if g.dslopes:
            stride, sums, positions = affine(p, tile.b, ZERO).k_stride, t.distances + 4 * first, t.positions + 4 * first
            if p.indices:
                for j in range(n):
                    add_distances(ds + 4 * j * ld, ld, ONE, sums, positions, selected_key(t.selected, key + j), stride)
            else:
                add_distances(ds, ld, n, sums, positions, key, stride)
        if g.dq_bias or g.dk_bias:
            add_bias(p, g, t, tile, ds, ld, first, R, key, n)
        if g.dmask:
            add_mask(p, g, t, tile, ds, ld, first, R, key, n)
        if p.softcap > 0:
            multiply_cells(ds, ld, t.dcap + at, ld, n)
    if g.dslopes:
        for r in range(R):
            to = t.slope_sums + 4 * (r // tile.rows)
            put_f32(to, get_f32(to) + get_f32(t.distances + 4 * r))
