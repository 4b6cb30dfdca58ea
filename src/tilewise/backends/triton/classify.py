"""Which key tiles a dense mask leaves to each tile of query rows, in two small launches.

`classify` looks at every cell: 0 for a tile without a visible cell, 2 if every cell is visible and, in a float mask,
exactly 0, else 1 (mixed); cells past the edges count as neither. `compact` writes, for each plane and tile of query
rows, the list of tiles to visit, `LIST[i] = 2 * tile + mixed`, and `RANK[t]`, the number of them before tile t, so
that a kernel finds the entries of any range of tiles. Its states may also come from a `TileMap`, or be all mixed.
"""

import triton
import triton.language as tl


@triton.jit
def either(a, b):
    return a | b


@triton.jit(do_not_specialize=["q_len", "kv_len", "heads", "tiles", "n"])
def classify(
    MASK, STATES, mask_b, mask_h, mask_q, mask_k, q_len, kv_len, heads, tiles, n,
    BQ: tl.constexpr, BK: tl.constexpr, FLOAT: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One program for RUN tiles of a row of tiles; STATES is [planes, tiles, n]."""
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % tiles
    head = pid // tiles % heads
    b = pid // tiles // heads
    row = tile * BQ + tl.arange(0, BQ)
    first = tl.program_id(1) * RUN
    col = (first * BK + tl.arange(0, RUN * BK)).to(tl.int64)
    at = MASK + b * mask_b + head * mask_h + (row * mask_q)[:, None] + (col * mask_k)[None, :]
    inside = (row < q_len)[:, None] & (col < kv_len)[None, :]  # [BQ, RUN * BK]
    cell = tl.load(at, mask=inside, other=0)
    if FLOAT:
        cell = cell.to(tl.float32)
        seen = inside & (cell != float("-inf"))
        partial = inside & (cell != 0)
    else:
        seen = inside & (cell != 0)
        partial = inside & (cell == 0)
    flags = seen.to(tl.int32) | (partial.to(tl.int32) << 1)
    flags = tl.reshape(tl.reduce(flags, 0, either), [RUN, BK])
    flags = tl.reduce(flags, 1, either)  # [RUN]
    state = (flags & 1) * (2 - (flags >> 1))
    t = first + tl.arange(0, RUN)
    tl.store(STATES + pid * n + t, state.to(tl.uint8), mask=t < n)


@triton.jit(do_not_specialize=["n"])
def compact(STATES, LIST, RANK, row, column, n, ALL: tl.constexpr, RUN: tl.constexpr):
    """One program for each row of tiles; `row` and `column` are the strides of STATES."""
    pid = tl.program_id(0).to(tl.int64)
    count = 0
    for first in range(0, n, RUN):
        t = first + tl.arange(0, RUN)
        if ALL:
            state = (t < n).to(tl.int32)
        else:
            state = tl.load(STATES + pid * row + t * column, mask=t < n, other=0).to(tl.int32)
        seen = (state != 0).to(tl.int32)
        rank = count + tl.cumsum(seen, 0) - seen  # [RUN]
        tl.store(RANK + pid * (n + 1) + t, rank, mask=t < n)
        tl.store(LIST + pid * n + rank, t * 2 + (state == 1).to(tl.int32), mask=seen != 0)
        count += tl.sum(seen, 0)
    tl.store(RANK + pid * (n + 1) + n, count)
