"""dQ: a program for each BQ queries of a head, over the keys that they see."""

import triton.language as tl

import triton

from ...gpu.mask_rules import key_position, key_span, query_position, sequence_numbers
from ...gpu.signature import kernel_of
from ..dropout import seed_of
from ..epilogue import empty_acc, has_nonfinite
from ..kv_load import round_type
from .arguments import NAMES, SIZES
from .captured import add_terms, count_loads, empty_terms
from .load import dout_of, k_of, load_rows, load_tile, mask_rows, q_of, row_biases, store_tile, tree_rows
from .places import listed_tiles, mask_plane, packed_tile, plane, row_plane, sequence, tile_of, wide_strides
from .tile import add_product, query_tile


@triton.jit
def query_step(state, t, mixed, rows, keys, cells, dmask_k, rules, S: tl.constexpr):
    """Adds key tile `t` to `state` = (dq, sums for the slopes, sums for dq_bias, sums for loads) of BQ queries; tiles
    are [BQ, BK].
    """
    dq, slopes, sums, loads = state
    _, _, _, _, row, row_ok, _, _, _, _, offset, _, _, _ = rows
    k, n, dl, ds, terms = query_tile(t * S.BK, mixed, None, rows, keys, rules, S)
    if S.dmask == "cells":  # before the product, which is in flight while the next tile begins
        to = (cells + tl.cast(t * S.BK, tl.int64) * dmask_k)[:, None] + tl.arange(0, S.BK)[None, :].to(
            tl.int64
        ) * dmask_k
        if S.tail or S.tail_q:
            tl.store(to, dl.to(cells.dtype.element_ty), mask=row_ok[:, None] & (n < rules[2])[None, :])
        else:
            tl.store(to, dl.to(cells.dtype.element_ty))
    if S.dslopes:
        qpos, kpos = query_position(offset, row, rules[3], S), key_position(n, rules[3], S)
        slopes -= tl.sum(dl * tl.abs(qpos[:, None] - kpos[None, :]).to(tl.float32), 1)
    if S.dq_bias:
        sums += tl.sum(dl, 1)
    if S.dq:
        dq = add_product(dq, ds.to(round_type(S)), k, k_of(S), S)
    return dq, slopes, sums, add_terms(loads, terms)


