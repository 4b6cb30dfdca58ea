"""Tile shapes, splits, prefetch distances and threads: plain functions of sizes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ...core.problem import Problem


@cache
def second_level_cache() -> int:
    """Bytes of a core's second-level cache; half a MiB if the system does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text[:-1]) * {"K": 1024, "M": 1024**2}[text[-1]]
    except (OSError, ValueError, KeyError):
        return 512 * 1024


def tile_rows(group: int, head_dim: int, value_dim: int, cache_bytes: int, most: int = 384) -> int:
    """Query rows of each head in a tile.

    All rows of the group share a packed tile of V, so the more of them the less packing weighs, as long as q and the
    accumulator stay in the second-level cache beside it: half of it, 64 to `most` rows. (384 rows against 192, one core
    with 2 MiB, float32, L 2048: 134 and 119 GFLOP/s at D 128, 126 and 113 at D 256.)
    """
    rows = cache_bytes // 2 // (4 * (head_dim + value_dim)) // 64 * 64
    return max(1, min(most, max(64, rows)) // group)


def even_rows(most: int, q_len: int, tasks: int, threads: int, step: int) -> int:
    """Query rows of a tile such that tiles are of one size, and two of them for each thread if the rows allow it.

    `tasks` is the number of sequences and KV heads; a tile is a multiple of `step` rows. (512 rows in tiles of 384 and
    128 left one of two threads without work for a fifth of the time.) What a row gives does not depend on its tile.
    """
    tiles = max(-(-q_len // most), min(-(-2 * threads // max(1, tasks)), q_len // 64))
    return max(1, min(most, -(-q_len // max(1, tiles) // step) * step))


FEW_KEYS = 96  # of a tile of decode: in any batch, beside matrix tiles too, for a row's bits depend on it


def tile_keys(parts: int) -> int:
    """Keys of a tile: 96 rows of scores and of a panel of V's columns fit the ways of a first-level cache.

    Matrix tiles (`parts` above 0) load and store their sums for each tile of keys, so that more of them are better.
    """
    return 256 if parts else FEW_KEYS


def split_size(tasks: int, keys: int, threads: int, tile: int, each: int = 4) -> int:
    """Keys of a split, 0 for no splitting: about `each` pieces for a thread, none under 512 keys, in whole tiles."""
    if threads < 2 or not 0 < tasks < each * threads or keys < 1024:
        return 0
    pieces = -(-each * threads // tasks)
    return max(512 // tile * tile, -(-keys // pieces // tile) * tile)


HEAD_BATCH_BYTES = 256 * 1024  # of queries and sums
# For a thread: no core waits long for one that is slower. (As below, medians: 8 pieces took 1.02 of the time in f32.)
HEAD_BATCH_PIECES = 16


def head_batch(kv_heads: int, row_bytes: int, splits: int, threads: int) -> int:
    """KV heads that one thread takes together from pages, tile by tile; they divide all of them.

    A page holds all heads of a token, so what the processor reads ahead of one head's rows is the next head's, and of
    no use to another thread. (Heads of a split of 192 keys shared by two threads took 1.13 of the time in f32 and 1.40
    in f16: 4 x 8192 keys of 32/8 heads of 128.)
    `row_bytes` is what the queries and sums of a head take; those of a head batch stay in L2. `splits`
    is how many pieces all keys can be cut into: there is work for every thread.
    """
    fits = [n for n in range(2, kv_heads + 1) if kv_heads % n == 0 and n * row_bytes <= HEAD_BATCH_BYTES]
    return max([1, *(n for n in fits if kv_heads // n * splits >= 2 * threads)])


def bytes_read(p: Problem) -> int:
    """Bytes of K and V, as wide as they are computed with if they are quantised."""
    return p.batch * p.kv_heads * p.kv_len * (p.head_dim * p.k_dtype.itemsize + p.value_dim * p.v_dtype.itemsize)


# Keys between the row that decode multiplies and the one that it asks for, into the second-level cache. (One core, f32,
# 4 x 8192 keys of 32/8 heads of 128: into the first-level cache 8 keys ahead it took 1.05 of the time, in pages 1.10;
# 48 keys in one go, half of that cache, 1.1 to 1.5.)
PREFETCH_KEYS = 16
# Rows of int8 and int4 are a half and a quarter as long. (Two cores, 8192 keys of 32/8 heads of 128, best of many in
# turns: int8 1.05 and 1.07 ms for 1.09 and 1.08, int4 0.89 for 0.91 and 0.90; f16 1.10 and 1.06.)
PREFETCH_BYTE_KEYS = 48
# From pages all heads of a key are read before the next ones. (Two cores, 4 x 8192 keys, medians: 12 keys took 1.00 of
# the time in f32 and 1.01 in f16, and in pieces twice as long 16 keys 1.01 of that and 24 keys 1.02 and 1.03.)
PREFETCH_PAGED_KEYS = 8


def prefetch_distance(p: Problem) -> int:
    """0 if all that is read stays in the second-level cache."""
    if bytes_read(p) <= second_level_cache():
        return 0
    if p.k_format.is_integer:
        return PREFETCH_BYTE_KEYS
    return PREFETCH_PAGED_KEYS if p.page_size else PREFETCH_KEYS


def threads_for(p: Problem, threads: int) -> int:
    """Waking a thread takes about 20 us, in which a core computes 2 MFLOP or reads 0.3 MB."""
    rows = p.total_q if p.packed_q else p.batch * p.q_len
    flops = 2 * rows * p.heads * p.kv_len * (p.head_dim + p.value_dim)
    return max(1, min(threads, 1 + int(max(flops / 4e6, bytes_read(p) / 6e5))))
