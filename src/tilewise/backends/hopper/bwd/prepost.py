"""Before and after the backward kernel: row statistics, a cleared dQ; dQ to its own type."""

import triton.language as tl

import triton


@triton.jit
def in_parts(x, part, LIKE):
    """x [BM] as parts [BM, 32] in a narrower type, whose sum (each by its factor, `consumer.part_factors`) is x."""
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
    OUT, DOUT, LSE, DLSE, STATS, DQ, SEMAPHORES, COUNTER,
    o_b, o_h, o_l, do_b, do_h, do_l, lse_b, lse_h, lse_l, heads, q_len, q_blocks, value_dim,
    scale, BM: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, HAS_DLSE: tl.constexpr,
    CLEARS: tl.constexpr,
):  # fmt: skip
    """Row statistics in parts that the scores' products add up: -lse / scale, and -delta = dlse - rowsum(dO * O).

    Rows that see nothing, and rows past the end, get so low a -lse that their P is 0.
    """
    block = tl.program_id(0)
    plane = tl.program_id(1)
    b = (plane // heads).to(tl.int64)
    h = (plane % heads).to(tl.int64)
    row = block * BM + tl.arange(0, BM)
    ok = row < q_len
    column = tl.arange(0, DV)
    inside = ok[:, None] & (column < value_dim)[None, :]
    o = tl.load(OUT + b * o_b + h * o_h + row.to(tl.int64)[:, None] * o_l + column[None, :], mask=inside, other=0.0)
    do = tl.load(
        DOUT + b * do_b + h * do_h + row.to(tl.int64)[:, None] * do_l + column[None, :], mask=inside, other=0.0
    )
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at = b * lse_b + h * lse_h + row.to(tl.int64) * lse_l
    lse = tl.load(LSE + at, mask=ok, other=float("inf"))
    if HAS_DLSE:
        delta -= tl.load(DLSE + at, mask=ok, other=0.0)
    seen = ok & (lse != float("-inf"))
    delta = tl.where(seen, delta, 0.0)
    # Finite, as a part that is infinite would make the others NaN.
    LOWEST: tl.constexpr = -6e7 if STATS.dtype.element_ty == tl.float16 else -1e30
    entry = plane.to(tl.int64) * q_blocks + block
    part = tl.arange(0, 32)
    lse_parts = in_parts(tl.where(seen, -lse / scale, tl.where(scale < 0, -LOWEST, LOWEST)), part, STATS)
    delta_parts = in_parts(-delta, part - 16, STATS)
    at = STATS + (entry * BM + tl.arange(0, BM))[:, None] * 32 + part[None, :]
    tl.store(at, tl.where(part < 16, lse_parts, delta_parts))
    if CLEARS:
        wide = tl.arange(0, D)
        tl.store(DQ + (entry * BM + tl.arange(0, BM))[:, None] * D + wide[None, :], tl.zeros([BM, D], tl.float32))
    tl.store(SEMAPHORES + entry, 0)
    if (block == 0) & (plane == 0):
        tl.store(COUNTER, 0)


@triton.jit
def postprocess(
    ACC, SEMAPHORES, DQ, dq_b, dq_h, dq_l, heads, q_len, q_blocks, head_dim, scale,
    BM: tl.constexpr, D: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    plane = tl.program_id(1)
    b = (plane // heads).to(tl.int64)
    h = (plane % heads).to(tl.int64)
    row = block * BM + tl.arange(0, BM)
    column = tl.arange(0, D)
    entry = plane.to(tl.int64) * q_blocks + block
    there = True
    if ORDERED:  # without a first addition there is nothing
        there = tl.load(SEMAPHORES + entry) > 0
    x = tl.load(ACC + entry * (BM * D) + tl.arange(0, BM * D), mask=there, other=0.0)
    # consumer, warp, column // 8, lane // 4, lane % 4, row half, column % 2: as `consumer.pack_dq` has it
    x = x.reshape([2, 4, 8, 8, 4, 2, 2])
    x = x.permute([1, 5, 3, 0, 2, 4, 6]) if BM == 64 else x.permute([0, 1, 5, 3, 2, 4, 6])
    x = x.reshape([BM, D])
    inside = (row < q_len)[:, None] & (column < head_dim)[None, :]
    at = DQ + b * dq_b + h * dq_h + row.to(tl.int64)[:, None] * dq_l + column[None, :]
    tl.store(at, (x * scale).to(DQ.dtype.element_ty), mask=inside)