@kernel_of(NAMES, SIZES, triton.jit)
def query_gradients(a, S):
    BQ: tl.constexpr = S.BQ
    BK: tl.constexpr = S.BK
    q_b, q_h, q_l = wide_strides(a.q_b, a.q_h, a.q_l, S)
    k_b, k_h, k_l = wide_strides(a.k_b, a.k_h, a.k_l, S)
    v_b, v_h, v_l = wide_strides(a.v_b, a.v_h, a.v_l, S)
    do_b, do_h, do_l = wide_strides(a.do_b, a.do_h, a.do_l, S)
    pid = tl.program_id(0)
    if S.guard == "fixup":
        if tl.load(a.FLAGS + pid) == 0:
            return
    if S.varlen:
        head, tile, b, first, slots, owned = packed_tile(pid, a.CU_Q, a.heads, a.batch, a.total_q, BQ)
        if tile * BQ >= slots:
            return
        tile = tl.cdiv(slots, BQ) - 1 - tile  # the last rows of a causal sequence see the most keys
    else:
        tiles = tl.cdiv(a.q_len, BQ)
        at, tile = tile_of(pid, tiles, a.batch * a.heads, a.swizzle)
        tile = tiles - 1 - tile
        b = at // a.heads
        head = at % a.heads
    q_start, q_len, kv_start, n_keys, offset = sequence(
        b, a.CU_Q, a.CU_K, a.KV_LENGTHS, a.Q_OFFSET, a.q_len, a.kv_len, a.q_offset, S
    )
    if S.varlen:  # rows past the last sequence belong to none
        q_start = tl.cast(first, tl.int64)
        q_len = slots
        n_keys = tl.where(owned, n_keys, 0)
    kv_head = head // S.group

    numbers = sequence_numbers(a.rules, a.PLACES, b, S)
    top = query_position(offset, tile * BQ, numbers, S)
    bottom = query_position(offset, tl.minimum(tile * BQ + BQ, q_len) - 1, numbers, S)
    lo, full_hi = key_span(top, n_keys, numbers, S)
    full_lo, hi = key_span(bottom, n_keys, numbers, S)
    if S.tree:
        full_hi = tl.minimum(full_hi, tl.maximum(n_keys - q_len, 0))
    first_t = lo // BK
    last_t = tl.maximum(tl.cdiv(hi, BK), first_t)
    inner = tl.minimum(tl.maximum(tl.cdiv(full_lo, BK), first_t), last_t)
    if tile * BQ + BQ > q_len:
        inner = last_t
    outer = tl.maximum(tl.minimum(full_hi // BK, last_t), inner)
    if S.mask != "" and not S.listed:
        outer = inner

    row = tile * BQ + tl.arange(0, BQ)
    row_ok = row < q_len
    q = load_tile(plane(a.Q, b, head, q_start, q_b, q_h, q_l, S), tile * BQ, q_l, row_ok, q_of(S), S, True)
    dout = load_tile(plane(a.DOUT, b, head, q_start, do_b, do_h, do_l, S), tile * BQ, do_l, row_ok, dout_of(S), S, True)
    slope = 0.0
    if S.alibi:
        slope = tl.load(a.SLOPES + b * a.slopes_b + head)
    mask = a.LSE
    if S.mask != "":
        mask = mask_plane(a.MASK, b, head, a.mask_b, a.mask_h, S)
    at = plane(a.LSE, b, head, q_start, a.lse_b, a.lse_h, a.lse_l, S)
    delta_at = row_plane(a.DELTA, b, head, q_start, a.heads, a.rows, S)
    lse, delta = load_rows(tile * BQ, row_ok, at, a.lse_l, delta_at, S, True)
    at = mask_rows(mask, tile * BQ, a.mask_q, S)
    k_at = plane(a.K, b, kv_head, kv_start, k_b, k_h, k_l, S)
    keys = (k_at, k_l, plane(a.V, b, kv_head, kv_start, v_b, v_h, v_l, S), v_l)
    scale = tl.cast(a.scale, tl.float32)  # the interpreter passes a subnormal float32 as float64
    rules = (scale, a.softcap, n_keys, numbers)
    cells = row
    if S.dmask == "cells":
        cells = mask_plane(a.DMASK, b, head, a.dmask_b, a.dmask_h, S) + row.to(tl.int64) * a.dmask_q  # [BQ]
    biases = (row, row, row)
    if S.biased:
        own = a.LSE
        if S.q_bias:
            own = plane(a.Q_BIAS, b, head, q_start, a.qb_b, a.qb_h, a.qb_l, S)
        keys_at = a.LSE
        if S.k_bias:
            keys_at = plane(a.K_BIAS, b, head, kv_start, a.kb_b, a.kb_h, a.kb_l, S)
        biases = (row_biases(own, row, a.qb_l, row_ok, S), keys_at, a.kb_l)
    tree = (tree_rows(a.TREE, b, a.tree_b, row, a.tree_q, S), n_keys - q_len)
    user, drop = (b, head, a.captured), (seed_of(a.SEED, S), b, head)
    given = (q, dout, lse, delta, row, row_ok, at, slope, biases, tree, offset, a.mask_k, user, drop)
    zeros = tl.zeros([BQ], tl.float32)
    state = (empty_acc(k_of(S), BQ), zeros, zeros, empty_terms(BQ, S))
    if S.listed:
        tiles, first, last = listed_tiles(
            a.LIST, a.RANK, b, head, tile, a.list_b, a.list_h, a.list_q, a.list_n, first_t, last_t, S
        )
        for j in tl.range(first, last):
            entry = tl.load(tiles + j)
            t = entry >> 1
            mixed = ((entry & 1) != 0) | (t < inner) | (t >= outer)
            state = query_step(state, t, mixed, given, keys, cells, a.dmask_k, rules, S)
    else:
        for t in tl.range(first_t, last_t):
            mixed = (t < inner) | (t >= outer)
            state = query_step(state, t, mixed, given, keys, cells, a.dmask_k, rules, S)
    if S.guard == "flag":
        tl.store(a.FLAGS + pid, has_nonfinite(state[0]).to(tl.int32))
    dq, slopes, sums, loads = state
    planes = tl.cast(a.batch, tl.int64) * a.heads * a.rows
    if S.varlen:
        planes = tl.cast(a.heads, tl.int64) * a.rows
    for i in tl.static_range(count_loads(S)):
        to = row_plane(a.LOADS + i * planes, b, head, q_start, a.heads, a.rows, S) + row
        tl.store(to, loads[i], mask=row_ok)
    if S.dq_bias:
        tl.store(row_plane(a.DQ_BIAS, b, head, q_start, a.heads, a.rows, S) + row, sums, mask=row_ok)
    if S.dq:
        store_tile(
            plane(a.DQ, b, head, q_start, a.dq_b, a.dq_h, a.dq_l, S), tile * BQ, a.dq_l, row_ok, dq, scale, q_of(S)
        )
    if S.dslopes:
        tl.store(row_plane(a.DROWS, b, head, q_start, a.heads, a.rows, S) + row, slopes, mask=row_ok)
