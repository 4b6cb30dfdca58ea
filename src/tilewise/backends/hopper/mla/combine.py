"""Sequences whose keys several programs share: their outputs to one.

Which part has which pairs of blocks follows from the lengths alone (schedule.py), so a program finds the parts of its
rows by the same sums. Sequences that one program had alone are complete already.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

LN2 = tl.constexpr(0.6931471805599453)
RUN = tl.constexpr(256)


@triton.jit
def pairs_at(LENGTHS, at, batch, kv_len):
    """Pairs of blocks of sequences."""
    if LENGTHS is not None:
        n = tl.load(LENGTHS + at, mask=at < batch, other=0)
    else:
        n = at * 0 + kv_len
    return tl.where(at < batch, tl.maximum((n + 127) // 128, 1), 0)


PLAIN_INTS = [
    "o_b", "o_h", "o_l", "lse_b", "lse_h", "lse_l", "batch", "heads", "q_len", "kv_len", "head_rows", "tiles", "parts",
]  # fmt: skip


@triton.jit(do_not_specialize=PLAIN_INTS)
def combine(
    OUT, LSE, PARTS, PART_LSE, LENGTHS, o_b, o_h, o_l, lse_b, lse_h, lse_l, batch, heads, q_len, kv_len,
    head_rows, tiles, parts,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, MOST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one tile of a sequence, AT_ONCE parts at a time; there are no more than MOST."""
    GROUPS: tl.constexpr = 64 // ROWS
    group = tl.program_id(0) % GROUPS
    tile = tl.program_id(0) // GROUPS % tiles
    seq = tl.program_id(0) // GROUPS // tiles
    total = 0
    start = 0
    for first in range(0, batch, RUN):
        at = first + tl.arange(0, RUN)
        pairs = pairs_at(LENGTHS, at, batch, kv_len)
        total += tl.sum(pairs, 0)
        start += tl.sum(tl.where(at < seq, pairs, 0), 0)
    end = start + tl.sum(pairs_at(LENGTHS, seq + tl.arange(0, 1), batch, kv_len), 0)

    # Part p has pairs p total // parts .. (p + 1) total // parts.
    part = tl.arange(0, MOST)
    begins = (part.to(tl.int64) * total // parts).to(tl.int32)
    ends = ((part + 1).to(tl.int64) * total // parts).to(tl.int32)
    shares = (part < parts) & (begins < end) & (ends > start) & (ends > begins)
    if DEPENDENT:
        gdc_wait()  # for the outputs of parts
    if tl.sum(shares.to(tl.int32), 0) > 1:
        low = tl.min(tl.where(shares, part, MOST), 0)
        high = tl.max(tl.where(shares, part, -1), 0)
        row = group * ROWS + tl.arange(0, ROWS)
        slot = part * 2 + (begins < start)
        lse_at = (slot[:, None] * tiles + tile) * 64 + row[None, :]
        lse = tl.load(PART_LSE + lse_at, mask=shares[:, None], other=float("-inf"))  # [MOST, ROWS]
        top = tl.max(lse, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        sums = tl.sum(tl.exp2(lse - base[None, :]), 0)
        share = tl.where(sums == 0, 0.0, 1.0 / tl.where(sums == 0, 1.0, sums))
        column = tl.arange(0, 512)
        o = tl.zeros([ROWS, 512], tl.float32)
        for first in range(low, high + 1, AT_ONCE):
            p = first + tl.arange(0, AT_ONCE)
            begin = (p.to(tl.int64) * total // parts).to(tl.int32)
            ended = ((p + 1).to(tl.int64) * total // parts).to(tl.int32)
            there = (p <= high) & (ended > begin)
            place = ((p * 2 + (begin < start)) * tiles + tile) * 64
            weight = tl.load(
                PART_LSE + place[:, None] + row[None, :], mask=there[:, None], other=float("-inf")
            )  # [AT_ONCE, ROWS]
            weight = tl.exp2(weight - base[None, :]) * share[None, :]
            at = (place[:, None] + row[None, :]).to(tl.int64) * 512
            x = tl.load(PARTS + at[:, :, None] + column[None, None, :], mask=there[:, None, None], other=0.0)
            o += tl.sum(x * weight[:, :, None], 0)
        across = (heads + head_rows - 1) // head_rows
        l = tile // across * (64 // head_rows) + row // head_rows
        h = tile % across * head_rows + row % head_rows
        ok = (l < q_len) & (h < heads)
        at = seq.to(tl.int64) * o_b + h.to(tl.int64) * o_h + l.to(tl.int64) * o_l
        tl.store(OUT + at[:, None] + column[None, :], o.to(OUT.dtype.element_ty), mask=ok[:, None])
        if LSE is not None:
            at = seq.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + l.to(tl.int64) * lse_l
            whole = tl.where(sums == 0, float("-inf"), (base + tl.log2(tl.where(sums == 0, 1.0, sums))) * LN2)
            tl.store(LSE + at, whole, mask=ok)
