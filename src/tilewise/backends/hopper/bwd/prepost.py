"""Kernels before and after the backward kernel: row statistics; dQ, and split dK and dV, to their dtype."""

import triton.language as tl

import triton

LOG2E = tl.constexpr(1.4426950408889634)
MOST_LSE = tl.constexpr(8192.0)  # float32 holds it to 0.001


@triton.jit
def query_block(CU_Q, heads, q_len, q_blocks, BM: tl.constexpr, PACKED: tl.constexpr):
    """This program's batch row, head, first row and length of the sequence, and block index (`Work.block`)."""
    i = tl.program_id(0)
    plane = tl.program_id(1)
    b = plane // heads
    h = plane % heads
    start = 0
    entry = plane.to(tl.int64) * q_blocks + i
    if PACKED:
        start = tl.load(CU_Q + b)
        q_len = tl.load(CU_Q + b + 1) - start
        entry = h.to(tl.int64) * q_blocks + start // BM + b + i
        b = 0
    return b.to(tl.int64), h.to(tl.int64), start, q_len, entry


@triton.jit
def keys_of(KV_LENGTHS, Q_OFFSET, seq, rows, extent, q_offset, S: tl.constexpr):
    """Keys in use of a sequence with `extent` keys, and the position of its first query row among them."""
    keys = extent
    if S.lengths:
        keys = tl.load(KV_LENGTHS + seq)
    if S.offset == "int":
        shift = q_offset
    elif S.offset == "rows":
        shift = tl.load(Q_OFFSET + seq)
    else:
        shift = keys - rows
    return keys, shift


@triton.jit
def is_seen(i, keys, shift, left, right, BM: tl.constexpr, S: tl.constexpr):
    """Whether any key block adds to dQ of query block i (`Work.turn` and `Work.end`)."""
    first = 0
    end = tl.cdiv(keys, 128)
    if S.hides_left:
        first = tl.maximum((i * BM + shift - left) >> 7, 0)
    if S.hides_right:
        end = tl.minimum(end, (((i + 1) * BM - 1 + shift + right) >> 7) + 1)
    return first < end


@triton.jit
def in_parts(x, part, LIKE):
    """x [BM] as parts [BM, 32] in a narrower dtype, whose sum (each times its factor, `products.part_factors`) is x."""
    dtype: tl.constexpr = LIKE.dtype.element_ty
    found = tl.zeros([x.shape[0], part.shape[0]], dtype)
    for n in tl.static_range(4):
        if dtype == tl.float16:
            rounded = (x * 2.0 ** (10 * n - 10)).to(dtype)
            x -= rounded.to(tl.float32) * 2.0 ** (10 - 10 * n)
        else:
            rounded = x.to(dtype)
            x -= rounded.to(tl.float32)
        found = tl.where(part[None, :] == n, rounded[:, None], found)
    return found


