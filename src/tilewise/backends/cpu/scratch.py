"""A thread's scratch memory and its partition."""

# mypy: ignore-errors
from __future__ import annotations

from collections import namedtuple

import numpy as np
from numba.extending import register_jitable

from .codegen.numba_ops import jit
from .codegen.vector import W
from .config import FEW_KEYS, HEAD_BATCH_BYTES, PREFETCH_BYTE_KEYS
from .gemm.amx import BLOCK
from .gemm.fp32 import KEYS, PANEL

DIRECT_ROWS = 16  # up to this many query rows (of all heads of a group), products come straight from the cache
# np.int64 and not int: Numba compiles a function anew for every literal that it is called with.
PAD = np.int64(24)  # address tables are padded to a multiple of KEYS and of KEY_PAD
CHUNK = np.int64(48)  # keys of a sum of values
TAIL = np.int64(32)  # keys that the last tile of a sequence may have more, if they are read straight from the cache
SCORES = np.int64(FEW_KEYS + TAIL)  # of a row, in a tile of decode
PANEL_ = np.int64(PANEL)
GROUPS = 18  # scales of a row, at most
LINE = 64  # bytes of a cache line, on which every part starts
HEAD_BATCH = np.int64(HEAD_BATCH_BYTES)
Scratch = namedtuple(
    "Scratch",
    "acc k_table v_table k_next v_next k_scales v_scales m l alpha slopes lo hi positions "
    "some_lo some_hi all_lo all_hi mask_rows mask_columns states done row_sums "
    "q s keys values packed nonfinite weights",
)
AmxScratch = namedtuple("AmxScratch", "q acc s p sums k v rows")  # in the place of Scratch.q and what follows it


@register_jitable(error_model="numpy")  # Python calls it too, without compiling it
def round_up(n, to):
    return (n + to - 1) // to * to


@register_jitable(error_model="numpy")
def table_size(tile_keys):
    """Bytes of the addresses of a tile's rows."""
    return 8 * (tile_keys + TAIL + PAD + PREFETCH_BYTE_KEYS)


