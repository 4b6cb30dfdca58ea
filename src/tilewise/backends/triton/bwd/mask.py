"""The gradient of a broadcast mask: a program for each of its tiles sums over all that share it, in order."""

import triton.language as tl

import triton

from ...gpu.mask_rules import key_span, query_position, sequence_numbers
from ...gpu.signature import kernel_of
from ..dropout import seed_of
from .arguments import NAMES, SIZES
from .load import dout_of, load_bias, load_rows, load_tile, mask_rows, q_of, row_biases, tree_rows
from .places import mask_plane, plane, row_plane, sequence, wide_strides
from .tile import query_tile


@triton.constexpr_function
def is_summed(spec, dim):
    return spec.summed[dim]


@kernel_of(NAMES, SIZES, triton.jit)
def mask_gradients(a, S):
    BQ: tl.constexpr = S.BQ
    BK: tl.constexpr = S.BK
    q_b, q_h, q_l = wide_strides(a.q_b, a.q_h, a.q_l, S)
    k_b, k_h, k_l = wide_strides(a.k_b, a.k_h, a.k_l, S)
    v_b, v_h, v_l = wide_strides(a.v_b, a.v_h, a.v_l, S)
    do_b, do_h, do_l = wide_strides(a.do_b, a.do_h, a.do_l, S)
    pid = tl.program_id(0)
    own_k = pid % a.tiles_k
    own_q = pid // a.tiles_k % a.tiles_q
    own_head = pid // a.tiles_k // a.tiles_q % a.mask_heads
    own_b = pid // a.tiles_k // a.tiles_q // a.mask_heads
    first_b, count_b = own_b, 1
    if is_summed(S, 0):
        first_b, count_b = own_b * 0, a.batch
    count_h = 1
    if is_summed(S, 1):
        count_h = a.heads
    # All that a program sums over shares the same mask cells: a broadcast dim has a stride of 0.
    own_row = own_q * BQ + tl.arange(0, BQ)
    own_n = own_k * BK + tl.arange(0, BK)
    own_ok = (own_row < a.q_len)[:, None] & (own_n < a.kv_len)[None, :]
    cells = mask_rows(mask_plane(a.MASK, own_b, own_head, a.mask_b, a.mask_h, S), own_q * BQ, a.mask_q, S)
    bias = load_bias(cells[:, None], own_n[None, :], a.mask_k, own_ok, S)
    # Sequences of the same size share one loop, in which loads are pipelined ahead of the products.
    seed = seed_of(a.SEED, S)
    together = count_b
    if S.varlen or S.rules.lengths or S.rules.offset == "rows" or S.rules.affine == "rows":
        together = 1
    acc = tl.zeros([BQ, BK], tl.float32)
    for b0 in tl.range(first_b, first_b + count_b, together, num_stages=1):
        q_start, n_rows, kv_start, n_keys, offset = sequence(
            b0, a.CU_Q, a.CU_K, a.KV_LENGTHS, a.Q_OFFSET, a.q_len, a.kv_len, a.q_offset, S
        )
        first_q, last_q = own_q, tl.minimum(own_q + 1, tl.cdiv(n_rows, BQ))
        if is_summed(S, 2):
            first_q, last_q = own_q * 0, tl.cdiv(n_rows, BQ)
        numbers = sequence_numbers(a.rules, a.PLACES, b0, S)
        rules = (tl.cast(a.scale, tl.float32), a.softcap, n_keys, numbers)
        for tile in tl.range(first_q, last_q, num_stages=1):
            row = tile * BQ + tl.arange(0, BQ)
            row_ok = row < n_rows
            top = query_position(offset, tile * BQ, numbers, S)
            bottom = query_position(offset, tl.minimum(tile * BQ + BQ, n_rows) - 1, numbers, S)
            lo = key_span(top, n_keys, numbers, S)[0]
            hi = key_span(bottom, n_keys, numbers, S)[1]
            first_t, last_t = lo // BK, tl.cdiv(hi, BK)
            if not is_summed(S, 3):
                first_t, last_t = tl.maximum(first_t, own_k), tl.minimum(last_t, own_k + 1)
            tiles = tl.maximum(last_t - first_t, 0)
            for i in tl.range(0, together * count_h * tiles):
                t = first_t
                if is_summed(S, 3):
                    t = first_t + i % tiles
                    i = i // tiles
                head = own_head
                if is_summed(S, 1):
                    head = i % a.heads
                    i = i // a.heads
                b = b0 + i
                kv_head = head // S.group
                slope = 0.0
                if S.alibi:
                    slope = tl.load(a.SLOPES + b * a.slopes_b + head)
                at = plane(a.Q, b, head, q_start, q_b, q_h, q_l, S)
                q = load_tile(at, tile * BQ, q_l, row_ok, q_of(S), S, S.tail_q)
                at = plane(a.DOUT, b, head, q_start, do_b, do_h, do_l, S)
                dout = load_tile(at, tile * BQ, do_l, row_ok, dout_of(S), S, S.tail_q)
                at = plane(a.LSE, b, head, q_start, a.lse_b, a.lse_h, a.lse_l, S)
                delta_at = row_plane(a.DELTA, b, head, q_start, a.heads, a.rows, S)
                lse, delta = load_rows(tile * BQ, row_ok, at, a.lse_l, delta_at, S, S.tail_q)
                k_at = plane(a.K, b, kv_head, kv_start, k_b, k_h, k_l, S)
                keys = (k_at, k_l, plane(a.V, b, kv_head, kv_start, v_b, v_h, v_l, S), v_l)
                biases = (row, row, row)
                if S.biased:
                    own = a.LSE
                    if S.q_bias:
                        own = plane(a.Q_BIAS, b, head, q_start, a.qb_b, a.qb_h, a.qb_l, S)
                    keys_at = a.LSE
                    if S.k_bias:
                        keys_at = plane(a.K_BIAS, b, head, kv_start, a.kb_b, a.kb_h, a.kb_l, S)
                    biases = (row_biases(own, row, a.qb_l, row_ok, S), keys_at, a.kb_l)
                tree = (tree_rows(a.TREE, b, a.tree_b, row, a.tree_q, S), n_keys - n_rows)
                user = (b, head, a.captured)
                drop = (seed, b, head)
                given = (q, dout, lse, delta, row, row_ok, row, slope, biases, tree, offset, a.mask_k, user, drop)
                acc += query_tile(t * BK, True, bias, given, keys, rules, S)[2]

    row = own_row[:, None]
    n = own_n[None, :]
    if is_summed(S, 2):
        acc = tl.sum(acc, 0, keep_dims=True)
        row = own_q + tl.zeros([1, 1], tl.int32)
    if is_summed(S, 3):
        acc = tl.sum(acc, 1, keep_dims=True)
        n = own_k + tl.zeros([1, 1], tl.int32)
    to = mask_plane(a.DMASK, own_b, own_head, a.dmask_b, a.dmask_h, S)
    to += row.to(tl.int64) * a.dmask_q + n.to(tl.int64) * a.dmask_k
    tl.store(to, acc.to(a.DMASK.dtype.element_ty), mask=(row < a.q_len) & (n < a.kv_len))
