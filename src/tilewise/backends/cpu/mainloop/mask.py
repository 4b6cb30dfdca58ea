"""Masks: their cells as numbers to add, and the states of their tiles. Numba code."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from numba import types

from ..codegen import dtypes
from ..codegen.load_store import floats_to_f32, get_f32, get_i64, get_one, get_u8, put_f32, put_i64, row_add
from ..codegen.numba_ops import INF, ZERO, F, fill, jit
from ..codegen.vector import W
from ..kv_access import affine, hidden_by_position, sequence, tree_position
from .selected_keys import selected_key

SKIP, MIXED, FULL = 0, 1, 2  # what a mask does to a tile
MASKS, BIASES = np.int64(1), np.int64(2)  # what `list_added` adds; not int, or it would be compiled for each


@jit
def mask_row(p, b, head, i):
    """The address of the mask's cells of query i."""
    return p.mask + b * p.mask_b + head * p.mask_h + i * p.mask_q


@jit
def mask_cell(p, row, j):
    """What a mask's cell adds to a score: 0 or -inf, or the cell."""
    at = row + j * p.mask_k
    if p.mask_dtype == dtypes.BOOL:
        return F(0) if get_u8(at) != 0 else -INF
    return get_one(at, p.mask_dtype, 0)


@jit
def list_mask(p, row, to, first, count, padded, selected):
    """Cells first..first + count of a mask's row (or entries of `selected`) as numbers to add; zeros up to `padded`."""
    whole = count // W * W
    if selected:
        for j in range(count):
            put_f32(to + 4 * j, mask_cell(p, row, selected_key(selected, first + j)))
    elif p.mask_k == 0:
        fill(to, ZERO, count, mask_cell(p, row, 0))
    elif p.mask_dtype == dtypes.BOOL:
        for j in range(count):
            put_f32(to + 4 * j, F(0) if get_u8(row + first + j) != 0 else -INF)
    else:
        at = row + first * p.mask_k
        floats_to_f32(to, at, p.mask_dtype, whole)
        for j in range(whole, count):
            put_f32(to + 4 * j, mask_cell(p, row, first + j))
    fill(to, count, padded, F(0))


# The span of a mask's row in `Params.spans`, 0 if not computed yet. One number, so that threads may race.
KNOWN, PLAIN_ROW, LO_BIT, HI_BIT, BITS = 1, 2, 2, 33, 2**31 - 1


@jit
def mask_span(p, b, head, i, lo, hi):
    """The span within keys `lo` to `hi` of a row outside of which the mask hides all, and whether it adds 0 within.

    Each row is scanned once for all heads and batch rows that share it. The spans of a mask_mod are known.
    """
    if lo >= hi:
        return types.int64(0), types.int64(0), True
    at = p.spans + b * p.spans_b + head * p.spans_h + i * p.spans_q
    span = get_i64(at)
    if span == 0:
        lo, hi, plain = find_span(p, mask_row(p, b, head, i), lo, hi)
        span = KNOWN + (PLAIN_ROW if plain else 0) + (types.int64(lo) << LO_BIT) + (types.int64(hi) << HI_BIT)
        put_i64(at, span)
    return max(lo, (span >> LO_BIT) & BITS), min(hi, (span >> HI_BIT) & BITS), (span & PLAIN_ROW) != 0


@jit
def mask_words(p):
    """A word (8 bytes) of a mask: the number of cells; its value if all are hidden; its value if none adds anything,
    and which bits of that matter: not the sign of floats.
    """
    if p.mask_dtype == dtypes.BOOL:
        return 8, types.int64(0), types.int64(0x0101010101010101), types.int64(-1)
    if p.mask_dtype == dtypes.F32:
        return 2, types.int64(-0x7FFFFF00800000), types.int64(0), types.int64(0x7FFFFFFF7FFFFFFF)
    if p.mask_dtype == dtypes.F16:
        return 4, types.int64(-0x3FF03FF03FF0400), types.int64(0), types.int64(0x7FFF7FFF7FFF7FFF)
    return 4, types.int64(-0x7F007F007F0080), types.int64(0), types.int64(0x7FFF7FFF7FFF7FFF)


