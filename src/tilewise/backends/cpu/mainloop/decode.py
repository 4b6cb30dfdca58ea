"""Decode mainloop: few query rows, scores [rows, keys], K and V read once and in place.

All rows of a group use a tile of keys while it is in the L1 cache; in bf16 many rows do so by AMX tiles. Tiles that
some row sees only in part are widened into scratch first, where non-finite values can be extracted.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import numpy as np

from ..codegen import dtypes
from ..codegen.calls import call_amx, call_pv, call_qk
from ..codegen.load_store import (
    clear,
    get_f32,
    get_i32,
    get_i64,
    put_f32,
    put_i64,
    row_scale,
    row_times,
    transpose,
    widen_f32,
)
from ..codegen.numba_ops import INF, ONE, ZERO, F, fill, item_at, jit, params_at, up, widen_row
from ..codegen.prefetch import prefetch_rows
from ..codegen.vector import W
from ..config import FEW_KEYS
from ..gemm.fixed_point import are_finite, are_quantised, pack_weights, quantise_queries, query_words
from ..gemm.gemv_bf16 import block_rows, pack_pairs
from ..kv_access import (
    KEY_PAD,
    affine,
    key_source,
    list_ahead,
    list_scales,
    place,
    query_row,
    sequence,
    value_source,
    widen_rows,
)
from ..params import WORK_ITEM_BYTES
from ..scratch import CHUNK, PAD, SCORES, TAIL, partition, replacing, table_size
from .chosen import chosen_key, chosen_keys, first_key, list_chosen
from .mask import BIASES, FULL, MASKS, SKIP, has_added, has_bias, last_parts, list_added, read_states
from .nonfinite import DOWNSCALE, add_nonfinite, extract_nonfinite, is_downscaled
from .rows import set_up
from .score_mod import alibi_row, alibi_strided, bias_cells
from .scores import scale_scores, unit
from .softmax import LOG2E, exp_row, max_row

W_, FOUR = np.int64(W), np.int64(4)
TILE_ROWS, TILE_KEYS = np.int64(16), np.int64(32)  # of AMX
LEAST_TILE_ROWS = 8  # query rows from which on it is faster: cpu/amx-rows in benchmarks/cpu/LOG.md
TILE = np.int64(FEW_KEYS)
HEAD_BYTES = np.int64(4096)  # of one head's keys


@jit
def has_nan(row, lo, hi):
    for j in range(lo, hi):
        x = get_f32(row + 4 * j)
        if x != x:
            return True
    return False


@jit
def alibi_cells(p, t, item, r, row, origin, count):
    slope, position, stride = get_f32(t.slopes + 4 * r), get_i32(t.positions + 4 * r), affine(p, item.b, ZERO).k_stride
    vectors, distance = up(count, W) // W, position - stride * origin
    if p.indices:
        for j in range(count):
            away = F(abs(position - stride * chosen_key(t.chosen, origin + j)))
            put_f32(row + 4 * j, get_f32(row + 4 * j) - slope * away)
    elif stride == 1:
        alibi_row(row, vectors, slope, distance)
    else:
        alibi_strided(row, vectors, slope, distance, stride)


@jit
def online_softmax(p, t, item, r, origin, count, Dv):
    """One row of scores over `count` keys from `origin` on becomes softmax weights; the accumulator is rescaled."""
    row, m, l = t.s + 4 * r * SCORES, t.m + 4 * r, t.l + 4 * r
    lo, hi = max(get_i32(t.lo + 4 * r) - origin, 0), min(get_i32(t.hi + 4 * r) - origin, count)
    g = r // item.rows
    state = get_i64(t.states + 8 * g)
    if lo >= hi or state == SKIP:
        fill(row, ZERO, count, F(0))
        return
    vectors = up(count, W) // W
    scale_scores(p, row, W_, vectors)
    if p.slopes:
        alibi_cells(p, t, item, r, row, origin, count)
    if (p.mask and state != FULL) or has_added(p, item.b, origin + count):
        at = item.b, item.head * (p.heads // p.kv_heads) + g, item.row + r % item.rows
        last = last_parts(p)
        if last == MASKS:
            list_added(p, at, t.mask_rows, origin, count, vectors * W_, state, chosen_keys(p, t), BIASES)
            bias_cells(row, W, vectors, t.mask_rows)
        list_added(p, at, t.mask_rows, origin, count, vectors * W_, state, chosen_keys(p, t), last)
        bias_cells(row, W, vectors, t.mask_rows)
    fill(row, ZERO, lo, -INF)
    fill(row, hi, vectors * W, -INF)

    old = get_f32(m)
    new = max(old, max_row(row, vectors))
    if new == -INF:
        if has_nan(row, lo, hi):  # a maximum passes NaN over
            put_f32(m, F(0))
            put_f32(l, F(math.nan))
        fill(row, ZERO, count, F(0))
        return
    total = exp_row(row, vectors, unit(p) * F(LOG2E), new)
    alpha = F(math.exp((old - new) * unit(p)))
    put_f32(m, new)
    put_f32(l, get_f32(l) * alpha + total)
    if alpha != F(1) and old != -INF:
        row_scale(t.acc + 4 * r * Dv, Dv, alpha)
    if is_downscaled(t):
        row_scale(row, vectors * W, DOWNSCALE)


@jit
def pack_queries(p, t, item, q_start, R):
    """Pairs of elements of bf16 queries as AMX wants them: [D / 32, 16 pairs, 16 rows]; or as `gemv_bf16.py` does."""
    words = p.head_dim // 2
    if p.pairs:
        r = 0
        while r < R:
            n = block_rows(R - r)
            for i in range(r, r + n):
                row = query_row(p, item, q_start, i // item.rows, i % item.rows)
                pack_pairs(t.packed + 4 * r * words, row, i - r, n, words)
            r += n
        return
    clear(t.keys, TILE_ROWS * words)
    for r in range(R):
        widen_f32(t.keys + 4 * r * words, query_row(p, item, q_start, r // item.rows, r % item.rows), words)
    for d in range(0, words, W):
        transpose(t.packed + 4 * d * W, W, t.keys + 4 * d, words)


@jit
def multiply_keys(p, t, qk, q, ldq, R, count, pad, width, keys, distance, tiled):
    """s = q k^T; V's first rows are prefetched. The first `tiled` keys go through AMX."""
    prefetch_rows(t.v_table, min(p.prefetch_distance, count), p.v_row)
    if tiled:
        steps = p.head_dim // TILE_KEYS
        call_amx(p.amx_qk, t.s, SCORES, R, t.k_table, tiled, t.packed, steps, t.keys, t.nonfinite, distance)
    if tiled < count:
        n, rows, s, scales = up(count - tiled, pad), t.k_table + 8 * tiled, t.s + 4 * tiled, t.k_scales
        call_qk(qk, q, ldq, R, rows, n, width, s, SCORES, scales, keys, p.k_group, distance)


