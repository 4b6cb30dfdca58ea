"""Key and block indices in the backward pass: a tile of rows visits only the keys of a block that any row selects.

They are loaded as a block of their own, in which entries of the list `t.selected` stand for keys, as in the forward
pass (`selected_keys.py`). dK and dV of the entries are then added to those of the whole block. Indices are sorted: a
bisection finds those of a block. Rows of a tile may have different lists; cells of keys that a row does not select are
hidden. Numba code.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import types

from ..codegen.load_store import get_i32, put_f32, put_i32, put_i64, row_add
from ..codegen.numba_ops import INF, ZERO, F, fill, jit, up
from ..codegen.vector import W
from ..kv_access import affine, rows_span, sequence
from ..params import SELECTED_BYTES
from .score_mod import bias_cells
from .selected_keys import selected_key

NO_LIST, ANY_LIST = np.int64(-2), np.int64(-1)  # marks of keys; others are the numbers of lists


@jit
def lists_of(p, tile):
    """The first and the last list of indices of a tile's rows."""
    first = sequence(p, tile.b)[0] + tile.row
    return first // p.block, (first + tile.rows - 1) // p.block


@jit
def has_several_lists(p, tile):
    """Whether rows of a tile may select different keys."""
    if p.indices == 0:
        return False
    first, last = lists_of(p, tile)
    return first != last


@jit
def first_index(p, indices, block):
    """Which of a list's sorted indices is the first that is not below `block`."""
    low, high = ZERO, p.max_selected // p.block
    while low < high:
        middle = (low + high) // 2
        if get_i32(indices + 4 * middle) < block:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def mark_keys(p, t, tile, number, lo, hi, mark):
    """Marks the keys from `lo` to `hi` that list `number` selects."""
    b = ZERO if p.cu_q else tile.b
    indices = p.indices + b * p.indices_b + tile.head * p.indices_h + number * p.indices_l
    at, end = first_index(p, indices, lo // p.block), p.max_selected // p.block
    while at < end:
        first = types.int64(get_i32(indices + 4 * at)) * p.block
        if first >= hi:
            return
        for key in range(max(first, lo), min(first + p.block, hi)):
            put_i32(t.marks + 4 * (key - tile.start), types.int32(mark))
        at += 1


@jit
def list_tile_keys(p, t, tile):
    """Lists the keys of a tile that any of its rows selects and may see, in their order. Returns their number.

    An entry is that of `list_selected`.
    """
    _, _, kv_start, kv_len, offset = sequence(p, tile.b)
    lo, hi = rows_span(p, affine(p, tile.b, offset), tile.row, tile.rows, kv_len)
    lo, hi = max(lo, tile.start), min(hi, tile.end)
    for key in range(lo, hi):
        put_i32(t.marks + 4 * (key - tile.start), types.int32(NO_LIST))
    first, last = lists_of(p, tile)
    for number in range(first, last + 1):
        mark_keys(p, t, tile, number, lo, hi, ANY_LIST)
    count, batch_row = ZERO, ZERO if p.cu_k else tile.b
    for key in range(lo, hi):
        if get_i32(t.marks + 4 * (key - tile.start)) == ANY_LIST:
            to = t.selected + SELECTED_BYTES * count
            put_i32(to, types.int32(key))
            put_i32(to + 4, types.int32(kv_start + key))
            put_i64(to + 8, batch_row)
            count += 1
    if first != last:
        list_unselected(p, t, tile, lo, hi, count)
    return count


@jit
def list_unselected(p, t, tile, lo, hi, count):
    """What is added to the scores of a tile's rows and entries, [vectors of rows, count, W]: 0, or -inf where a row
    does not select the key.
    """
    R, (first, last) = p.heads // p.kv_heads * tile.rows, lists_of(p, tile)
    fill(t.unselected, ZERO, up(R, W) * count, -INF)
    for number in range(first, last + 1):
        mark_keys(p, t, tile, number, lo, hi, number)
        begin = number * p.block - sequence(p, tile.b)[0] - tile.row  # the list's first row in the tile
        for e in range(count):
            if get_i32(t.marks + 4 * (selected_key(t.selected, e) - tile.start)) != number:
                continue
            for i in range(max(ZERO, begin), min(tile.rows, begin + p.block)):
                for r in range(i, R, tile.rows):
                    put_f32(t.unselected + 4 * ((r // W * count + e) * W + r % W), F(0))


@jit
def hide_unselected(p, t, tile, s, ld, first, entry, count):
    """-inf to scores of keys that a row does not select: W rows from `first` on, `count` entries from `entry` on.
    Returns whether there may be any.
    """
    if not has_several_lists(p, tile):
        return False
    bias_cells(s, ld, count, t.unselected + 4 * (first * tile.end + entry * W))
    return True


@jit
def add_to_block(t, tile, start, sums, block_sums, width):
    """Adds the sums of a tile's entries to those of their keys in the block that begins at key `start`."""
    for e in range(tile.end):
        row_add(block_sums + 4 * (selected_key(t.selected, e) - start) * width, sums + 4 * e * width, width, F(1))
