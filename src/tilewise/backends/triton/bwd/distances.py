"""Gradients of captured tensors whose index is made of q - k: a program for each BK distances sums over their cells.

Distance number x of a sequence is that of query i and key j with x = i - j + n_keys - 1. For BQ queries, BK distances
are in BQ + BK - 1 keys, of which a cell (i, j) has the same distance whatever the queries: so cells are added tile by
tile, and diagonals once, at the end.
"""

import triton.language as tl

import triton

from ...gpu.mask_rules import key_span, query_position, sequence_numbers
from ...gpu.signature import kernel_of
from ..dropout import seed_of
from .arguments import NAMES, SIZES
from .captured import count_loads
from .load import dout_of, load_rows, load_tile, mask_rows, q_of, row_biases, tree_rows
from .places import mask_plane, plane, row_plane, sequence, wide_strides
from .tile import query_tile


@triton.jit
def add_tile(acc, upper, lower, S: tl.constexpr):
    """Adds loads' gradients of two tiles of keys side by side to `acc`: of the first the cells on and above the
    diagonal, of the second those below it.
    """
    above = tl.arange(0, S.BK)[None, :] >= tl.arange(0, S.BQ)[:, None]
    added = ()
    for i in tl.static_range(count_loads(S)):
        added = added + (acc[i] + tl.where(above, upper[i], lower[i]),)
    return added


@kernel_of(NAMES, SIZES, triton.jit)
def distance_gradients(a, S):
    BQ: tl.constexpr = S.BQ
    BK: tl.constexpr = S.BK
    q_b, q_h, q_l = wide_strides(a.q_b, a.q_h, a.q_l, S)
    k_b, k_h, k_l = wide_strides(a.k_b, a.k_h, a.k_l, S)
    v_b, v_h, v_l = wide_strides(a.v_b, a.v_h, a.v_l, S)
    do_b, do_h, do_l = wide_strides(a.do_b, a.do_h, a.do_l, S)
    tiles = tl.cdiv(a.q_len + a.kv_len, BK)
    pid = tl.program_id(0)
    x0 = pid % tiles * BK
    head = pid // tiles % a.heads
    b = pid // tiles // a.heads
    q_start, q_len, kv_start, n_keys, offset = sequence(
        b, a.CU_Q, a.CU_K, a.KV_LENGTHS, a.Q_OFFSET, a.q_len, a.kv_len, a.q_offset, S
    )
    slots = a.q_len + a.kv_len  # of the sequence in the sums, perhaps more than it has distances
    if S.varlen:
        slots = q_len + tl.load(a.CU_K + b + 1) - tl.load(a.CU_K + b)
    kv_head = head // S.group
    numbers = sequence_numbers(a.rules, a.PLACES, b, S)
    rules = (tl.cast(a.scale, tl.float32), a.softcap, n_keys, numbers)
    slope = 0.0
    if S.alibi:
        slope = tl.load(a.SLOPES + b * a.slopes_b + head)
    q_at = plane(a.Q, b, head, q_start, q_b, q_h, q_l, S)
    dout_at = plane(a.DOUT, b, head, q_start, do_b, do_h, do_l, S)
    lse_at = plane(a.LSE, b, head, q_start, a.lse_b, a.lse_h, a.lse_l, S)
    delta_at = row_plane(a.DELTA, b, head, q_start, a.heads, a.rows, S)
    k_at = plane(a.K, b, kv_head, kv_start, k_b, k_h, k_l, S)
    keys = (k_at, k_l, plane(a.V, b, kv_head, kv_start, v_b, v_h, v_l, S), v_l)
    seed = seed_of(a.SEED, S)
    acc = ()
    for _ in tl.static_range(count_loads(S)):
        acc = acc + (tl.zeros([BQ, BK], tl.float32),)
    first = n_keys - x0 - BK  # the first key of tile 0
    t_lo = tl.maximum(0, -(first + 2 * BK - 1)) // BQ
    t_hi = tl.minimum(tl.cdiv(q_len, BQ), tl.cdiv(tl.maximum(n_keys - first, 0), BQ))
    for t in tl.range(t_lo, t_hi, num_stages=1):
        n0 = first + t * BQ
        top = query_position(offset, t * BQ, numbers, S)
        bottom = query_position(offset, tl.minimum(t * BQ + BQ, q_len) - 1, numbers, S)
        lo = key_span(top, n_keys, numbers, S)[0]
        hi = key_span(bottom, n_keys, numbers, S)[1]
        if (n0 < hi) & (n0 + 2 * BK > lo):
            row = t * BQ + tl.arange(0, BQ)
            row_ok = row < q_len
            q = load_tile(q_at, t * BQ, q_l, row_ok, q_of(S), S, True)
            dout = load_tile(dout_at, t * BQ, do_l, row_ok, dout_of(S), S, True)
            lse, delta = load_rows(t * BQ, row_ok, lse_at, a.lse_l, delta_at, S, True)
            at = row
            if S.mask != "":
                at = mask_rows(mask_plane(a.MASK, b, head, a.mask_b, a.mask_h, S), t * BQ, a.mask_q, S)
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
            user = (b, head, a.captured)
            drop = (seed, b, head)
            given = (q, dout, lse, delta, row, row_ok, at, slope, biases, tree, offset, a.mask_k, user, drop)
            upper = query_tile(n0, True, None, given, keys, rules, S)[4]
            lower = query_tile(n0 + BK, True, None, given, keys, rules, S)[4]
            acc = add_tile(acc, upper, lower, S)
    c = tl.arange(0, BK)[None, :]
    across = (tl.arange(0, BQ)[:, None] + BK - 1 - c) % BK  # the key of distance x0 + c in each row
    x = x0 + tl.arange(0, BK)
    planes = tl.cast(a.batch, tl.int64) * a.heads * (a.q_len + a.kv_len)
    total = a.q_len + a.kv_len
    if S.varlen:
        total = a.total_q + a.total_k
        planes = tl.cast(a.heads, tl.int64) * total
    for i in tl.static_range(count_loads(S)):
        to = row_plane(a.LOADS + i * planes, b, head, q_start + kv_start, a.heads, total, S) + x
        tl.store(to, tl.sum(tl.gather(acc[i], across, 1), 0), mask=x < slots)