@triton.jit
def preprocess(
    OUT, DOUT, LSE, DLSE, SINKS, CU_Q, STATS, LSE2, SHARES, SEMAPHORES, COUNTER, FLAG, HUGE,
    o_b, o_h, o_l, do_b, do_h, do_l, lse_b, lse_h, lse_l, dlse_b, dlse_h, dlse_l, heads, q_len, q_blocks, value_dim,
    scale, CU_K, KV_LENGTHS, Q_OFFSET, DQ, dq_b, dq_h, dq_l, head_dim, kv_len, q_offset, left, right,
    BM: tl.constexpr, D: tl.constexpr, PACKED: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """Row statistics in parts that the products of S and dP sum: -lse / scale, and -delta = dlse - rowsum(dO * O).

    Fully masked rows, and rows past the end, get so low a -lse that their P is 0. SHARES are each block's part of the
    sinks' gradient. With a softcap, lse is subtracted after the cap: LSE2 holds -lse in float32, in base 2. With a mask
    it is in natural units, which stay finite (a mask may hold -3e38 alone). HUGE marks blocks with a huge lse, in which
    the product subtracts nothing.
    """
    i = tl.program_id(0)
    b, h, start, q_len, entry = query_block(CU_Q, heads, q_len, q_blocks, BM, PACKED)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(COUNTER, 0)
        tl.store(FLAG, 0)
    if i * BM >= q_len:
        return
    row = i * BM + tl.arange(0, BM)
    ok = row < q_len
    at = (start + row).to(tl.int64)
    column = tl.arange(0, D)
    inside = ok[:, None] & (column < value_dim)[None, :]
    o = tl.load(OUT + b * o_b + h * o_h + at[:, None] * o_l + column[None, :], mask=inside, other=0.0)
    do = tl.load(DOUT + b * do_b + h * do_h + at[:, None] * do_l + column[None, :], mask=inside, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    lse = tl.load(LSE + b * lse_b + h * lse_h + at * lse_l, mask=ok, other=float("-inf"))
    if HAS_DLSE:
        delta -= tl.load(DLSE + b * dlse_b + h * dlse_h + at * dlse_l, mask=ok, other=0.0)
    seen = ok & (tl.abs(lse) != float("inf"))
    delta = tl.where(seen, delta, 0.0)
    if HAS_SINKS:
        share = tl.where(seen, tl.exp(tl.load(SINKS + h) - lse) * delta, 0.0)
        tl.store(SHARES + entry, -tl.sum(share, 0))
    # Finite, since an infinite part would make the others NaN.
    LOWEST: tl.constexpr = -6e7 if STATS.dtype.element_ty == tl.float16 else -1e30
    part = tl.arange(0, 32)
    apart = tl.where(seen, -lse / scale, tl.where(scale < 0, -LOWEST, LOWEST))
    if MASKED:
        huge = SOFTCAP | (tl.max(tl.where(seen, tl.abs(lse), 0.0), 0) > MOST_LSE)
        tl.store(HUGE + entry, huge.to(tl.int32))
        apart = tl.where(huge, 0.0, apart)
    lse_parts = in_parts(apart, part, STATS)
    delta_parts = in_parts(-delta, part - 16, STATS)
    rows = entry * BM + tl.arange(0, BM)
    tl.store(STATS + rows[:, None] * 32 + part[None, :], tl.where(part < 16, lse_parts, delta_parts))
    if MASKED | SOFTCAP:
        tl.store(LSE2 + rows, tl.where(seen, -lse if MASKED else -lse * LOG2E, float("-inf")))
    tl.store(SEMAPHORES + entry, 0)
    if CONVERTS is not None:  # the spec of a kernel that writes dQ only where a key block adds to it
        seq = tl.program_id(1) // heads
        extent = kv_len
        if PACKED:
            extent = tl.load(CU_K + seq + 1) - tl.load(CU_K + seq)
        keys, shift = keys_of(KV_LENGTHS, Q_OFFSET, seq, q_len, extent, q_offset, CONVERTS)
        if not is_seen(i, keys, shift, left, right, BM, CONVERTS):
            to = DQ + b * dq_b + h * dq_h + at[:, None] * dq_l + column[None, :]
            tl.store(to, tl.zeros([BM, D], DQ.dtype.element_ty), mask=ok[:, None] & (column < head_dim)[None, :])


@triton.jit
def postprocess(
    ACC, SEMAPHORES, FLAG, CU_Q, DQ, dq_b, dq_h, dq_l, heads, q_len, q_blocks, head_dim, scale,
    BM: tl.constexpr, D: tl.constexpr, PACKED: tl.constexpr, GUARDED: tl.constexpr,
):  # fmt: skip
    """Unpacks, scales and converts dQ."""
    i = tl.program_id(0)
    b, h, start, q_len, entry = query_block(CU_Q, heads, q_len, q_blocks, BM, PACKED)
    if i * BM >= q_len:
        return
    row = i * BM + tl.arange(0, BM)
    column = tl.arange(0, D)
    there = tl.load(SEMAPHORES + entry) > 0  # else no key block has written it
    x = tl.load(ACC + entry * (BM * D) + tl.arange(0, BM * D), mask=there, other=0.0)
    # consumer, warp, column // 8, lane // 4, lane % 4, row half, column % 2: as packed by `consumer.pack_dq`
    x = x.reshape([2, 4, 8, 8, 4, 2, 2])
    x = x.permute([1, 5, 3, 0, 2, 4, 6]) if BM == 64 else x.permute([0, 1, 5, 3, 2, 4, 6])
    x = x.reshape([BM, D])
    inside = (row < q_len)[:, None] & (column < head_dim)[None, :]
    if GUARDED:
        tl.store(FLAG + tl.zeros([BM, D], tl.int32), 1, mask=inside & (x * 0.0 != 0.0))
    at = DQ + b * dq_b + h * dq_h + (start + row).to(tl.int64)[:, None] * dq_l + column[None, :]
    tl.store(at, (x * scale).to(DQ.dtype.element_ty), mask=inside)


@triton.jit
def combine_splits(
    DK, DV, DK_PARTIALS, DV_PARTIALS, dk_b, dk_h, dk_l, dv_b, dv_h, dv_l, kv_heads, rows, head_dim, splits,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Combines dK and dV of split key blocks: sums partials [batch, KV heads, splits, rows, D], in order."""
    plane = tl.program_id(1)
    b = (plane // kv_heads).to(tl.int64)
    h = (plane % kv_heads).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, D)[None, :]
    inside = (row < rows) & (column < head_dim)
    at = plane.to(tl.int64) * splits * rows * D + row * D + column
    dk = tl.zeros([ROWS, D], tl.float32)
    dv = tl.zeros([ROWS, D], tl.float32)
    for _ in range(splits):
        dk += tl.load(DK_PARTIALS + at, mask=inside, other=0.0)
        dv += tl.load(DV_PARTIALS + at, mask=inside, other=0.0)
        at += rows * D
    tl.store(DK + b * dk_b + h * dk_h + row * dk_l + column, dk.to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + b * dv_b + h * dv_h + row * dv_l + column, dv.to(DV.dtype.element_ty), mask=inside)


@triton.jit
def list_blocks(CU_K, TABLE, batch, slots, BN: tl.constexpr, SLOTS: tl.constexpr, RUN: tl.constexpr):
    """Lists each block's sequence and its number there; past the last block, a number that no sequence has."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    seq = slot * 0
    start = slot * 0
    total = 0
    for top in range(0, batch, RUN):
        b = top + tl.arange(0, RUN)
        here = b < batch
        length = tl.load(CU_K + b + 1, mask=here, other=0) - tl.load(CU_K + b, mask=here, other=0)
        ends = total + tl.cumsum(tl.cdiv(length, BN), 0)  # [RUN]
        before = here[None, :] & (ends[None, :] <= slot[:, None])  # [SLOTS, RUN]
        seq += tl.sum(before.to(tl.int32), 1)
        start = tl.maximum(start, tl.max(tl.where(before, ends[None, :], 0), 1))
        total = tl.max(ends, 0)
    nobody = slot >= total
    at = TABLE + 2 * slot
    tl.store(at, tl.where(nobody, 0, seq), mask=slot < slots)
    tl.store(at + 1, tl.where(nobody, 1 << 22, slot - start), mask=slot < slots)


@triton.jit
def clear_rest(CU, X, x_h, x_l, batch, total, width, ROWS: tl.constexpr, D: tl.constexpr):
    """Zeroes the rows past the last packed sequence. The grid is (programs per head, heads)."""
    first = tl.load(CU + batch)
    column = tl.arange(0, D)
    for top in range(first + tl.program_id(0) * ROWS, total, tl.num_programs(0) * ROWS):
        row = top + tl.arange(0, ROWS)
        at = X + tl.program_id(1).to(tl.int64) * x_h + row.to(tl.int64)[:, None] * x_l + column[None, :]
        tl.store(at, tl.zeros([ROWS, D], X.dtype.element_ty), mask=(row < total)[:, None] & (column < width)[None, :])
