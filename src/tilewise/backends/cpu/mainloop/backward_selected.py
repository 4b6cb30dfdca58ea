"""Key and block indices in the backward pass: a tile of rows visits only the keys of a block that any row selects.

They are loaded as a block of their own, in which entries of the list `t.selected` stand for keys, as in the forward
pass (`selected_keys.py`). dK and dV of the entries are then added to those of the whole block. Indices are sorted: a
bisection finds those of a block. Rows of a tile may have different lists; cells of keys that a row does not select are
hidden. Numba code.
"""

# mypy: ignore-errors
from __future__ import annotations

from numba import types

from ..codegen.load_store import get_i32, put_f32, put_i32, put_i64, row_add
from ..codegen.numba_ops import INF, ZERO, F, fill, jit, up
from ..codegen.vector import W
from ..kv_access import affine, rows_span, sequence
from ..params import SELECTED_BYTES
from .score_mod import bias_cells
from .selected_keys import selected_key


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
def list_at(p, tile, number):
    """The address of a list."""
    b = ZERO if p.cu_q else tile.b
    return p.indices + b * p.indices_b + tile.head * p.indices_h + number * p.indices_l


@jit
def first_index(p, indices, key):
    """The first of a list's sorted indices whose keys do not all precede `key`."""
    low, high = ZERO, p.max_selected // p.block
    while low < high:
        middle = (low + high) // 2
        if (types.int64(get_i32(indices + 4 * middle)) + 1) * p.block <= key:
            low = middle + 1
        else:
            high = middle
    return low


@jit
def keys_of(p, indices, at, lo, hi):
    """Keys from `lo` to `hi` of index number `at`: the first, and the one after the last."""
    first = types.int64(get_i32(indices + 4 * at)) * p.block
    return max(first, lo), min(first + p.block, hi)


@jit
def list_tile_keys(p, t, tile):
    """Lists the keys of a tile that any of its rows selects and may see, in their order. Returns their number.

    An entry is that of `list_selected`. `t.entries` then has the entry of each key.
    """
    _, _, kv_start, kv_len, offset = sequence(p, tile.b)
    lo, hi = rows_span(p, affine(p, tile.b, offset), tile.row, tile.rows, kv_len)
    lo, hi = max(lo, tile.start), min(hi, tile.end)
    entries = t.entries - 4 * tile.start
    for key in range(lo, hi):
        put_i32(entries + 4 * key, types.int32(-1))
    first, last = lists_of(p, tile)
    for number in range(first, last + 1):
        indices = list_at(p, tile, number)
        for at in range(first_index(p, indices, lo), first_index(p, indices, hi + p.block - 1)):
            start, end = keys_of(p, indices, at, lo, hi)
            for key in range(start, end):
                put_i32(entries + 4 * key, types.int32(0))
    count, batch_row = ZERO, ZERO if p.cu_k else tile.b
    for key in range(lo, hi):
        if get_i32(entries + 4 * key) == 0:
            put_i32(entries + 4 * key, types.int32(count))
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
    q_start, R, entries = sequence(p, tile.b)[0], p.heads // p.kv_heads * tile.rows, t.entries - 4 * tile.start
    fill(t.unselected, ZERO, up(R, W) * count, -INF)
    for i in range(tile.rows):
        indices = list_at(p, tile, (q_start + tile.row + i) // p.block)
        for at in range(first_index(p, indices, lo), first_index(p, indices, hi + p.block - 1)):
            start, end = keys_of(p, indices, at, lo, hi)
            for key in range(start, end):
                to = t.unselected + 4 * W * types.int64(get_i32(entries + 4 * key))
                for r in range(i, R, tile.rows):
                    put_f32(to + 4 * (r // W * count * W + r % W), F(0))


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
