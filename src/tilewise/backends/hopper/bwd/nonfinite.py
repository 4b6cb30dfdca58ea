"""Non-finite fix-up of a backward pass: recomputes all gradients but a broadcast mask's, if one is not finite.

Products multiply inputs under hidden cells by zero, and `0 * NaN` is NaN. Here NaN and Inf in q, k, v and dout count as
0; a row that sees one has NaN in its lse or its delta, so its gradients are still NaN.
"""

import triton.language as tl

import triton

from .prepost import keys_of


@triton.jit
def load_clean(X, start, stride, first, end, width, BLOCK: tl.constexpr, D: tl.constexpr):
    """Loads rows `first ..` of X [BLOCK, D], with 0 past `end` and for non-finite elements."""
    row = first + tl.arange(0, BLOCK)
    column = tl.arange(0, D)
    at = X + (start + row).to(tl.int64)[:, None] * stride + column[None, :]
    x = tl.load(at, mask=(row < end)[:, None] & (column < width)[None, :], other=0.0)
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(X.dtype.element_ty)


@triton.jit
def store_rows(X, start, stride, first, end, width, value, BLOCK: tl.constexpr, D: tl.constexpr):
    row = first + tl.arange(0, BLOCK)
    column = tl.arange(0, D)
    at = X + (start + row).to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(at, value.to(X.dtype.element_ty), mask=(row < end)[:, None] & (column < width)[None, :])


@triton.jit
def cells(q, do, lse, delta, k, v, top, first, q_len, kv_len, shift, left, right, scale, softcap, MASK, mask_q, mask_k,
          SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """P, dS and the gradient of the logits, [BLOCK, BLOCK] each, of query rows `top ..` and keys `first ..`."""
    row = top + tl.arange(0, BLOCK)[:, None]
    key = first + tl.arange(0, BLOCK)[None, :]
    seen = (key <= row + shift + right) & (key >= row + shift - left) & (key < kv_len) & (row < q_len)
    seen &= (tl.abs(lse) != float("inf"))[:, None]
    s = tl.dot(q, tl.trans(k)) * scale
    slope = 1.0
    if SOFTCAP:
        t = 1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0)  # tanh
        s = softcap * t
        slope = 1.0 - t * t
    if MASK is not None:
        at = MASK + row.to(tl.int64) * mask_q + key.to(tl.int64) * mask_k
        bias = tl.load(at, mask=(row < q_len) & (key < kv_len), other=0.0).to(tl.float32)
        seen &= bias != float("-inf")
        s += bias
    p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
    bent = p * slope
    dp = tl.dot(do, tl.trans(v)) - delta[:, None]
    ds = tl.where(seen, bent * dp, 0.0)
    return p.to(q.dtype), ds.to(q.dtype), tl.where(seen, p * dp, 0.0)


@triton.jit
def store_cells(X, row_stride, key_stride, top, first, q_len, kv_len, value, BLOCK: tl.constexpr):
    row = top + tl.arange(0, BLOCK)[:, None]
    key = first + tl.arange(0, BLOCK)[None, :]
    at = X + row.to(tl.int64) * row_stride + key.to(tl.int64) * key_stride
    tl.store(at, value.to(X.dtype.element_ty), mask=(row < q_len) & (key < kv_len))


@triton.jit
def load_stats(OUT, DOUT, LSE, DLSE, o_l, do_l, lse_l, dlse_l, start, top, q_len, width,
               BLOCK: tl.constexpr, D: tl.constexpr, HAS_DLSE: tl.constexpr):  # fmt: skip
    """lse and delta [BLOCK] of query rows `top ..`."""
    row = top + tl.arange(0, BLOCK)
    column = tl.arange(0, D)
    ok = row < q_len
    inside = ok[:, None] & (column < width)[None, :]
    at = (start + row).to(tl.int64)
    out = tl.load(OUT + at[:, None] * o_l + column[None, :], mask=inside, other=0.0)
    dout = tl.load(DOUT + at[:, None] * do_l + column[None, :], mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + at * dlse_l, mask=ok, other=0.0)
    return tl.load(LSE + at * lse_l, mask=ok, other=float("inf")), delta


