"""A thread's scratch memory and how it is cut up."""

# mypy: ignore-errors
from __future__ import annotations

from collections import namedtuple

import numpy as np

from .access import jit
from .micro import KEYS, PANEL
from .simd import W

DIRECT_ROWS = 16  # up to this many query rows (of all heads of a group), products come straight from the cache
# np.int64 and not int: Numba compiles a function anew for every literal that it is called with.
PAD = np.int64(24)  # address tables are padded to a multiple of KEYS and of KEY_PAD
KEY_PAD = np.int64(8)  # keys that `dots` takes at once
PANEL_ = np.int64(PANEL)
GROUPS = 18  # scales of a row, at most

Scratch = namedtuple(
    "Scratch",
    "q acc s keys values packed strays k_table v_table k_scales v_scales m l shrink slopes lo hi positions "
    "some_lo some_hi all_lo all_hi mask_rows mask_columns states",
)


def sizes(heads, kv_heads, head_dim, value_dim, tile_rows, tile_keys):
    """Bytes of each part, in the order of `Scratch`; every part starts on a cache line."""
    rows = (heads // kv_heads * tile_rows + PANEL - 1) // PANEL * PANEL
    rows = max(rows, DIRECT_ROWS)
    D, Dv = (head_dim + W - 1) // W * W, (value_dim + W - 1) // W * W
    keys = tile_keys + 24
    line = 4 * rows + 64
    return (
        4 * rows * D + 64,  # q: [panels, D, PANEL], or [rows, D] if direct
        4 * rows * Dv + 64,  # acc: [rows, Dv]
        4 * max(keys * PANEL, DIRECT_ROWS * tile_keys) + 64,  # s: [keys, PANEL] of one panel, or [rows, keys]
        4 * keys * D + 64,  # keys: [keys, D], widened
        4 * keys * Dv + 64,  # values: [keys, Dv], widened
        4 * keys * Dv + 64,  # packed: V in panels of columns
        4 * keys * Dv + 64,  # strays: V's values that are not finite
        8 * keys + 64, 8 * keys + 64,  # addresses of K and V rows
        4 * keys * GROUPS + 64, 4 * keys * GROUPS + 64,  # their scales
        line, line, line, line,  # m, l, shrink, slopes: float32, one a row
        line, line, line,  # lo, hi, positions: int32, one a row
        line, line,  # keys that some row of a block sees, int32, one a block of ROWS
        line, line,  # keys that all rows of a vector see, int32, one a vector
        4 * W * keys + 64,  # a mask's rows for one vector of query rows
        4 * W * keys + 64,  # the same by columns
        8 * heads + 64,  # the mask's state for each head
    )  # fmt: skip


sizes_of = jit(sizes)


@jit
def align(address):
    return (address + 63) // 64 * 64


@jit
def cut(p, base):
    z = sizes_of(p.heads, p.kv_heads, p.head_dim, p.value_dim, p.tile_rows, p.tile_keys)
    q = align(base)
    acc = align(q + z[0] - 64)
    s = align(acc + z[1] - 64)
    keys = align(s + z[2] - 64)
    values = align(keys + z[3] - 64)
    packed = align(values + z[4] - 64)
    strays = align(packed + z[5] - 64)
    k_table = align(strays + z[6] - 64)
    v_table = align(k_table + z[7] - 64)
    k_scales = align(v_table + z[8] - 64)
    v_scales = align(k_scales + z[9] - 64)
    m = align(v_scales + z[10] - 64)
    l = align(m + z[11] - 64)
    shrink = align(l + z[12] - 64)
    slopes = align(shrink + z[13] - 64)
    lo = align(slopes + z[14] - 64)
    hi = align(lo + z[15] - 64)
    positions = align(hi + z[16] - 64)
    some_lo = align(positions + z[17] - 64)
    some_hi = align(some_lo + z[18] - 64)
    all_lo = align(some_hi + z[19] - 64)
    all_hi = align(all_lo + z[20] - 64)
    mask_rows = align(all_hi + z[21] - 64)
    mask_columns = align(mask_rows + z[22] - 64)
    states = align(mask_columns + z[23] - 64)
    return Scratch(q, acc, s, keys, values, packed, strays, k_table, v_table, k_scales, v_scales, m, l, shrink, slopes,
                   lo, hi, positions, some_lo, some_hi, all_lo, all_hi, mask_rows, mask_columns, states)  # fmt: skip


assert PAD % KEYS == 0