@jit
def find_span(p, row, lo, hi):
    """Computes `mask_span`; the cells are contiguous."""
    per, hidden, plain, bits = mask_words(p)
    while lo + 4 * per <= hi and differs(row + lo * p.mask_k, hidden, -1) == 0:
        lo += 4 * per
    while lo < hi and mask_cell(p, row, lo) == -INF:
        lo += 1
    while hi - 4 * per >= lo and differs(row + (hi - 4 * per) * p.mask_k, hidden, -1) == 0:
        hi -= 4 * per
    while hi > lo and mask_cell(p, row, hi - 1) == -INF:
        hi -= 1
    j = lo
    while j + 4 * per <= hi and differs(row + j * p.mask_k, plain, bits) == 0:
        j += 4 * per
    while j < hi and mask_cell(p, row, j) == F(0):
        j += 1
    return lo, hi, j == hi


@jit
def differs(at, word, bits):
    """The bits in which any of four words differs from `word`."""
    a, b, c, d = get_i64(at), get_i64(at + 8), get_i64(at + 16), get_i64(at + 24)
    return ((a ^ word) | (b ^ word) | (c ^ word) | (d ^ word)) & bits


@jit
def has_bias(p):
    return p.q_bias != 0 or p.k_bias != 0


@jit
def query_bias(p, b, head, i):
    """The q_bias of query i of a sequence; 0 if there is none."""
    if p.q_bias == 0:
        return F(0)
    row = sequence(p, b)[0] + i
    return get_f32(p.q_bias + (ZERO if p.cu_q else b) * p.q_bias_b + head * p.q_bias_h + row * p.q_bias_l)


@jit
def key_bias(p, b, head, j):
    """The address of the k_bias of key j; 0 if there is none."""
    if p.k_bias == 0:
        return ZERO
    row = sequence(p, b)[2] + j
    return p.k_bias + (ZERO if p.cu_k else b) * p.k_bias_b + head * p.k_bias_h + row * p.k_bias_l


@jit
def tree_start(p, b):
    """The first key that a tree mask covers: the queries' own, the last Lq keys."""
    _, q_len, _, kv_len, _ = sequence(p, b)
    return kv_len - q_len


@jit
def has_bias_or_tree(p, b, end):
    """Whether biases, or a tree mask over keys before `end`, apply besides a mask. Selected keys may be anywhere."""
    return has_bias(p) or (p.tree != 0 and (p.indices != 0 or end > tree_start(p, b)))


@jit
def tree_hides(p, b, i, j):
    """Whether a tree mask hides key j from query i, or rules do by the positions of its nodes."""
    column = j - tree_start(p, b)
    if column < 0:
        return False
    if get_u8(p.tree + b * p.tree_b + i * p.tree_q + column) == 0:
        return True
    if p.positions == 0:
        return False
    positions = affine(p, b, ZERO)
    return hidden_by_position(p, tree_position(positions, i), tree_position(positions, column))


@jit
def last_parts(p):
    """The parts that are added last. A mask may be so large that biases added to it would be rounded off: they are
    added before it.
    """
    return MASKS if p.mask and has_bias(p) else MASKS | BIASES


@jit
def keep_hidden(p, at, to, first, count, selected):
    """Writes -inf to cells of a mask that biases hide."""
    b, head, i = at
    if query_bias(p, b, head, i) == -INF:
        fill(to, ZERO, count, -INF)
    elif p.k_bias:
        keys = key_bias(p, b, head, ZERO)
        for j in range(count):
            if get_f32(keys + selected_key(selected, first + j) * p.k_bias_l) == -INF:
                put_f32(to + 4 * j, -INF)


