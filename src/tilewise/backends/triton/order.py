"""The sequences of a packed batch, longest first, so that no long one is begun when the others are done.

`order` ranks them by their keys: `ORDER[r]` is the sequence of rank r, `ORDER[batch + 1 + r]` the number of tiles of
query rows before it. The rows past the last sequence count as a sequence, number `batch`, without keys.
"""

import triton.language as tl

import triton


@triton.jit(do_not_specialize=["batch", "total_q"])
def order(
    CU_Q, CU_K, KV_LENGTHS, ORDER, batch, total_q,
    VARLEN: tl.constexpr, BQ: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program, N >= batch + 1."""
    i = tl.arange(0, N)
    if VARLEN:
        keys = tl.load(CU_K + i + 1, mask=i < batch, other=0) - tl.load(CU_K + i, mask=i < batch, other=0)
    else:
        keys = tl.load(KV_LENGTHS + i, mask=i < batch, other=0)
    # Sorted as one number: keys, then low numbers first; what is no sequence comes last.
    rank = tl.where(i <= batch, (keys.to(tl.int64) + 1) << 32, 0) + (N - 1 - i)
    b = N - 1 - (tl.sort(rank, descending=True) & 0xFFFFFFFF).to(tl.int32)
    first = tl.load(CU_Q + b, mask=b <= batch, other=0)
    last = tl.load(CU_Q + b + 1, mask=b < batch, other=0)
    last = tl.where(b == batch, total_q, last)
    tiles = tl.where(b <= batch, tl.cdiv(last - first, BQ), 0)
    tl.store(ORDER + i, b, mask=i <= batch)
    tl.store(ORDER + batch + 1 + i, tl.cumsum(tiles, 0) - tiles, mask=i <= batch)
