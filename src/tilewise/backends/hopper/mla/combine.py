"""Combines the partials of sequences that are split over several programs. Other sequences are complete already."""

import triton.language as tl

import triton

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
PLAIN_INTS = ["o_b", "o_h", "o_l", "lse_b", "lse_h", "lse_l", "heads", "q_len", "per", "head_rows", "tiles"]


@triton.jit(do_not_specialize=PLAIN_INTS)
def combine(
    OUT, LSE, SINKS, PARTIAL, PARTIAL_LSE, FRAGMENTS,
    o_b, o_h, o_l, lse_b, lse_h, lse_l, heads, q_len, per, head_rows, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Combines COLUMNS columns of ROWS rows (heads, then queries) of a sequence, AT_ONCE fragments at a time.

    `per` sequences are queries of one batch row: 1, or all of them.
    """
    CHUNKS: tl.constexpr = 512 // COLUMNS
    groups = tl.cdiv(heads * q_len, ROWS)
    chunk = tl.program_id(0) % CHUNKS
    group = tl.program_id(0) // CHUNKS % groups
    seq = tl.program_id(0) // CHUNKS // groups
    entry = tl.load(FRAGMENTS + seq)
    fragments = entry >> 16
    if fragments > 1:
        partial = entry & 65535
        row = group * ROWS + tl.arange(0, ROWS)
        ok = row < heads * q_len
        l = row // heads
        h = row % heads
        queries = 64 // head_rows
        tile = l // queries * tl.cdiv(heads, head_rows) + h // head_rows
        in_tile = tile * 64 + l % queries * head_rows + h % head_rows
        column = chunk * COLUMNS + tl.arange(0, COLUMNS)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        o = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, fragments, AT_ONCE):
            f = first + tl.arange(0, AT_ONCE)
            # The first fragment may be the last one of its run; the others begin the runs that follow.
            at = tl.where(f == 0, partial, (partial // 2 + f) * 2)[:, None] * tiles * 64 + in_tile[None, :]
            there = (f < fragments)[:, None] & ok[None, :]
            x = tl.load(
                PARTIAL + at.to(tl.int64)[:, :, None] * 512 + column[None, None, :], mask=there[:, :, None], other=0.0
            )
            lse = tl.load(PARTIAL_LSE + at, mask=there, other=float("-inf"))  # [AT_ONCE, ROWS]
            new = tl.maximum(m, tl.max(lse, 0))
            base = tl.where(new == float("-inf"), 0.0, new)
            alpha = tl.exp2(m - base)
            weight = tl.exp2(lse - base[None, :])
            total = total * alpha + tl.sum(weight, 0)
            o = o * alpha[:, None] + tl.sum(x * weight[:, :, None], 0)
            m = new
        if SINKS is not None:
            sink = tl.load(SINKS + h, mask=ok, other=float("-inf")) * LOG2E
            new = tl.maximum(m, sink)
            base = tl.where(new == float("-inf"), 0.0, new)
            alpha = tl.exp2(m - base)
            total = total * alpha + tl.where(sink == float("inf"), 1.0, tl.exp2(sink - base))  # inf - inf would be NaN
            o = o * alpha[:, None]
            m = new
        empty = total == 0
        one = tl.where(empty, 1.0, total)
        o = tl.where(empty[:, None], 0.0, o / one[:, None])
        b = seq // per
        l += seq % per
        at = b.to(tl.int64) * o_b + h.to(tl.int64) * o_h + l.to(tl.int64) * o_l
        tl.store(OUT + at[:, None] + column[None, :], o.to(OUT.dtype.element_ty), mask=ok[:, None])
        if LSE is not None:
            at = b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + l.to(tl.int64) * lse_l
            whole = tl.where(empty, float("-inf"), (m + tl.log2(one)) * LN2)
            tl.store(LSE + at, whole, mask=ok & (chunk == 0))
