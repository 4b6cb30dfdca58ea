"""Decode mainloop: few query rows, scores [rows, keys], K and V read once and in place.

All rows of a group use a tile of keys while it is in L1; many bf16 rows by AMX. A tile of which some row sees only a
part is first converted to float32 in scratch memory, where non-finite values can be extracted.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from ..codegen import dtypes
from ..codegen.calls import call_pv, call_qk
from ..codegen.load_store import copy_checked, get_i32, put_i64
from ..codegen.numba_ops import ONE, ZERO, F, item_at, jit, params_at, row_to_f32, up
from ..codegen.vector import W
from ..config import DECODE_TILE_KEYS
from ..gemm.fixed_point import are_finite, are_quantised, quantise_queries, query_words
from ..kv_access import (
    KEY_PAD,
    key_source,
    kv_location,
    list_ahead,
    list_scales,
    query_row,
    rows_to_f32,
    sequence,
    value_source,
)
from ..params import WORK_ITEM_BYTES
from ..scratch import PAD, SCORES, TAIL, partition, replacing, table_size
from .decode_products import (
    MATRIX_KEYS,
    add_values,
    in_place_qk,
    keys_of_head,
    multiply_keys,
    pack_queries,
    value_distance,
)
from .decode_softmax import online_softmax
from .mask import SKIP, has_bias, has_bias_or_tree, read_states
from .mods import has_mods, mod_state
from .nonfinite import add_nonfinite, extract_nonfinite
from .rows import init_rows
from .selected_keys import first_key, list_selected, selected_list

W_ = np.int64(W)
LEAST_MATRIX_ROWS = 8  # from this many query rows on AMX is faster: cpu/amx-rows in benchmarks/cpu/LOG.md
BK = np.int64(DECODE_TILE_KEYS)


item_scratch = replacing("acc k_table v_table m l slopes lo hi positions q s packed")


@jit
def scratch_of_item(p, t, n, R, D, Dv):
    """The scratch memory of item n of a head batch: its own rows, scores and addresses, the rest shared."""
    first, table = 4 * n * R, n * table_size(p.tile_keys)
    return item_scratch(t, t.acc + first * Dv, t.k_table + table, t.v_table + table, t.m + first, t.l + first,
                        t.slopes + first, t.lo + first, t.hi + first, t.positions + first, t.q + first * D,
                        t.s + first * SCORES, t.packed + first * D)  # fmt: skip


def decode(params, scratch, address):
    """All keys of the head batch of work items at `address`. The results are m, l and acc [R, Dv] of each item."""
    p, item = params_at(params), item_at(address)
    shared = partition(p, scratch)
    q_start, _, kv_start, kv_len, _ = sequence(p, item.b)
    R = p.heads // p.kv_heads * item.rows
    D, Dv = up(p.head_dim, W), up(p.value_dim, W)
    by_matrix = p.matrix_qk != 0 and (p.bf16_dot != 0 or R >= LEAST_MATRIX_ROWS)
    quantised = dtypes.is_quantised(p.k_dtype) or dtypes.is_quantised(p.v_dtype)
    batched = p.head_batch > 1 and p.qk != 0 and p.pv != 0 and not (by_matrix or quantised or p.mod_rows)
    first, last = ZERO, ZERO
    list_selected(p, shared, item)  # the same for all heads of a batch
    for n in range(p.head_batch):
        item, t = item_at(address + n * WORK_ITEM_BYTES), scratch_of_item(p, shared, n, R, D, Dv)
        for r in range(R):
            row = query_row(p, item, q_start, r // item.rows, r % item.rows)
            row_to_f32(t.q + 4 * r * D, row, p.q_dtype, p.head_dim, D, ZERO, ZERO, ONE)
        if by_matrix:
            pack_queries(p, t, item, q_start, R)
        if p.qk_bf16_dot and not by_matrix:
            for r in range(R):
                row = query_row(p, item, q_start, r // item.rows, r % item.rows)
                copy_checked(t.packed + 2 * r * D, row, p.head_dim // 2)
        if p.dot_qk:
            quantise_queries(t.packed, t.q, R, D, p.k_dtype)
        first, last, _ = init_rows(p, t, item, R, Dv)  # the same for all of them
    start = first_key(p, item)
    tile = start + max(0, first - start) // BK * BK
    while tile < last:
        size = BK if p.mask or has_bias(p) or last - tile > BK + TAIL else BK + TAIL
        origin, end = max(tile, first), min(tile + size, last)
        if batched and all_see(shared, R, origin, end) and not has_bias_or_tree(p, item.b, end):
            decode_head_batch(p, shared, address, kv_start, R, origin, end, last)
        else:
            for n in range(p.head_batch):
                item, t = item_at(address + n * WORK_ITEM_BYTES), scratch_of_item(p, shared, n, R, D, Dv)
                unmasked, skipped = read_states(p, item, t.states, tile, max(end, min(tile + BK, kv_len)))
                if has_mods(p):
                    state = mod_state(p, item, origin, end)
                    put_i64(t.mod_state, state)
                    skipped |= state == SKIP
                    # Scales in hidden cells must not decide how others are multiplied, nor the tile's state.
                    unmasked &= not (p.mod_masks and quantised)
                if not skipped:
                    unmasked &= all_see(t, R, origin, end)
                    at = kv_location(p, item, kv_start, selected_list(p, t))
                    decode_tile(p, t, item, at, R, origin, end, last, unmasked, by_matrix)
        tile += size


@jit
def all_see(t, R, origin, end):
    """Whether all rows see all of these keys by the rules."""
    seen = True
    for r in range(R):
        seen &= get_i32(t.lo + 4 * r) <= origin and get_i32(t.hi + 4 * r) >= end
    return seen


@jit
def decode_head_batch(p, shared, address, kv_start, R, origin, end, last):
    """Keys `origin` to `end` for all heads of a batch, in memory order: some keys of one head, then of the next.

    In a page a token's heads are adjacent. Gain: cpu/head-batch in benchmarks/cpu/LOG.md.
    """
    D, Dv, count = up(p.head_dim, W), up(p.value_dim, W), end - origin
    k, v = key_source(p), value_source(p)
    for n in range(p.head_batch):
        item, t = item_at(address + n * WORK_ITEM_BYTES), scratch_of_item(p, shared, n, R, D, Dv)
        read_states(p, item, t.states, origin, end)  # there is no mask
        at = kv_location(p, item, kv_start, selected_list(p, t))
        list_ahead(p, k, at, t.k_table, origin, count, last, p.prefetch_distance)
        list_ahead(p, v, at, t.v_table, origin, count, last, p.prefetch_distance)
    step = keys_of_head(p)
    for j in range(0, count, step):
        m = up(min(step, count - j), KEY_PAD)
        for n in range(p.head_batch):
            t = scratch_of_item(p, shared, n, R, D, Dv)
            qk, q, ldq, width = in_place_qk(p, t, D)
            rows, s = t.k_table + 8 * j, t.s + 4 * j
            call_qk(qk, q, ldq, R, rows, m, width, s, SCORES, t.k_scales, ZERO, ONE, p.prefetch_distance)
    for n in range(p.head_batch):
        item, t = item_at(address + n * WORK_ITEM_BYTES), scratch_of_item(p, shared, n, R, D, Dv)
        for r in range(R):
            online_softmax(p, t, item, r, origin, count, Dv)
    for j in range(0, count, step):
        for n in range(p.head_batch):
            t = scratch_of_item(p, shared, n, R, D, Dv)
            rows, weights, m = t.v_table + 8 * j, t.s + 4 * j, min(step, count - j)
            call_pv(p.pv, t.acc, Dv, R, rows, m, p.value_dim, weights, SCORES, ZERO, ONE, value_distance(p))


@jit
def decode_tile(p, t, item, at, R, origin, end, last, unmasked, by_matrix):
    """Keys `origin` to `end` of an item that ends at `last`; `unmasked`: all rows see all of them."""
    D, Dv = up(p.head_dim, W), up(p.value_dim, W)
    keys, count = SCORES + PAD, end - origin
    k, v = key_source(p), value_source(p)
    list_ahead(p, k, at, t.k_table, origin, count, last, p.prefetch_distance)
    qk, q, ldq, width = in_place_qk(p, t, D)
    k_distance, pad = p.prefetch_distance, KEY_PAD
    tiled = count // MATRIX_KEYS * MATRIX_KEYS if by_matrix and unmasked else ZERO
    if not unmasked or p.qk == 0:
        rows_to_f32(p, k, at, t.k_table, t.keys, origin, count, PAD)
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
        if online_softmax(p, t, item, r, origin, count, Dv):
            unmasked, tiled = False, ZERO

    pv, width, v_distance, scaled, nonfinite = p.pv, p.value_dim, value_distance(p), dtypes.is_quantised(v.dtype), False
    if p.pv == 0 and p.v_row == 0 and unmasked and p.qk == 0 and p.value_dim == Dv:  # V is in K's converted rows
        pv, v_distance, scaled = p.pv_f32, ZERO, False
        for j in range(count):
            put_i64(t.v_table + 8 * j, t.keys + 4 * j * D)
    elif not unmasked or p.pv == 0:
        bad = rows_to_f32(p, v, at, t.v_table, t.values, origin, count, ONE)
        pv, width, v_distance, scaled, nonfinite = p.pv_f32, Dv, ZERO, False, bad != F(0) and not unmasked
        if nonfinite:
            extract_nonfinite(t, count, Dv)
    elif scaled:
        list_scales(p, v, at, t.v_scales, origin, count, W_, keys)
    add_values(p, t, pv, R, count, width, Dv, keys, scaled, v_distance, tiled)
    if nonfinite:
        add_nonfinite(p, t, item, ZERO, R, count, Dv, origin, ONE, SCORES)