@jit
def list_added(p, at, to, first, count, padded, state, selected, parts):
    """Lists what is added to the scores of query `at` (batch row, head, query) and keys first..first + count (or
    entries of `selected`); zeros up to `padded`.

    `parts`: MASKS (the mask, whose tile has this `state`, and the tree mask), BIASES, or both.
    """
    b, head, i = at
    if state == SKIP:
        fill(to, ZERO, padded, -INF)
        return
    bias = query_bias(p, b, head, i) if parts & BIASES else F(0)
    if p.mask and state != FULL and parts & MASKS:
        list_mask(p, mask_row(p, b, head, i), to, first, count, padded, selected)
        if bias != F(0):
            for j in range(count):
                put_f32(to + 4 * j, get_f32(to + 4 * j) + bias)
        if parts == MASKS and p.mask_dtype != dtypes.BOOL:
            keep_hidden(p, at, to, first, count, selected)
    else:
        fill(to, ZERO, count, bias)
        fill(to, count, padded, F(0))
    if p.k_bias and parts & BIASES:
        whole = count // W * W if p.k_bias_l == 4 and selected == 0 else ZERO
        row_add(to, key_bias(p, b, head, first), whole, F(1))
        keys = key_bias(p, b, head, ZERO)
        for j in range(whole, count):
            put_f32(to + 4 * j, get_f32(to + 4 * j) + get_f32(keys + selected_key(selected, first + j) * p.k_bias_l))
    if p.tree and parts & MASKS:
        for j in range(ZERO if selected else max(ZERO, tree_start(p, b) - first), count):
            if tree_hides(p, b, i, selected_key(selected, first + j)):
                put_f32(to + 4 * j, -INF)


@jit
def classify(p, b, head, row, rows, start, end):
    """The state (skip, mixed, full) of `rows` rows from `row` on and keys `start` to `end` of one head."""
    if p.mask_q == 0:
        rows = 1
    if p.mask_k == 0:
        end = start + 1
    some, all_plain = False, True
    for i in range(row, row + rows):
        cells = mask_row(p, b, head, i)
        if p.mask_dtype == dtypes.BOOL:
            for j in range(start, end):
                seen = get_u8(cells + j * p.mask_k) != 0
                some |= seen
                all_plain &= seen
        else:
            for j in range(start, end):
                x = get_one(cells + j * p.mask_k, p.mask_dtype, 0)
                some |= x != -INF
                all_plain &= x == F(0)
        if some and not all_plain:
            return MIXED
    return FULL if all_plain else (MIXED if some else SKIP)


@jit
def tile_state(p, b, head, row, rows, start, end):
    """The mask's state of a tile: from the tile map where that is skip or full, else from the mask.

    Map tiles of different states may cover a full tile. Decode has other products for full tiles: their states, and so
    the result's bits, must not depend on a map.
    """
    if p.indices:  # its keys may be anywhere
        return types.int64(MIXED)
    if p.states:
        states = p.states + b * p.states_b + head * p.states_h + row // p.tile_rows * p.states_q
        first = types.int64(get_u8(states + start // p.tile_keys * p.states_k))
        last = types.int64(get_u8(states + (end - 1) // p.tile_keys * p.states_k))  # a split may start inside a tile
        if first == last and first != MIXED:
            return first
    return classify(p, b, head, row, rows, start, end)


@jit
def read_states(p, item, states, start, end):
    """The mask's states of a tile for each head of the group. Returns whether all are full and nothing else is added,
    and whether all are skipped.
    """
    group = p.heads // p.kv_heads
    full, skipped = True, True
    state = types.int64(FULL)
    for g in range(group):
        if p.mask and (g == 0 or p.mask_h != 0):
            state = tile_state(p, item.b, item.head * group + g, item.row, item.rows, start, end)
        put_i64(states + 8 * g, state)
        full &= state == FULL and not has_bias_or_tree(p, item.b, end)
        skipped &= state == SKIP
    return full, skipped
