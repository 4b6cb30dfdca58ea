"""Tile shapes and splits: plain functions of sizes."""

from __future__ import annotations

from ...problem import Problem


def tile_rows(group: int, head_dim: int, value_dim: int) -> int:
    """Query rows of each head in a tile.

    All rows of the group share a packed tile of V, so the more of them the less packing weighs: 192 in all, fewer for
    wide heads, whose q and accumulator would leave the second-level cache. It depends on nothing else, so that a
    sequence is cut alike in every batch.
    """
    rows = 192 if head_dim + value_dim <= 512 else 96
    return max(1, rows // group)


def tile_keys(head_dim: int, value_dim: int) -> int:
    """Keys of a tile: scores, packed keys and values stay in the second-level cache."""
    return 128 if head_dim + value_dim <= 512 else 64


def split_size(tasks: int, keys: int, threads: int) -> int:
    """Keys of a split, 0 for no splitting: about four pieces for each thread, none under 512 keys."""
    if threads < 2 or tasks >= 4 * threads or keys < 1024:
        return 0
    pieces = -(-4 * threads // tasks)
    return max(512, -(-keys // pieces // 128) * 128)


def threads_for(p: Problem, threads: int) -> int:
    """Waking a thread takes about 20 us, in which a core computes 2 MFLOP or reads 0.3 MB."""
    rows = p.total_q if p.packed_q else p.batch * p.q_len
    flops = 2 * rows * p.heads * p.kv_len * (p.head_dim + p.value_dim)
    read = p.batch * p.kv_heads * p.kv_len * (p.head_dim * p.k_dtype.itemsize + p.value_dim * p.v_dtype.itemsize)
    return max(1, min(threads, 1 + int(max(flops / 4e6, read / 6e5))))
