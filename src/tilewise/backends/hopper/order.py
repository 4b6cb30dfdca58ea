"""The order in which packed sequences are done: those with the most keys first.

ORDER[r] is the sequence of rank r, START[r] the tiles of query rows before its own; START[batch + 1] is the number of
all tiles. Sequence number `batch` stands for the rows past the last one, which belong to nobody.
"""

import triton.language as tl

import triton


@triton.jit
def sizes(CU_Q, CU_K, at, batch, total_q, BM: tl.constexpr):
    """Tiles of query rows and keys of the sequences `at`; -1 keys where there is no such sequence."""
    begin = tl.load(CU_Q + at, mask=at <= batch, other=0)
    end = tl.load(CU_Q + at + 1, mask=at < batch, other=0)
    end = tl.where(at == batch, total_q, end)
    tiles = tl.where(at <= batch, (end - begin + BM - 1) // BM, 0)
    keys = tl.load(CU_K + at + 1, mask=at < batch, other=0) - tl.load(CU_K + at, mask=at < batch, other=0)
    return tiles, tl.where(at <= batch, keys, -1)


@triton.jit(do_not_specialize=["batch", "total_q"])
def order(CU_Q, CU_K, ORDER, START, batch, total_q, BM: tl.constexpr, RUN: tl.constexpr):
    """One program for RUN sequences: the rank of each is the number of those that come before it."""
    mine = tl.program_id(0) * RUN + tl.arange(0, RUN)
    _, keys = sizes(CU_Q, CU_K, mine, batch, total_q, BM)
    rank = tl.zeros([RUN], tl.int32)
    start = tl.zeros([RUN], tl.int32)
    total = 0
    for first in range(0, batch + 1, RUN):
        others = first + tl.arange(0, RUN)
        other_tiles, other_keys = sizes(CU_Q, CU_K, others, batch, total_q, BM)
        before = other_keys[None, :] > keys[:, None]
        before = before | ((other_keys[None, :] == keys[:, None]) & (others[None, :] < mine[:, None]))  # [RUN, RUN]
        rank += tl.sum(before.to(tl.int32), 1)
        start += tl.sum(tl.where(before, other_tiles[None, :], 0), 1)
        total += tl.sum(other_tiles, 0)
    tl.store(ORDER + rank, mine, mask=mine <= batch)
    tl.store(START + rank, start, mask=mine <= batch)
    tl.store(START + batch + 1, total)