@triton.jit
def fix_up(
    FLAG, q, k, v, OUT, DOUT, LSE, DLSE, DQ, DK, DV, KV_LENGTHS, Q_OFFSET, CU_Q, CU_K, MASK, DMASK,
    q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, o_b, o_h, o_l, do_b, do_h, do_l, lse_b, lse_h, lse_l,
    dlse_b, dlse_h, dlse_l, dq_b, dq_h, dq_l, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
    mask_b, mask_h, mask_q, mask_k, dmask_b, dmask_h, dmask_q, dmask_k,
    batch, heads, group, q_len, kv_len, q_offset, left, right, head_dim, value_dim, scale, softcap,
    S: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, HAS_DLSE: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs share blocks of keys, for dK and dV, and of queries, for dQ. Does nothing unless FLAG is set."""
    if tl.load(FLAG) == 0:
        return
    kv_heads = heads // group
    of_keys = tl.cdiv(kv_len, BLOCK) * batch * kv_heads
    of_queries = tl.cdiv(q_len, BLOCK) * batch * heads
    for item in range(tl.program_id(0), of_keys + of_queries, tl.num_programs(0)):
        by_keys = item < of_keys
        rest = tl.where(by_keys, item, item - of_keys)
        planes = tl.where(by_keys, kv_heads, heads)
        head = (rest % planes).to(tl.int64)
        seq = rest // planes % batch
        first = rest // planes // batch * BLOCK
        b = seq.to(tl.int64)
        q_start = 0
        kv_start = 0
        rows = q_len
        extent = kv_len
        if S.packed:
            b = b * 0
            q_start = tl.load(CU_Q + seq)
            kv_start = tl.load(CU_K + seq)
            rows = tl.load(CU_Q + seq + 1) - q_start
            extent = tl.load(CU_K + seq + 1) - kv_start
        keys, shift = keys_of(KV_LENGTHS, Q_OFFSET, seq, rows, extent, q_offset, S)
        if by_keys & (first < extent):
            K = k + b * k_b + head * k_h
            V = v + b * v_b + head * v_h
            k_tile = load_clean(K, kv_start, k_l, first, keys, head_dim, BLOCK, D)
            v_tile = load_clean(V, kv_start, v_l, first, keys, value_dim, BLOCK, D_V)
            dk = tl.zeros([BLOCK, D], tl.float32)
            dv = tl.zeros([BLOCK, D_V], tl.float32)
            for g in range(group):
                h = head * group + g
                for top in range(0, rows, BLOCK):
                    q_tile = load_clean(q + b * q_b + h * q_h, q_start, q_l, top, rows, head_dim, BLOCK, D)
                    do_tile = load_clean(DOUT + b * do_b + h * do_h, q_start, do_l, top, rows, value_dim, BLOCK, D_V)
                    lse, delta = load_stats(
                        OUT + b * o_b + h * o_h, DOUT + b * do_b + h * do_h, LSE + b * lse_b + h * lse_h,
                        DLSE + b * dlse_b + h * dlse_h if HAS_DLSE else DLSE, o_l, do_l, lse_l, dlse_l,
                        q_start, top, rows, value_dim, BLOCK, D_V, HAS_DLSE,
                    )  # fmt: skip
                    p, ds, _ = cells(
                        q_tile, do_tile, lse, delta, k_tile, v_tile, top, first, rows, keys, shift, left, right, scale,
                        softcap, MASK + b * mask_b + h * mask_h if S.mask else MASK, mask_q, mask_k, SOFTCAP, BLOCK,
                    )  # fmt: skip
                    dv = tl.dot(tl.trans(p), do_tile, dv)
                    dk = tl.dot(tl.trans(ds), q_tile, dk)
            store_rows(DK + b * dk_b + head * dk_h, kv_start, dk_l, first, extent, head_dim, dk * scale, BLOCK, D)
            store_rows(DV + b * dv_b + head * dv_h, kv_start, dv_l, first, extent, value_dim, dv, BLOCK, D_V)
        if (item >= of_keys) & (first < rows):
            q_tile = load_clean(q + b * q_b + head * q_h, q_start, q_l, first, rows, head_dim, BLOCK, D)
            do_tile = load_clean(DOUT + b * do_b + head * do_h, q_start, do_l, first, rows, value_dim, BLOCK, D_V)
            lse, delta = load_stats(
                OUT + b * o_b + head * o_h, DOUT + b * do_b + head * do_h, LSE + b * lse_b + head * lse_h,
                DLSE + b * dlse_b + head * dlse_h if HAS_DLSE else DLSE, o_l, do_l, lse_l, dlse_l,
                q_start, first, rows, value_dim, BLOCK, D_V, HAS_DLSE,
            )  # fmt: skip
            kv_head = head // group
            dq = tl.zeros([BLOCK, D], tl.float32)
            # The mask's gradient needs keys past a sequence's length too: the kernel has stored blocks of 128.
            for begin in range(0, extent if S.dmask else keys, BLOCK):
                k_tile = load_clean(k + b * k_b + kv_head * k_h, kv_start, k_l, begin, keys, head_dim, BLOCK, D)
                v_tile = load_clean(v + b * v_b + kv_head * v_h, kv_start, v_l, begin, keys, value_dim, BLOCK, D_V)
                p, ds, dl = cells(
                    q_tile, do_tile, lse, delta, k_tile, v_tile, first, begin, rows, keys, shift, left, right, scale,
                    softcap, MASK + b * mask_b + head * mask_h if S.mask else MASK, mask_q, mask_k, SOFTCAP, BLOCK,
                )  # fmt: skip
                if S.dmask:
                    to = DMASK + b * dmask_b + head * dmask_h
                    store_cells(to, dmask_q, dmask_k, first, begin, rows, extent, dl, BLOCK)
                dq = tl.dot(ds, k_tile, dq)
            store_rows(DQ + b * dq_b + head * dq_h, q_start, dq_l, first, rows, head_dim, dq * scale, BLOCK, D)
