"""Gradients of a float mask (dS, summed over the mask's broadcast dims) and of biases (sums of dS).

All that adds to a cell is in one work item (`Gradients.every_row`, `every_head`), except blocks of keys of a mask that
is broadcast over keys: each has a sum of its own.
"""

# mypy: ignore-errors
from __future__ import annotations

from ..codegen.load_store import get_f32, put_f32, put_one, row_add, transpose
from ..codegen.numba_ops import ZERO, F, jit, store_row, up
from ..codegen.vector import W
from ..kv_access import sequence
from .backward_cells import sum_keys
from .selected_keys import selected_key


@jit
def add_numbers(p, t, to, source, key, count):
    """Adds `count` numbers to those of keys from `key` on, the first of which is at `to`."""
    whole = ZERO if p.indices else count // W * W
    row_add(to + 4 * key, source, whole, F(1))
    for j in range(whole, count):
        at = to + 4 * (selected_key(t.selected, key + j) if p.indices else key + j)
        put_f32(at, get_f32(at) + get_f32(source + 4 * j))


@jit
def add_mask(p, g, t, tile, ds, ld, first, R, key, count):
    """Adds dS [count, W], of W rows from `first` on and keys from `key` on, to the gradient of the mask."""
    n, group = tile.rows, p.heads // p.kv_heads
    width = up(count, W)
    if g.dmask_block:
        sum_keys(ds, ld, count, t.mask_columns)
    else:
        for j in range(0, width, W):  # what it reads behind the last key is not used
            transpose(t.mask_rows + 4 * j, width, ds + 4 * j * ld, ld)
    for r in range(first, min(first + W, R)):
        to = g.dmask + tile.b * g.dmask_b + (tile.head * group + r // n) * g.dmask_h + (tile.row + r % n) * g.dmask_q
        source = t.mask_rows + 4 * (r - first) * width
        if g.dmask_block:
            to += tile.block * g.dmask_block
            put_f32(to, get_f32(to) + get_f32(t.mask_columns + 4 * (r - first)))
        elif p.indices and not g.dmask_sum:
            for j in range(count):
                cell = to + selected_key(t.selected, key + j) * g.dmask_k
                put_one(cell, g.dmask_dtype, ZERO, get_f32(source + 4 * j))
        elif not g.dmask_sum:  # each cell is written once, rounded
            store_row(to + key * g.dmask_k, g.dmask_dtype, source, count, F(1))
        elif g.dmask_q == 0 and r + 1 < min(first + W, R) and (r + 1) % n:
            row_add(source + 4 * width, source, width, F(1))  # summed with the next row, of the same cells
        else:
            add_numbers(p, t, to, source, key, count)


@jit
def add_bias(p, g, t, tile, ds, ld, first, R, key, count):
    """Adds dS [count, W], likewise, to the sums of rows (a sum for each block of keys) and of keys."""
    n, group, width = tile.rows, p.heads // p.kv_heads, up(count, W)
    q_start, _, kv_start, _, _ = sequence(p, tile.b)
    if g.dq_bias:
        sum_keys(ds, ld, count, t.mask_columns)
        base = g.dq_bias + tile.block * g.dq_bias_j + (ZERO if p.cu_q else tile.b) * g.dq_bias_b
        for r in range(first, min(first + W, R)):
            row = q_start + tile.row + r % n
            to = base + (tile.head * group + r // n) * g.dq_bias_h + row * g.dq_bias_l
            put_f32(to, get_f32(to) + get_f32(t.mask_columns + 4 * (r - first)))
    if g.dk_bias:
        for j in range(0, width, W):  # what it reads behind the last key is not used
            transpose(t.mask_rows + 4 * j, width, ds + 4 * j * ld, ld)
        base = g.dk_bias + (ZERO if p.cu_k else tile.b) * g.dk_bias_b + 4 * kv_start
        for r in range(first, min(first + W, R)):
            source = t.mask_rows + 4 * (r - first) * width
            if r + 1 < min(first + W, R) and (r + 1) % n:
                row_add(source + 4 * width, source, width, F(1))  # summed with the next row, of the same head
            else:
                add_numbers(p, t, base + (tile.head * group + r // n) * g.dk_bias_h, source, key, count)
