"""Dropout of a tile: which of its cells keep their weights, as `core/dropout.py` defines it."""

import triton.language as tl

import triton

from ...core.dropout import ROUNDS
from ..gpu.mask_rules import key_position

PHILOX_ROUNDS: tl.constexpr = tl.constexpr(ROUNDS)


@triton.jit
def seed_of(SEED, S: tl.constexpr):
    seed = 0
    if S.dropout:
        seed = tl.load(SEED)
    return seed


@triton.jit
def words_of(seed, block, qpos, head, b, shape: tl.constexpr):
    """Four words of 32 bits for each counter: positions of keys divided by 8, of queries, heads and the batch row."""
    c0 = tl.broadcast_to(block.to(tl.uint32), shape)
    c1 = tl.broadcast_to(qpos.to(tl.uint32), shape)
    c2 = tl.zeros(shape, tl.uint32) + head.to(tl.uint32)
    c3 = tl.zeros(shape, tl.uint32) + b.to(tl.uint32)
    return tl.philox(seed, c0, c1, c2, c3, PHILOX_ROUNDS)


@triton.jit
def kept_cells(drop, first, n, qpos, numbers, S: tl.constexpr):
    """Which cells [rows, BK] keep their weights, of queries at `qpos` [rows] and keys `n` [BK]. `drop`: seed, batch row
    and heads, one or [rows, 1]. If keys are at consecutive positions, the first of them `first`, a multiple of 8, each
    counter serves eight.
    """
    seed, b, head = drop
    BM: tl.constexpr = qpos.shape[0]
    BK: tl.constexpr = n.shape[0]
    if S.dropout_by_block:
        block = first // 8 + tl.arange(0, BK // 8)
        w0, w1, w2, w3 = words_of(seed, block[None, :], qpos[:, None], head, b, [BM, BK // 8])
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [BM, BK / 8, 2, 2], in their order
        number = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [BM, BK])
    else:
        kpos = key_position(n, numbers, S)[None, :]
        w0, w1, w2, w3 = words_of(seed, kpos >> 3, qpos[:, None], head, b, [BM, BK])
        at = (kpos >> 1) & 3
        word = tl.where(at == 0, w0, tl.where(at == 1, w1, tl.where(at == 2, w2, w3)))
        number = (word >> ((kpos & 1) * 16).to(tl.uint32)) & 0xFFFF
    return number.to(tl.int32) >= S.dropout_least


@triton.jit
def dropped(x, kept, S: tl.constexpr):
    """Weights after dropout, or gradients by them."""
    return tl.where(kept, x * S.dropout_scale, 0.0)
