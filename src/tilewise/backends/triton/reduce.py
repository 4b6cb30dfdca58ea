"""Merges the partial results of splits: out = sum_s w_s acc_s / sum_s w_s l_s with w_s = exp(m_s - max m).

One program for each row of the output and head. Splits are summed in blocks of a fixed size and in order, so that more
(empty) splits do not change a bit of the result.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .scores import LOG2E


@triton.jit(do_not_specialize=["q_len", "heads", "splits", "batch"])
def reduce(
    PART, PART_ML, OUT, LSE, SINKS, CU_Q, o_b, o_h, o_l, lse_b, lse_h, lse_l, q_len, heads, splits, batch,
    DV: tl.constexpr, W: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()  # for the partial results
    pid = tl.program_id(0).to(tl.int64)
    head = pid % heads
    token = pid // heads
    b = token // q_len
    row = token % q_len
    if PACKED:
        b = token * 0
        row = token
    d = tl.arange(0, W)
    s = tl.arange(0, BS)
    ML = PART_ML + pid * splits * 2
    top = float("-inf")
    for s0 in range(0, splits, BS):
        top = tl.maximum(top, tl.max(tl.load(ML + (s0 + s) * 2, mask=s0 + s < splits, other=float("-inf")), 0))
    if HAS_SINKS:
        sink = tl.load(SINKS + head)
        if PACKED:
            sink = tl.where(token < tl.load(CU_Q + batch), sink, float("-inf"))
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    acc = tl.zeros([W], tl.float32)
    for s0 in range(0, splits, BS):
        ok = s0 + s < splits
        weight = tl.exp2((tl.load(ML + (s0 + s) * 2, mask=ok, other=float("-inf")) - base) * LOG2E)  # [BS]
        total += tl.sum(weight * tl.load(ML + (s0 + s) * 2 + 1, mask=ok, other=0.0), 0)
        part = PART + (pid * splits + s0 + s)[:, None] * DV + d[None, :]
        # An empty split has written zeros, so that no weight meets an old NaN.
        x = tl.load(part, mask=ok[:, None] & (d < DV)[None, :], other=0.0)  # [BS, W]
        acc += tl.sum(x * weight[:, None], 0)
    if HAS_SINKS:
        total += tl.exp2((sink - base) * LOG2E)
    total = tl.where(total == 0, 1.0, total)
    at = OUT + b * o_b + row * o_l + head * o_h + d
    tl.store(at, (acc / total).to(OUT.dtype.element_ty), mask=d < DV)
    if HAS_LSE:
        tl.store(LSE + b * lse_b + row * lse_l + head * lse_h, top + tl.log(total))