@jit
def value_distance(p):
    """Rows between the one of V that is multiplied and the one that is prefetched; 0 where K's rows hold it."""
    return p.prefetch_distance if p.v_row else ZERO


@jit
def scale_weights(p, t, R, j, n, keys):
    """Weights of `n` keys from j on with V's scales in them: [groups, R, CHUNK]."""
    groups = (p.value_dim + p.v_group - 1) // p.v_group
    vectors = up(n, W) // W
    for g in range(groups):
        for r in range(R):
            to, scales = t.weights + 4 * (g * R + r) * CHUNK, t.v_scales + 4 * (g * keys + j)
            row_times(to, t.s + 4 * (r * SCORES + j), scales, vectors)


@jit
def quantise_weights(p, t, R, count, keys):
    """Weights with V's scales folded in, as fixed-point limbs [groups, R, SCORES]; False if out of range."""
    for g in range((p.value_dim + p.v_group - 1) // p.v_group):
        for r in range(R):
            to, scales = t.weights + 4 * (g * R + r) * SCORES, t.v_scales + 4 * g * keys
            if not pack_weights(to, t.s + 4 * r * SCORES, scales, up(count, W), SCORES):
                return False
    return True


@jit
def add_values(p, t, pv, R, count, width, Dv, keys, scaled, distance, tiled):
    """acc += p v, in chunks: short sums round less."""
    if tiled:
        call_amx(p.amx_pv, t.acc, Dv, t.s, SCORES, R, t.v_table, tiled, t.values, t.nonfinite, distance)
    if scaled and p.dot_pv and quantise_weights(p, t, R, count, keys):  # exact sums
        fours = up(count, FOUR)
        weights = t.weights
        call_pv(p.dot_pv, t.acc, Dv, R, t.v_table, fours, width, weights, SCORES, R * SCORES, p.v_group, distance)
        return
    step = keys_of_head(p) if p.table and not scaled else CHUNK  # as in `decode_head_batch`
    for j in range(tiled, count, step):
        n = min(step, count - j)
        if scaled:
            scale_weights(p, t, R, j, n, keys)
            call_pv(pv, t.acc, Dv, R, t.v_table + 8 * j, n, width, t.weights, CHUNK, R * CHUNK, p.v_group, distance)
        else:
            call_pv(pv, t.acc, Dv, R, t.v_table + 8 * j, n, width, t.s + 4 * j, SCORES, ZERO, ONE, distance)


item_scratch = replacing("acc k_table v_table m l slopes lo hi positions q s packed")


@jit
def of_item(p, t, n, R, D, Dv):
    """The scratch memory of the n-th item of a head batch: rows, scores and addresses of its own, all else shared."""
    first, table = 4 * n * R, n * table_size(p.tile_keys)
    return item_scratch(t, t.acc + first * Dv, t.k_table + table, t.v_table + table, t.m + first, t.l + first,
                        t.slopes + first, t.lo + first, t.hi + first, t.positions + first, t.q + first * D,
                        t.s + first * SCORES, t.packed + first * D)  # fmt: skip


def decode(params, scratch, address):
    """Decode mainloop: all keys of a head batch of work items at `address`; m, l and acc hold the results."""
    p, item = params_at(params), item_at(address)
    shared = partition(p, scratch)
    q_start, _, kv_start, kv_len, _ = sequence(p, item.b)
    R = p.heads // p.kv_heads * item.rows
    D, Dv = up(p.head_dim, W), up(p.value_dim, W)
    by_amx = p.amx_qk != 0 and (p.pairs != 0 or R >= LEAST_TILE_ROWS)
    quantised = dtypes.is_quantised(p.k_dtype) or dtypes.is_quantised(p.v_dtype)
    together = p.head_batch > 1 and p.qk != 0 and p.pv != 0 and not (by_amx or quantised)
    first, last = ZERO, ZERO
    list_chosen(p, shared, item)  # the same for all heads of a batch
    for n in range(p.head_batch):
        item, t = item_at(address + n * WORK_ITEM_BYTES), of_item(p, shared, n, R, D, Dv)
        for r in range(R):
            row = query_row(p, item, q_start, r // item.rows, r % item.rows)
            widen_row(t.q + 4 * r * D, row, p.q_dtype, p.head_dim, D, ZERO, ZERO, ONE)
        if by_amx:
            pack_queries(p, t, item, q_start, R)
        if p.qk_pairs and not by_amx:
            for r in range(R):
                row = query_row(p, item, q_start, r // item.rows, r % item.rows)
                widen_f32(t.packed + 2 * r * D, row, p.head_dim // 2)
        if p.dot_qk:
            quantise_queries(t.packed, t.q, R, D, p.k_dtype)
        first, last, _ = set_up(p, t, item, R, Dv)  # the same for all of them
    start = first_key(p, item)
    tile = start + max(0, first - start) // TILE * TILE
    while tile < last:
        size = TILE if p.mask or has_bias(p) or last - tile > TILE + TAIL else TILE + TAIL
        origin, end = max(tile, first), min(tile + size, last)
        if together and all_see(shared, R, origin, end) and not has_added(p, item.b, end):
            decode_head_batch(p, shared, address, kv_start, R, origin, end, last)
        else:
            for n in range(p.head_batch):
                item, t = item_at(address + n * WORK_ITEM_BYTES), of_item(p, shared, n, R, D, Dv)
                unmasked, nothing = read_states(p, item, t.states, tile, max(end, min(tile + TILE, kv_len)))
                if not nothing:
                    unmasked &= all_see(t, R, origin, end)
                    decode_tile(
                        p, t, item, place(p, item, kv_start, chosen_keys(p, t)), R, origin, end, last, unmasked, by_amx
                    )
        tile += size


@jit
def all_see(t, R, origin, end):
    """Whether rules leave all of these keys to all rows."""
    seen = True
    for r in range(R):
        seen &= get_i32(t.lo + 4 * r) <= origin and get_i32(t.hi + 4 * r) >= end
    return seen


@jit
def plain_qk(p, t, D):
    """What multiplies keys as they lie: the function, its queries, the length of their rows, its width."""
    if p.qk_pairs:
        return p.qk_pairs, t.packed, D // 2, p.head_dim // 2
    return p.qk, t.q, D, p.head_dim


@jit
def keys_of_head(p):
    """Keys of a page that are multiplied for one head before the next one's turn: as many as 4 KiB hold, 8 to 48."""
    return min(max(HEAD_BYTES // p.k_row // KEY_PAD * KEY_PAD, KEY_PAD), CHUNK)


@jit
def decode_head_batch(p, shared, address, kv_start, R, origin, end, last):
    """A tile of pages for all heads of a batch, in the order of memory: a few keys of one head, then of the next.

    A page has a token's heads side by side. Gain: cpu/head-batch in benchmarks/cpu/LOG.md.
    """
    D, Dv, count = up(p.head_dim, W), up(p.value_dim, W), end - origin
    k, v = key_source(p), value_source(p)
    for n in range(p.head_batch):
        item, t = item_at(address + n * WORK_ITEM_BYTES), of_item(p, shared, n, R, D, Dv)
        read_states(p, item, t.states, origin, end)  # there is no mask
        at = place(p, item, kv_start, chosen_keys(p, t))
        list_ahead(p, k, at, t.k_table, origin, count, last, p.prefetch_distance)
        list_ahead(p, v, at, t.v_table, origin, count, last, p.prefetch_distance)
    step = keys_of_head(p)
    for j in range(0, count, step):
        m = up(min(step, count - j), KEY_PAD)
        for n in range(p.head_batch):
            t = of_item(p, shared, n, R, D, Dv)
            qk, q, ldq, width = plain_qk(p, t, D)
            rows, s = t.k_table + 8 * j, t.s + 4 * j
            call_qk(qk, q, ldq, R, rows, m, width, s, SCORES, t.k_scales, ZERO, ONE, p.prefetch_distance)
    for n in range(p.head_batch):
        item, t = item_at(address + n * WORK_ITEM_BYTES), of_item(p, shared, n, R, D, Dv)
        for r in range(R):
            online_softmax(p, t, item, r, origin, count, Dv)
    for j in range(0, count, step):
        for n in range(p.head_batch):
            t = of_item(p, shared, n, R, D, Dv)
            rows, weights, m = t.v_table + 8 * j, t.s + 4 * j, min(step, count - j)
            call_pv(p.pv, t.acc, Dv, R, rows, m, p.value_dim, weights, SCORES, ZERO, ONE, value_distance(p))


@jit
def decode_tile(p, t, item, at, R, origin, end, last, unmasked, by_amx):
    """Keys `origin` to `end` of an item that goes on to `last`; `unmasked`: all rows see all of them."""
    D, Dv = up(p.head_dim, W), up(p.value_dim, W)
    keys, count = SCORES + PAD, end - origin
    k, v = key_source(p), value_source(p)
    list_ahead(p, k, at, t.k_table, origin, count, last, p.prefetch_distance)
    qk, q, ldq, width = plain_qk(p, t, D)
    k_distance, pad = p.prefetch_distance, KEY_PAD
    tiled = count // TILE_KEYS * TILE_KEYS if by_amx and unmasked else ZERO
    if not unmasked or p.qk == 0:
        widen_rows(p, k, at, t.k_table, t.keys, origin, count, PAD)
        qk, q, ldq, width, k_distance = p.qk_f32, t.q, D, D, ZERO
    elif dtypes.is_quantised(k.dtype):
        list_scales(p, k, at, t.k_scales, origin, count, W_, keys)
        if (
            p.dot_qk
            and are_quantised(t.packed, D)
            and are_finite(t.k_scales, keys, count, (D + p.k_group - 1) // p.k_group)
        ):
            qk, q, ldq, pad = p.dot_qk, t.packed, query_words(D), W_
    list_ahead(p, v, at, t.v_table, origin, count, last, p.prefetch_distance)
    multiply_keys(p, t, qk, q, ldq, R, count, pad, width, keys, k_distance, tiled)

    for r in range(R):
        online_softmax(p, t, item, r, origin, count, Dv)

    pv, width, v_distance, scaled, nonfinite = (
        p.pv,
        p.value_dim,
        value_distance(p),
        dtypes.is_quantised(v.dtype),
        False,
    )
    if p.pv == 0 and p.v_row == 0 and unmasked and p.qk == 0 and p.value_dim == Dv:  # in K's widened rows
        pv, v_distance, scaled = p.pv_f32, ZERO, False
        for j in range(count):
            put_i64(t.v_table + 8 * j, t.keys + 4 * j * D)
    elif not unmasked or p.pv == 0:
        bad = widen_rows(p, v, at, t.v_table, t.values, origin, count, ONE)
        pv, width, v_distance, scaled, nonfinite = p.pv_f32, Dv, ZERO, False, bad != F(0) and not unmasked
        if nonfinite:
            extract_nonfinite(t, count, Dv)
    elif scaled:
        list_scales(p, v, at, t.v_scales, origin, count, W_, keys)
    add_values(p, t, pv, R, count, width, Dv, keys, scaled, v_distance, tiled)
    if nonfinite:
        add_nonfinite(p, t, item, ZERO, R, count, Dv, origin, ONE, SCORES)
