"""dK and dV: a program for each BK keys of a KV head, over the queries of its group that see them."""

import triton.language as tl

import triton

from ...gpu.mask_rules import query_position, query_span, sequence_numbers
from ...gpu.signature import kernel_of
from ..dropout import kept_cells, seed_of
from ..epilogue import empty_acc, has_nonfinite
from .arguments import NAMES, SIZES
from .captured import add_terms, count_loads, empty_terms
from .load import (
    dout_of,
    k_of,
    load_bias,
    load_numbers,
    load_rows,
    load_tile,
    mask_rows,
    q_of,
    row_biases,
    store_tile,
    tree_rows,
    v_of,
)
from .places import listed_tiles, mask_plane, packed_tile, plane, row_plane, sequence, tile_of, wide_strides
from .tile import add_product, outer_product, tile_gradients


@triton.jit
def key_step(state, t, mixed, k, v, n, key_ok, rows, rules, S: tl.constexpr):
    """Adds query tile `t` of a head to `state` = (dk, dv, sums for dk_bias, sums for loads) of BK keys; tiles are
    [BK, BQ].
    """
    dk, dv, sums, loads = state
    Q, q_l, DOUT, do_l, LSE, lse_l, DELTA, MASK, mask_q, mask_k, slope, biases, tree, offset, q_len, user, drop = rows
    BQ: tl.constexpr = S.BQ
    row = t * BQ + tl.arange(0, BQ)
    row_ok = row < q_len
    q = load_tile(Q, t * BQ, q_l, row_ok, q_of(S), S, S.tail_q)  # [BQ, D] in chunks of columns
    dout = load_tile(DOUT, t * BQ, do_l, row_ok, dout_of(S), S, S.tail_q)  # [BQ, Dv], likewise
    lse, delta = load_rows(t * BQ, row_ok, LSE, lse_l, DELTA, S, S.tail_q)  # [BQ]
    at = mask_rows(MASK, t * BQ, mask_q, S)
    ok = key_ok[:, None] & row_ok[None, :]
    bias = at
    if S.mask == "float":
        bias = load_bias(at[None, :], tl.arange(0, S.BK)[:, None], mask_k, ok, S)
    s = outer_product(k, q, S.BK, BQ, k_of(S), S)  # [BK, BQ]
    dp = s
    if S.of_scores:
        dp = outer_product(v, dout, S.BK, BQ, v_of(S), S)  # [BK, BQ]
    QB, qb_l, other = biases
    added = other
    if S.biased:
        added = row_biases(QB, row, qb_l, row_ok, S)[None, :] + other[:, None]
    TREE, tree_q, own_keys = tree
    tree_at = tree_rows(TREE, 0, 0, row, tree_q, S)
    qpos = query_position(offset, row, rules[3], S)
    kept = ok
    if S.dropout:
        kept = tl.trans(kept_cells((drop[0], drop[2], drop[3]), drop[1], n, qpos, rules[3], S))
    p, dl, ds, terms = tile_gradients(
        s, dp, mixed, bias, lse[None, :], delta[None, :], qpos[None, :], n[:, None],
        ok, slope, added, (tree_at[None, :], own_keys), at[None, :], mask_k, user, kept, rules, S,
    )  # fmt: skip
    if S.dv:
        dv = add_product(dv, p, dout, dout_of(S), S)  # [BK, Dv]
    if S.dk:
        dk = add_product(dk, ds, q, q_of(S), S)  # [BK, D]
    if S.dk_bias:
        sums += tl.sum(dl, 1)
    return dk, dv, sums, add_terms(loads, terms)