def shared_sizes(heads, kv_heads, value_dim, tile_rows, tile_keys, head_batch):
    """Bytes of what every mainloop uses, in the order of `Scratch`."""
    rows = max(round_up(heads // kv_heads * tile_rows, PANEL), DIRECT_ROWS)
    keys = tile_keys + TAIL + PAD
    return (
        4 * rows * round_up(value_dim, W),  # acc: [rows, Dv]
        head_batch * table_size(tile_keys),  # addresses of K's rows, and of some after them, for each head of a batch
        head_batch * table_size(tile_keys),  # and of V's
        8 * keys, 8 * keys,  # and of those of the next tile
        4 * keys * GROUPS, 4 * keys * GROUPS,  # their scales
        4 * rows, 4 * rows, 4 * rows, 4 * rows,  # m, l, alpha, slopes: float32, one a row
        4 * rows, 4 * rows, 4 * rows,  # lo, hi, positions: int32, one a row
        4 * rows, 4 * rows,  # keys that some row of a block sees, int32, one a block of ROWS
        4 * rows, 4 * rows,  # keys that all rows of a vector see, int32, one a vector
        4 * W * keys,  # a mask's rows for one vector of query rows
        4 * W * keys,  # the same by columns
        8 * heads,  # the mask's state for each head
        16,  # done: whether the AMX mainloop could do the item; whether weights are downscaled (`nonfinite.py`)
        4 * PANEL,  # totals: of a tile's weights, one a row of a panel
    )  # fmt: skip


def vector_sizes(heads, kv_heads, head_dim, value_dim, tile_rows, tile_keys, head_batch):
    """Bytes of what the fp32 mainloops use."""
    rows = max(round_up(heads // kv_heads * tile_rows, PANEL), DIRECT_ROWS)
    D, Dv = round_up(head_dim, W), round_up(value_dim, W)
    keys = tile_keys + TAIL + PAD
    return (
        4 * rows * D,  # q: [panels, D, PANEL], or [rows, D] if direct
        4 * max(keys * PANEL, head_batch * DIRECT_ROWS * SCORES),  # s: [keys, PANEL] of one panel, or [rows, keys]
        4 * keys * D,  # keys: [keys, D], widened
        4 * keys * Dv,  # values: [keys, Dv], widened
        max(4 * keys * Dv, min(4 * rows * D, HEAD_BATCH)),  # packed: V in panels; decode's queries as tiles or limbs
        4 * keys * Dv,  # nonfinite: V's non-finite values
        4 * SCORES * DIRECT_ROWS * ((value_dim + 31) // 32),  # weights: [groups, rows, keys]
    )


def tile_sizes(heads, kv_heads, head_dim, value_dim, tile_rows, tile_keys, parts):
    """Bytes of what the AMX mainloop uses; numbers are in `parts` parts."""
    rows = round_up(heads // kv_heads * tile_rows, BLOCK)
    D, Dv = round_up(head_dim, BLOCK), round_up(value_dim, BLOCK)
    keys = round_up(tile_keys, BLOCK)
    return (
        2 * parts * rows * D,  # q: [parts, panels, D / 2, 32] pairs
        4 * rows * Dv,  # acc: [panels, Dv, 32]
        4 * 2 * keys * BLOCK,  # s: [2 panels, 2 halves, keys, 16]
        2 * 2 * parts * keys * BLOCK,  # p: [parts, 2 panels, keys / 2, 32] pairs
        4 * BLOCK * BLOCK,  # sums: [32, 32]
        2 * parts * keys * D,  # k: [parts, keys, D], where K cannot be read where it lies
        2 * parts * keys * Dv,  # v: [parts, Dv, keys]
        (4 + 2 * parts * BLOCK) * max(D, Dv),  # rows: a float32 row, then [parts, 32, D or Dv] bf16
    )


def total(heads, kv_heads, head_dim, value_dim, tile_rows, tile_keys, head_batch, parts):
    """Bytes of a thread's scratch memory; `parts` is 0 if no matrix tiles are used."""
    sizes = shared_sizes(heads, kv_heads, value_dim, tile_rows, tile_keys, head_batch)
    vectors = vector_sizes(heads, kv_heads, head_dim, value_dim, tile_rows, tile_keys, head_batch)
    tiles = tile_sizes(heads, kv_heads, head_dim, value_dim, tile_rows, tile_keys, parts) if parts else (0,)
    spare = LINE * (len(sizes) + max(len(vectors), len(tiles)) + 1)
    return int(sum(sizes) + max(sum(vectors), sum(tiles)) + spare)


sizes_shared, sizes_of_vectors, sizes_of_tiles = jit(shared_sizes), jit(vector_sizes), jit(tile_sizes)


@jit
def after(address, size):
    return (address + size + LINE - 1) // LINE * LINE


@jit
def partition(p, base):
    z = sizes_shared(p.heads, p.kv_heads, p.value_dim, p.tile_rows, p.tile_keys, p.head_batch)
    acc = after(base, 0)
    k_table = after(acc, z[0])
    v_table = after(k_table, z[1])
    k_next = after(v_table, z[2])
    v_next = after(k_next, z[3])
    k_scales = after(v_next, z[4])
    v_scales = after(k_scales, z[5])
    m = after(v_scales, z[6])
    l = after(m, z[7])
    alpha = after(l, z[8])
    slopes = after(alpha, z[9])
    lo = after(slopes, z[10])
    hi = after(lo, z[11])
    positions = after(hi, z[12])
    some_lo = after(positions, z[13])
    some_hi = after(some_lo, z[14])
    all_lo = after(some_hi, z[15])
    all_hi = after(all_lo, z[16])
    mask_rows = after(all_hi, z[17])
    mask_columns = after(mask_rows, z[18])
    states = after(mask_columns, z[19])
    done = after(states, z[20])
    row_sums = after(done, z[21])
    q = after(row_sums, z[22])
    z = sizes_of_vectors(p.heads, p.kv_heads, p.head_dim, p.value_dim, p.tile_rows, p.tile_keys, p.head_batch)
    s = after(q, z[0])
    keys = after(s, z[1])
    values = after(keys, z[2])
    packed = after(values, z[3])
    nonfinite = after(packed, z[4])
    weights = after(nonfinite, z[5])
    return Scratch(acc, k_table, v_table, k_next, v_next, k_scales, v_scales, m, l, alpha, slopes, lo, hi,
                   positions, some_lo, some_hi, all_lo, all_hi, mask_rows, mask_columns, states, done, row_sums, q, s,
                   keys, values, packed, nonfinite, weights)  # fmt: skip


@jit
def partition_amx(p, t, parts):
    """The memory from `t.q` on, for matrix tiles."""
    z = sizes_of_tiles(p.heads, p.kv_heads, p.head_dim, p.value_dim, p.tile_rows, p.tile_keys, parts)
    q = t.q
    acc = after(q, z[0])
    s = after(acc, z[1])
    p_ = after(s, z[2])
    sums = after(p_, z[3])
    k = after(sums, z[4])
    v = after(k, z[5])
    return AmxScratch(q, acc, s, p_, sums, k, v, after(v, z[6]))


assert PAD % KEYS == 0
