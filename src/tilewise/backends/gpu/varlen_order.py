"""Varlen order: the sequences of a packed batch, longest first, so that no long one begins when the others are done.

Sequences are ranked by number of keys. Rows past the last sequence count as a sequence, number `batch`, without keys.
`sort_sequences` is one program, for batches that it can sort at once; `rank_sequences` takes any number.
"""

import triton.language as tl

import triton


@triton.jit(do_not_specialize=["batch", "total_q"])
def sort_sequences(
    CU_Q, CU_K, KV_LENGTHS, ORDER, batch, total_q,
    VARLEN: tl.constexpr, BQ: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program, N >= batch + 1. `ORDER[r]` is the sequence of rank r, `ORDER[batch + 1 + r]` the number of tiles of
    query rows before it.
    """
    i = tl.arange(0, N)
    if VARLEN:
        keys = tl.load(CU_K + i + 1, mask=i < batch, other=0) - tl.load(CU_K + i, mask=i < batch, other=0)
    else:
        keys = tl.load(KV_LENGTHS + i, mask=i < batch, other=0)
    # One sort key: number of keys, then lower indices first; padding comes last.
    rank = tl.where(i <= batch, (keys.to(tl.int64) + 1) << 32, 0) + (N - 1 - i)
    b = N - 1 - (tl.sort(rank, descending=True) & 0xFFFFFFFF).to(tl.int32)
    first = tl.load(CU_Q + b, mask=b <= batch, other=0)
    last = tl.load(CU_Q + b + 1, mask=b < batch, other=0)
    last = tl.where(b == batch, total_q, last)
    tiles = tl.where(b <= batch, tl.cdiv(last - first, BQ), 0)
    tl.store(ORDER + i, b, mask=i <= batch)
    tl.store(ORDER + batch + 1 + i, tl.cumsum(tiles, 0) - tiles, mask=i <= batch)


@triton.jit
def sizes(CU_Q, CU_K, at, batch, total_q, BM: tl.constexpr):
    """Number of query tiles and of keys of the sequences `at`; -1 keys where there is no such sequence."""
    begin = tl.load(CU_Q + at, mask=at <= batch, other=0)
    end = tl.load(CU_Q + at + 1, mask=at < batch, other=0)
    end = tl.where(at == batch, total_q, end)
    tiles = tl.where(at <= batch, (end - begin + BM - 1) // BM, 0)
    keys = tl.load(CU_K + at + 1, mask=at < batch, other=0) - tl.load(CU_K + at, mask=at < batch, other=0)
    return tiles, tl.where(at <= batch, keys, -1)


@triton.jit(do_not_specialize=["batch", "total_q"])
def rank_sequences(CU_Q, CU_K, ORDER, START, batch, total_q, BM: tl.constexpr, RUN: tl.constexpr):
    """One program for RUN sequences: the rank of each is the number of those that come before it.

    ORDER[r] is the sequence of rank r, START[r] the tiles of query rows before its own, START[batch + 1] all tiles.
    """
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
