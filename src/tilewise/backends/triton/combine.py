"""Combines split-KV partials in a separate launch: one program for each output row and head.

The arithmetic is the same as when the last-arriver combines (`epilogue.py`).
"""

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

import triton

from .epilogue import combine_splits, empty_acc, normalise, store_acc
from .kv_load import values_of


@triton.jit(do_not_specialize=["q_len", "heads", "splits", "batch"])
def combine(
    PARTIAL, PARTIAL_ML, OUT, LSE, SINKS, CU_Q, o_b, o_h, o_l, lse_b, lse_h, lse_l, q_len, heads, splits, batch,
    S: tl.constexpr,
):  # fmt: skip
    if S.pdl:
        gdc_wait()  # for the partial results
    pid = tl.program_id(0).to(tl.int64)
    head = pid % heads
    token = pid // heads
    b = token // q_len
    row = token % q_len
    if S.packed_q:
        b = token * 0
        row = token
    one = tl.arange(0, 1)  # [1]
    ok = one == 0
    acc = empty_acc(values_of(S), 1)
    m, l, acc = combine_splits(PARTIAL, PARTIAL_ML, one + pid * splits, splits, ok, acc, S.block, values_of(S))
    if S.sinks:
        sink = tl.load(SINKS + head + one)
        if S.packed_q:
            sink = tl.where(token < tl.load(CU_Q + batch), sink, float("-inf"))
        m, l, acc = normalise(m, l, acc, sink, True)
    else:
        m, l, acc = normalise(m, l, acc, m, False)
    store_acc(OUT + b * o_b + row * o_l + head * o_h + one, acc, ok, values_of(S), False)
    if S.lse:
        tl.store(LSE + b * lse_b + row * lse_l + head * lse_h + one, m + tl.log(l))
