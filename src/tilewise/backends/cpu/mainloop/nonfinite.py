"""Non-finite fix-up: non-finite values reach only rows that see their key; overflowing sums are recomputed."""

# mypy: ignore-errors
from __future__ import annotations

from ..codegen.load_store import get_f32, get_i32, get_i64, put_f32
from ..codegen.numba_ops import INF, F, jit
from .mask import FULL, SKIP, key_bias, mask_cell, mask_row, query_bias, tree_hides
from .selected_keys import selected_key, selected_list

# Sums of large values may overflow where their mean does not: they are then recomputed with weights times DOWNSCALE. A
# row's l is stored negative if its acc has such weights.
DOWNSCALE, UPSCALE = F(2.0**-32), F(2.0**32)


@jit
def extract_nonfinite(t, count, width):
    """Moves non-finite values from `values` to `nonfinite`, which is 0 elsewhere."""
    for at in range(0, 4 * count * width, 4):
        x = get_f32(t.values + at)
        finite = x - x == F(0)
        put_f32(t.nonfinite + at, F(0) if finite else x)
        if not finite:
            put_f32(t.values + at, F(0))


@jit
def is_visible(p, t, item, r, key):
    """Whether row r of the item sees a key of the tile whose mask states are in `states`."""
    if not get_i32(t.lo + 4 * r) <= key < get_i32(t.hi + 4 * r):
        return False
    state = get_i64(t.states + 8 * (r // item.rows))
    head = item.head * (p.heads // p.kv_heads) + r // item.rows
    if query_bias(p, item.b, head, item.row + r % item.rows) == -INF:
        return False
    cell = selected_key(selected_list(p, t), key)
    at = key_bias(p, item.b, head, cell)
    if at and get_f32(at) == -INF:
        return False
    if p.tree and tree_hides(p, item.b, item.row + r % item.rows, cell):
        return False
    if p.mask == 0 or state == FULL:
        return True
    return state != SKIP and mask_cell(p, mask_row(p, item.b, head, item.row + r % item.rows), cell) != -INF


@jit
def add_nonfinite(p, t, item, first_row, rows, count, width, origin, key_step, row_step):
    """acc += p * value for non-finite values, in those of `rows` rows from `first_row` on that see them.

    Steps are those of p, in floats.
    """
    for r in range(first_row, first_row + rows):
        for j in range(count):
            if not is_visible(p, t, item, r, origin + j):
                continue
            weight = get_f32(t.s + 4 * (j * key_step + (r - first_row) * row_step))
            if p.mod_columns and weight == F(0):  # a function hides it
                continue
            for d in range(width):
                value = get_f32(t.nonfinite + 4 * (j * width + d))
                if value != F(0):
                    at = t.acc + 4 * (r * width + d)
                    put_f32(at, get_f32(at) + weight * value)


@jit
def is_downscaled(t):
    """Whether weights are multiplied by DOWNSCALE."""
    return get_i64(t.downscaled) != 0
