"""Tile shapes, splits, prefetch distances and threads: plain functions of sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ...core.problem import CascadeProblem, Problem
from ...core.storage import FORMATS, PLAIN
from .codegen.bf16_dot import has_bf16
from .codegen.vector import W
from .gemm import amx
from .gemm.fp32 import PANEL

DECODE_ROWS = 16  # up to this many query rows (of all heads of a group) take the decode mainloop
SPLIT_BYTES = 256 * 1024  # of the split-KV partials of a KV head: four splits for each thread take a MiB
BACKWARD_ROWS, BACKWARD_KEYS, BACKWARD_ITEMS = 128, (384, 192, 96), 6
SELECTED_KEYS = 768  # of a block in the backward pass with indices: cpu/backward-sparse in benchmarks/cpu/LOG.md


@dataclass(frozen=True)
class Config:
    """How a call is cut into work items."""

    threads: int
    tile_rows: int
    tile_keys: int
    split_size: int  # keys, 0 for no splits
    head_batch: int  # KV heads that a thread processes together
    partial_bytes: int  # of an item's split-KV partial
    max_work_items: int
    decode_rows: int  # most rows of a group for the decode mainloop
    bf16_dot: bool  # see `uses_bf16_dot_decode`


EVERY_ROW = 1 << 40


def tiled_prefill(p: Problem) -> tuple[str, int]:
    """The prefill kernel that multiplies tiles of bf16, and the parts of a number; "" and 0 for that of float32."""
    name = p.k_format.name
    if not (PLAIN[p.q_dtype] == p.k_format == p.v_format) or is_decode(p):
        return "", 0
    if amx.usable():
        return (f"prefill_amx {name}", amx.PARTS[name]) if name in amx.PARTS else ("", 0)
    return ("prefill_dot bf16", 1) if name == "bf16" and has_bf16() else ("", 0)


def uses_bf16_dot_decode(p: Problem) -> bool:
    """Whether decode multiplies by AVX-512 BF16 (`gemm/gemv_bf16.py`): V is in K, all is bf16, in whole vectors."""
    whole = p.head_dim % (2 * W) == 0 and p.value_dim % (2 * W) == 0
    return p.v_in_k and is_bf16_qk(p) and whole and has_bf16() and not amx.usable()


def uses_bf16_dot_qk(p: Problem) -> bool:
    """Whether decode multiplies Q K^T by AVX-512 BF16 in tiles that all rows see.

    Not with a dense mask: which tiles those are would depend on the tile map, which must not change a bit.
    """
    whole = p.head_dim % (2 * W) == 0
    return is_bf16_qk(p) and whole and p.mask is None and has_bf16() and not (amx.usable() or p.v_in_k)


def is_bf16_qk(p: Problem) -> bool:
    """Whether q and K are bf16."""
    return PLAIN[p.q_dtype] == p.k_format == FORMATS["bf16"]


def is_decode(p: Problem) -> bool:
    """Whether all rows of a call take the decode mainloop."""
    return p.group * p.sharing_queries <= DECODE_ROWS or uses_bf16_dot_decode(p)


def configure(p: Problem, threads: int, parts: int) -> Config:
    """`parts`: as in `tiled_prefill`."""
    rows, keys = query_rows(p, threads, parts), tile_keys(parts)
    tiles = row_tiles(p, rows)
    threads = threads_for(p, threads)
    batched = batched_heads(p, tiles, threads)
    split = split_keys(p, rows, keys, tiles * p.kv_heads // batched, threads, HEAD_BATCH_PIECES if batched > 1 else 4)
    splits = -(-p.selected_keys // split) + 1 if split else 1
    bf16_dot = uses_bf16_dot_decode(p)
    decode_rows = EVERY_ROW if bf16_dot else DECODE_ROWS
    partial_rows = min(p.group * min(rows, p.q_len), decode_rows if p.split_size else EVERY_ROW)
    return Config(
        threads=threads,
        tile_rows=rows if batched == 1 else max(rows, batched * p.sharing_queries),  # room for all heads
        tile_keys=keys,
        split_size=split,
        head_batch=batched,
        partial_bytes=4 * partial_rows * (padded_width(p) + 2) if split else 0,
        max_work_items=tiles * p.kv_heads * splits,
        decode_rows=decode_rows,
        bf16_dot=bf16_dot,
    )


def padded_width(p: Problem) -> int:
    """Columns of V in whole vectors."""
    return -(-p.value_dim // W) * W


def query_rows(p: Problem, threads: int, parts: int) -> int:
    """Query rows of each head in a tile."""
    most = 768 if parts else 384  # packing K and V in tiles takes more than packing V
    rows = tile_rows(p.group, p.head_dim, p.value_dim, second_level_cache(), most)
    if p.selection is not None:
        return -(-p.sharing_queries // -(-p.sharing_queries // rows))
    # By AVX-512 BF16 a row's bits depend on its tile, which then must not depend on the batch.
    if (not p.packed_q or p.q_len <= 1) and not uses_bf16_dot_decode(p):
        return even_rows(rows, p.q_len, p.batch * p.kv_heads, threads, max(1, PANEL // p.group))
    return rows


def row_tiles(p: Problem, rows: int) -> int:
    """The most tiles of `rows` query rows of a KV head."""
    block = max(1, p.sharing_queries)
    tiles = -(-p.q_len // block) * -(-block // rows) * p.batch
    return min(tiles, -(-p.total_q // rows) + p.batch) if p.packed_q else tiles


def batched_heads(p: Problem, tiles: int, threads: int) -> int:
    """KV heads that a thread processes together: see `head_batch`."""
    shared = bool(p.page_size) if p.selection is None else not p.selection.by_head  # heads share pages or lists
    if p.group * p.sharing_queries > DECODE_ROWS or not shared or p.mask is not None or p.biased:
        return 1
    row_bytes = 4 * p.group * p.sharing_queries * (p.head_dim + p.value_dim)
    return head_batch(p.kv_heads, row_bytes, tiles * max(1, p.selected_keys // 512), threads)


def split_keys(p: Problem, rows: int, keys: int, tasks: int, threads: int, each: int) -> int:
    """Keys of a split, 0 for no splits: the caller's `split_size`, else as in `split_size` below."""
    every_row = p.group * (p.total_q if p.packed_q else p.batch * p.q_len)
    split = p.split_size or 0 if is_decode(p) or p.packed_q else 0  # for sequences of few rows, in any batch
    if not p.split_size and (is_decode(p) or every_row * 4 * padded_width(p) <= SPLIT_BYTES):
        split = split_size(tasks, p.selected_keys, threads, keys, each)
    if p.selection is not None and rows > 1:  # lists are sorted in whole blocks
        split = -(-split // p.selection.block) * p.selection.block
    return split if split < p.selected_keys else 0


def backward_tile(p: Problem) -> tuple[int, int]:
    """Query rows of each head and keys of a tile of the backward pass: the same for any number of threads.

    More keys amortise loading a tile's rows and sums; fewer if there would be too few work items, and in float32, whose
    cells take twice the memory (cpu/backward-tile in benchmarks/cpu/LOG.md).
    """
    sizes: tuple[int, ...] = BACKWARD_KEYS if backward_in_bf16(p) else BACKWARD_KEYS[1:]
    if p.selection is not None:  # a tile visits few of them
        sizes = (SELECTED_KEYS, *BACKWARD_KEYS)
    enough = (n for n in sizes if p.batch * p.kv_heads * -(-p.kv_len // n) >= BACKWARD_ITEMS)
    return backward_rows(p), next(enough, sizes[-1])


def backward_rows(p: Problem) -> int:
    """Query rows of each head in a tile of the backward pass. With key indices: rows that share one list, at least
    one vector of them. Rows of several lists in one tile must visit the union of their keys.
    """
    rows = max(1, BACKWARD_ROWS // p.group)
    if p.selection is None:
        return rows
    block = p.selection.block
    shared = next(n for n in range(min(rows, block), 0, -1) if block % n == 0)
    return max(shared, W // p.group)


def backward_in_bf16(p: Problem) -> bool:
    """Whether the backward pass uses AVX-512 BF16."""
    return PLAIN[p.q_dtype] == p.k_format == p.v_format == FORMATS["bf16"] and has_bf16()


@cache
def second_level_cache() -> int:
    """Bytes of a core's L2 cache; half a MiB if the system does not say."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text[:-1]) * {"K": 1024, "M": 1024**2}[text[-1]]
    except (OSError, ValueError, KeyError):
        return 512 * 1024


def tile_rows(group: int, head_dim: int, value_dim: int, cache_bytes: int, most: int = 384) -> int:
    """Query rows of each head in a tile.

    All rows of the group share a packed tile of V, so more rows amortise packing, as long as q and the accumulator fit
    in half of L2: 64 to `most` rows (cpu/tile-rows in benchmarks/cpu/LOG.md).
    """
    rows = cache_bytes // 2 // (4 * (head_dim + value_dim)) // 64 * 64
    return max(1, min(most, max(64, rows)) // group)


def even_rows(most: int, q_len: int, tasks: int, threads: int, step: int) -> int:
    """Query rows of a tile such that tiles have equal sizes, and each thread has two if there are enough rows.

    `tasks` is the number of sequences times KV heads; a tile is a multiple of `step` rows. The result of a row does not
    depend on its tile. Gain: cpu/even-rows in benchmarks/cpu/LOG.md.
    """
    tiles = max(-(-q_len // most), min(-(-2 * threads // max(1, tasks)), q_len // 64))
    return max(1, min(most, -(-q_len // max(1, tiles) // step) * step))


DECODE_TILE_KEYS = 96  # keys of a decode tile: always the same, since a row's bits depend on it


def tile_keys(parts: int) -> int:
    """Keys of a tile: 96 rows of scores and of a panel of V's columns fit in L1 without conflicts.

    Products of bf16 (`parts` above 0) load and store their sums for each tile of keys, so more keys are better.
    """
    return 256 if parts else DECODE_TILE_KEYS


def split_size(tasks: int, keys: int, threads: int, tile: int, each: int = 4) -> int:
    """Keys of a split in whole tiles, 0 for no splits: about `each` splits for a thread, none under 512 keys."""
    if threads < 2 or not 0 < tasks < each * threads or keys < 1024:
        return 0
    pieces = -(-each * threads // tasks)
    return max(512 // tile * tile, -(-keys // pieces // tile) * tile)


HEAD_BATCH_BYTES = 256 * 1024  # of queries and sums
HEAD_BATCH_PIECES = 16  # work items for a thread: no core waits long for a slower one


def head_batch(kv_heads: int, row_bytes: int, splits: int, threads: int) -> int:
    """KV heads that a thread processes together, tile by tile; a divisor of all heads.

    A page holds all heads of a token, so the hardware prefetches the next head's rows behind one head's. That is wasted
    if another thread has that head (cpu/head-batch in benchmarks/cpu/LOG.md). `row_bytes` is the size of queries and
    sums of a head; those of a batch must fit in L2. `splits` is the number of splits of the keys: every thread must
    have work.
    """
    fits = [n for n in range(2, kv_heads + 1) if kv_heads % n == 0 and n * row_bytes <= HEAD_BATCH_BYTES]
    return max([1, *(n for n in fits if kv_heads // n * splits >= 2 * threads)])


def bytes_read(p: Problem) -> int:
    """Bytes of K and V that are read; of quantised ones, as wide as they are computed with. V in K counts once."""
    keys = p.kv_len if p.selection is None else min(p.kv_len, -(-p.q_len // p.selection.block) * p.selected_keys)
    values = 0 if p.v_in_k else p.value_dim * p.v_dtype.itemsize
    return p.batch * p.kv_heads * keys * (p.head_dim * p.k_dtype.itemsize + values)


# Keys from the row that decode multiplies to the one that it prefetches into L2: cpu/prefetch-distance in
# benchmarks/cpu/LOG.md.
PREFETCH_KEYS = 16
PREFETCH_BYTE_KEYS = 48  # rows of int8 and int4 are shorter


def prefetch_distance(p: Problem) -> int:
    """Keys to prefetch ahead; 0 if K and V fit in L2."""
    if bytes_read(p) <= second_level_cache():
        return 0
    if p.k_format.is_integer:
        return PREFETCH_BYTE_KEYS
    return PREFETCH_KEYS


# The least work of a thread, twice the time of waking it: cpu/wake in benchmarks/cpu/LOG.md.
THREAD_FLOPS, THREAD_BYTES = 4e6, 6e5


def threads_for(p: Problem, threads: int) -> int:
    """Threads to use: as many as have enough work."""
    rows = p.total_q if p.packed_q else p.batch * p.q_len
    flops = 2 * rows * p.heads * p.selected_keys * (p.head_dim + p.value_dim)
    return max(1, min(threads, 1 + int(max(flops / THREAD_FLOPS, bytes_read(p) / THREAD_BYTES))))


def cascade_gain(problem: CascadeProblem, rows: np.ndarray, tokens: int) -> float:
    """Seconds saved if sequences with `rows` queries each share one pass over a prefix of `tokens`.

    Gain: cpu/cascade-gain in benchmarks/cpu/LOG.md.
    """
    p = problem
    apart = sum(key_time(p, p.group * int(n)) for n in rows)
    together = key_time(p, p.group * int(rows.sum()))
    # Two sets of tables and the merge of two states
    fixed = 90e-6 + 0.4e-6 * p.kv_heads * p.group * int(rows.sum())
    return tokens * p.kv_heads * (apart - together) * 1e-9 / p.threads - fixed


def key_time(problem: CascadeProblem, rows: int) -> float:
    """Nanoseconds of a core for one key of one KV head and `rows` query rows; a fit: cpu/cascade-gain in the log."""
    width = problem.width / 128
    if rows <= DECODE_ROWS:
        return 6 + width * (7 + 4 * rows)
    return 60 + width * (25 + 1.6 * rows)
