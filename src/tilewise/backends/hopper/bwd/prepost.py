"""Before and after the backward kernel: row statistics, a cleared dQ; dQ to its own type."""

import triton.language as tl

import triton

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def preprocess(
    OUT, DOUT, LSE, DLSE, STATS, DQ, SEMAPHORES, COUNTER,
    o_b, o_h, o_l, do_b, do_h, do_l, lse_b, lse_h, lse_l, heads, q_len, q_blocks, value_dim,
    BM: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, HAS_DLSE: tl.constexpr,
    CLEARS: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) - dlse; rows that see nothing, and rows past the end, get -lse = -inf: their P is 0."""
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
    minus = tl.where(seen, -lse * LOG2E, float("-inf"))
    entry = plane.to(tl.int64) * q_blocks + block
    tl.store(STATS + entry * (2 * BM) + tl.arange(0, BM), minus)
    tl.store(STATS + entry * (2 * BM) + BM + tl.arange(0, BM), delta)
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
    x = tl.load(ACC + (entry * BM + tl.arange(0, BM))[:, None] * D + column[None, :], mask=there, other=0.0)
    inside = (row < q_len)[:, None] & (column < head_dim)[None, :]
    at = DQ + b * dq_b + h * dq_h + row.to(tl.int64)[:, None] * dq_l + column[None, :]
    tl.store(at, (x * scale).to(DQ.dtype.element_ty), mask=inside)