@kernel_of(NAMES, SIZES, triton.jit)
def key_gradients(a, S):
    kv_heads = a.heads // S.group
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
    slots = a.kv_len  # rows of K of the sequence, perhaps more than its keys
    if S.varlen:
        kv_head, tile, b, first, slots, owned = packed_tile(pid, a.CU_K, kv_heads, a.batch, a.total_k, BK)
        if tile * BK >= slots:
            return
    else:
        at, tile = tile_of(pid, tl.cdiv(a.kv_len, BK), a.batch * kv_heads, a.swizzle)
        b = at // kv_heads
        kv_head = at % kv_heads
    q_start, q_len, kv_start, n_keys, offset = sequence(
        b, a.CU_Q, a.CU_K, a.KV_LENGTHS, a.Q_OFFSET, a.q_len, a.kv_len, a.q_offset, S
    )
    if S.varlen:  # rows of K past the last sequence belong to none
        kv_start = tl.cast(first, tl.int64)
        n_keys = tl.where(owned, n_keys, 0)

    # Rows lo .. hi see any of these keys, rows full_lo .. full_hi all of them.
    n0 = tile * BK
    n = n0 + tl.arange(0, BK)
    key_ok = n < n_keys
    last_key = tl.minimum(n0 + BK, n_keys) - 1
    numbers = sequence_numbers(a.rules, a.PLACES, b, S)
    lo, full_hi = query_span(n0, offset, q_len, numbers, S)
    full_lo, hi = query_span(last_key, offset, q_len, numbers, S)
    first_t = lo // BQ
    last_t = tl.maximum(tl.cdiv(hi, BQ), first_t)
    if n0 >= n_keys:
        last_t = first_t
    inner = tl.minimum(tl.maximum(tl.cdiv(full_lo, BQ), first_t), last_t)
    if n0 + BK > n_keys:
        inner = last_t
    if S.tree:
        if n0 + BK > n_keys - q_len:
            inner = last_t
    outer = tl.maximum(tl.minimum(full_hi // BQ, last_t), inner)
    if S.mask != "" and not S.listed:
        outer = inner

    k = load_tile(plane(a.K, b, kv_head, kv_start, k_b, k_h, k_l, S), n0, k_l, key_ok, k_of(S), S, True)
    v = k
    if S.of_scores:
        v = load_tile(plane(a.V, b, kv_head, kv_start, v_b, v_h, v_l, S), n0, v_l, key_ok, v_of(S), S, True)
    scale = tl.cast(a.scale, tl.float32)  # the interpreter passes a subnormal float32 as float64
    rules = (scale, a.softcap, n_keys, numbers)
    dk = ()
    dv = ()
    if S.dk:
        dk = empty_acc(q_of(S), BK)
    if S.dv:
        dv = empty_acc(dout_of(S), BK)
    state = (dk, dv, tl.zeros([BK], tl.float32), empty_terms(BK, S))
    seed = seed_of(a.SEED, S)
    tree = (n, n, n)
    if S.tree:
        tree = (a.TREE + tl.cast(b, tl.int64) * a.tree_b, a.tree_q, n_keys - q_len)
    for i in range(S.group):
        head = kv_head * S.group + i
        slope = 0.0
        if S.alibi:
            slope = tl.load(a.SLOPES + b * a.slopes_b + head)
        mask = a.LSE
        if S.mask != "":
            mask = mask_plane(a.MASK, b, head, a.mask_b, a.mask_h, S)
        if S.mask == "float":
            mask += tl.cast(n0, tl.int64) * a.mask_k
        biases = (n, n, n)
        if S.biased:
            own = a.LSE
            if S.q_bias:
                own = plane(a.Q_BIAS, b, head, q_start, a.qb_b, a.qb_h, a.qb_l, S)
            other = tl.zeros([BK], tl.float32)
            if S.k_bias:
                keys_at = plane(a.K_BIAS, b, head, kv_start, a.kb_b, a.kb_h, a.kb_l, S)
                other = load_numbers(keys_at, n, a.kb_l, key_ok, True)
            biases = (own, a.qb_l, other)
        head_rows = (
            plane(a.Q, b, head, q_start, q_b, q_h, q_l, S), q_l,
            plane(a.DOUT, b, head, q_start, do_b, do_h, do_l, S), do_l,
            plane(a.LSE, b, head, q_start, a.lse_b, a.lse_h, a.lse_l, S), a.lse_l,
            row_plane(a.DELTA, b, head, q_start, a.heads, a.rows, S), mask, a.mask_q, a.mask_k, slope, biases,
            tree, offset, q_len, (b, head, a.captured), (seed, n0, b, head),
        )  # fmt: skip
        if S.listed:
            tiles, first, last = listed_tiles(
                a.LIST, a.RANK, b, head, tile, a.list_b, a.list_h, a.list_q, a.list_n, first_t, last_t, S
            )
            for j in tl.range(first, last):
                entry = tl.load(tiles + j)
                t = entry >> 1
                mixed = ((entry & 1) != 0) | (t < inner) | (t >= outer)
                state = key_step(state, t, mixed, k, v, n, key_ok, head_rows, rules, S)
        else:
            for t in tl.range(first_t, last_t):
                mixed = (t < inner) | (t >= outer)
                state = key_step(state, t, mixed, k, v, n, key_ok, head_rows, rules, S)
        total = a.kv_len
        planes = tl.cast(a.batch, tl.int64) * a.heads * total
        if S.varlen:
            total = a.total_k
            planes = tl.cast(a.heads, tl.int64) * total
        if S.dk_bias:
            tl.store(row_plane(a.DK_BIAS, b, head, kv_start, a.heads, total, S) + n, state[2], mask=n < slots)
        for j in tl.static_range(count_loads(S)):
            to = row_plane(a.LOADS + j * planes, b, head, kv_start, a.heads, total, S) + n
            tl.store(to, state[3][j], mask=n < slots)
        if S.dk_bias or S.loads > 0:
            state = (state[0], state[1], tl.zeros([BK], tl.float32), empty_terms(BK, S))
    dk, dv, _, _ = state
    if S.guard == "flag" and (S.dk or S.dv):
        tl.store(a.FLAGS + pid, (has_nonfinite(dk) | has_nonfinite(dv)).to(tl.int32))
    inside = n < slots
    if S.dv:
        store_tile(
            plane(a.DV, b, kv_head, kv_start, a.dv_b, a.dv_h, a.dv_l, S), n0, a.dv_l, inside, dv, 1.0, dout_of(S)
        )
    if S.dk:
        store_tile(plane(a.DK, b, kv_head, kv_start, a.dk_b, a.dk_h, a.dk_l, S), n0, a.dk_l, inside, dk, scale, q_of(S))
