"""Sums over the rows of a call: delta, and the gradients of sinks and ALiBi slopes."""

import triton.language as tl

import triton

from ..kv_load import first_of, width_of
from .load import dout_of
from .places import wide_strides


@triton.jit(do_not_specialize=["rows", "heads"])
def sum_delta(
    OUT, DOUT, DLSE, DELTA, o_b, o_h, o_l, do_b, do_h, do_l, dlse_b, dlse_h, dlse_l, rows, heads,
    S: tl.constexpr,
):  # fmt: skip
    """`delta` [B, H, rows]; 0 - dlse for a row whose output is 0, whatever its dout: it may be fully masked."""
    BQ: tl.constexpr = S.BQ
    do_b, do_h, do_l = wide_strides(do_b, do_h, do_l, S)
    tiles = tl.cdiv(rows, BQ)
    row = tl.program_id(0) % tiles * BQ + tl.arange(0, BQ)
    ok = row < rows
    at = tl.program_id(0) // tiles
    head = (at % heads).to(tl.int64)
    b = (at // heads).to(tl.int64)
    wide = row.to(tl.int64)
    total = tl.zeros([BQ], tl.float32)
    any_out = tl.zeros([BQ], tl.int32)
    OP: tl.constexpr = dout_of(S)
    for i in tl.static_range(len(OP.widths)):
        d = first_of(OP, i) + tl.arange(0, width_of(OP, i))
        inside = ok[:, None] & (d < OP.columns)[None, :]
        out_at = OUT + b * o_b + head * o_h + wide[:, None] * o_l + d[None, :]
        out = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
        dout_at = DOUT + b * do_b + head * do_h + wide[:, None] * do_l + d[None, :]
        dout = tl.load(dout_at, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(out * dout, 1)
        any_out = tl.maximum(any_out, tl.max((out != 0).to(tl.int32), 1))
    total = tl.where(any_out != 0, total, 0.0)
    if S.dlse:
        total -= tl.load(DLSE + b * dlse_b + head * dlse_h + wide * dlse_l, mask=ok, other=0.0)
    tl.store(DELTA + (b * heads + head) * rows + wide, total, mask=ok)


@triton.jit(do_not_specialize=["heads", "rows", "q_len"])
def row_sums(
    LSE, DELTA, SINKS, DROWS, DSINKS, DSLOPES, CU_Q, lse_b, lse_h, lse_l, heads, rows, q_len,
    S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over the rows of each batch row and head [B, H]: of minus the sink's weight times delta, and of DROWS."""
    pid = tl.program_id(0)
    head = (pid % heads).to(tl.int64)
    b = pid // heads
    row_b = b.to(tl.int64)
    first = b * 0
    if S.varlen:
        first = tl.load(CU_Q + b)
        q_len = tl.load(CU_Q + b + 1) - first
        row_b = row_b * 0
    start = (row_b * heads + head) * rows + first
    of_sink = tl.zeros([BLOCK], tl.float64)  # float64: few numbers, each a sum of many
    of_slope = tl.zeros([BLOCK], tl.float64)
    for r in range(0, q_len, BLOCK):
        row = r + tl.arange(0, BLOCK)
        ok = row < q_len
        if S.dsinks:
            sink = tl.load(SINKS + head)
            at = LSE + row_b * lse_b + head * lse_h + (first + row).to(tl.int64) * lse_l
            lse = tl.load(at, mask=ok, other=float("inf"))
            delta = tl.load(DELTA + start + row, mask=ok, other=0.0)
            # A row with infinite lse has no gradient: it is fully masked without a sink, or the sink has all weight.
            live = tl.abs(lse) != float("inf")
            share = tl.exp((sink - tl.where(live, lse, 0.0)).to(tl.float64)) * delta
            of_sink -= tl.where(live, share, 0.0)
        if S.dslopes:
            of_slope += tl.load(DROWS + start + row, mask=ok, other=0.0)
    if S.dsinks:
        tl.store(DSINKS + pid, tl.sum(of_sink, 0).to(tl.float32))
    if S.dslopes:
        tl.store(DSLOPES + pid, tl.sum(of_slope, 0).to(tl.float32))
