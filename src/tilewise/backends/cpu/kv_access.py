"""Access to K and V: sequences, key spans, addresses of rows in tensors or pages, scales. Numba code."""

# mypy: ignore-errors
from __future__ import annotations

from collections import namedtuple

import numpy as np
from numba import types

from ...core.mask_rules import OFFSET_KINDS
from .codegen import dtypes
from .codegen.load_store import get_i32, get_i64, get_one, put_f32, put_i64, put_series
from .codegen.numba_ops import ONE, ZERO, F, fill, jit, row_to_f32, up
from .codegen.vector import W
from .params import SELECTED_BYTES

END = OFFSET_KINDS["end"]
KEY_PAD = np.int64(8)  # keys that `qk` multiplies at once
LIST_PAD = np.int64(16)  # keys that integer dots multiply at once
# K or V: address, strides over the batch (or pages), heads and rows, dtype, width; its scales likewise, their group;
# and the columns that are in k_shared
Source = namedtuple("Source", "base b h l dtype width scales scales_b scales_h scales_l scales_dtype group shared")
# Positions: that of the first query, then as in `MaskRules.places`; for a tree the address of its nodes' positions (0:
# none), which are also those of the queries' own keys, and the first of these keys
Affine = namedtuple("Affine", "offset k_start k_stride q_stride tree tree_start")
# The sequence and KV head of rows; the address of the list of selected keys, or 0. With a list, keys are counted by its
# entries (`mainloop/selected_keys.py`).
KVLocation = namedtuple("KVLocation", "b head kv_start selected")


@jit
def sequence(p, b):
    """Batch row b: its first query row, its queries, its first key row, its keys, the position of its first query."""
    q_start, q_len, kv_start, kv_len = 0, p.q_len, 0, p.kv_len
    if p.cu_q:
        q_start = types.int64(get_i32(p.cu_q + 4 * b))
        q_len = types.int64(get_i32(p.cu_q + 4 * b + 4)) - q_start
    if p.cu_k:
        kv_start = types.int64(get_i32(p.cu_k + 4 * b))
        kv_len = types.int64(get_i32(p.cu_k + 4 * b + 4)) - kv_start
    if p.kv_lengths:
        kv_len = types.int64(get_i32(p.kv_lengths + 4 * b))
    offset = p.rules.q_offset
    if p.q_offsets:
        offset = types.int64(get_i32(p.q_offsets + 4 * b))
    elif p.rules.offset_kind == END:
        offset = kv_len - q_len
    return q_start, q_len, kv_start, kv_len, offset


@jit
def affine(p, b, offset):
    """The positions of keys and queries of batch row b, whose first query is at `offset`."""
    tree = tree_start = types.int64(0)
    if p.positions:
        _, q_len, _, kv_len, _ = sequence(p, b)
        tree, tree_start = p.positions + b * p.positions_b, kv_len - q_len
    if p.row_places:
        at = p.row_places + 12 * b
        k_start, k_stride = types.int64(get_i32(at)), types.int64(get_i32(at + 4))
        return Affine(offset, k_start, k_stride, types.int64(get_i32(at + 8)), tree, tree_start)
    return Affine(offset, p.rules.k_start, p.rules.k_stride, p.rules.q_stride, tree, tree_start)


@jit
def tree_position(positions, row):
    """The position of node `row` of a tree, not before the keys that precede the tree."""
    return max(types.int64(get_i32(positions.tree + 4 * row)), positions.tree_start)


@jit
def hidden_by_position(p, position, key_position):
    """Whether the rules hide a key from a query by their positions."""
    rules, behind = p.rules, position - key_position
    if (rules.causal and behind < 0) or (rules.has_left and behind > rules.left):
        return True
    if rules.has_right and -behind > rules.right:
        return True
    return rules.chunk != 0 and position // rules.chunk != key_position // rules.chunk


@jit
def rows_before(distance, stride):
    """How many rows at positions 0, stride, 2 * stride, ... are before `distance`; may be negative."""
    return distance if stride == 1 else -(-distance // stride)


@jit
def key_span(p, positions, row, kv_len):
    """Keys [lo, hi) that position and length rules leave to query `row`; hi <= lo if none. See `core/mask_rules.py`.

    With positions of a tree's nodes it covers only keys before the tree: see `tree_hides`.
    """
    if positions.tree:
        position, lo = tree_position(positions, row), types.int64(0)
        if p.rules.has_left:
            lo = max(lo, position - p.rules.left)
        if p.rules.chunk:
            lo = max(lo, position // p.rules.chunk * p.rules.chunk)
        return min(lo, max(positions.tree_start, types.int64(0))), kv_len
    rules, position = p.rules, positions.offset + positions.q_stride * row
    near, stride = position - positions.k_start, positions.k_stride
    lo, hi = 0, kv_len
    if rules.causal:
        hi = min(hi, rows_before(near + 1, stride))
    if rules.has_left:
        lo = max(lo, rows_before(near - rules.left, stride))
    if rules.has_right:
        hi = min(hi, rows_before(near + rules.right + 1, stride))
    if rules.chunk:
        start = position // rules.chunk * rules.chunk - positions.k_start
        lo, hi = max(lo, rows_before(start, stride)), min(hi, rows_before(start + rules.chunk, stride))
    return lo, hi


@jit
def rows_span(p, positions, row, rows, kv_len):
    """Keys [lo, hi) that some of `rows` queries from `row` on see: from the first one's lo to the last one's hi."""
    lo, hi = key_span(p, positions, row, kv_len)[0], key_span(p, positions, row + rows - 1, kv_len)[1]
    if positions.tree:
        for i in range(row, row + rows):
            lo = min(lo, key_span(p, positions, i, kv_len)[0])
    return lo, hi


@jit
def query_span(p, positions, key, q_len):
    """Query rows [lo, hi) that see a key by position rules: the inverse of `key_span`."""
    rules, position = p.rules, positions.k_start + positions.k_stride * key
    near, stride = position - positions.offset, positions.q_stride
    lo, hi = 0, q_len
    if rules.causal:
        lo = max(lo, rows_before(near, stride))
    if rules.has_left:
        hi = min(hi, rows_before(near + rules.left + 1, stride))
    if rules.has_right:
        lo = max(lo, rows_before(near - rules.right, stride))
    if rules.chunk:
        start = position // rules.chunk * rules.chunk - positions.offset
        lo, hi = max(lo, rows_before(start, stride)), min(hi, rows_before(start + rules.chunk, stride))
    return lo, hi


@jit
def query_row(p, item, q_start, g, i):
    """The address in q of query i of an item's rows, for head g of the group."""
    head = item.head * (p.heads // p.kv_heads) + g
    b = types.int64(0) if p.cu_q else item.b
    return p.q + b * p.q_b + head * p.q_h + (q_start + item.row + i) * p.q_l


@jit
def key_source(p):
    return Source(p.k, p.k_b, p.k_h, p.k_l, p.k_dtype, p.head_dim - p.shared_columns, p.k_scales, p.k_scales_b,
                  p.k_scales_h, p.k_scales_l, p.k_scales_dtype, p.k_group, p.shared_columns)  # fmt: skip


@jit
def value_source(p):
    return Source(p.v, p.v_b, p.v_h, p.v_l, p.v_dtype, p.value_dim,
                  p.v_scales, p.v_scales_b, p.v_scales_h, p.v_scales_l, p.v_scales_dtype, p.v_group,
                  ZERO)  # fmt: skip


@jit
def kv_location(p, item, kv_start, selected):
    """The location of the keys of a work item; `selected`: the address of a list, or 0."""
    return KVLocation(types.int64(0) if p.cu_k else item.b, item.head, kv_start, selected)


@jit
def row_address(p, base, stride_b, stride_h, stride_l, at, j):
    """The address of key j's row in k, v or their scales."""
    if at.selected:
        entry = at.selected + SELECTED_BYTES * j
        row = types.int64(get_i32(entry + 4))
        return base + get_i64(entry + 8) * stride_b + at.head * stride_h + row * stride_l
    if p.table:
        page = types.int64(get_i32(p.table + at.b * p.table_b + j // p.page * 4))
        return base + page * stride_b + at.head * stride_h + j % p.page * stride_l
    return base + at.b * stride_b + at.head * stride_h + (at.kv_start + j) * stride_l


@jit
def repeat_last(table, count, end):
    """Pads a table of `count` addresses to `end` by repeating the last."""
    if count < end:
        put_series(table + 8 * count, get_i64(table + 8 * (count - 1)), types.int64(0), end - count)


@jit
def list_rows(p, x, at, table, first, count, pad):
    """Lists the addresses of `count` rows, padded to a multiple of `pad` with the last, whose results are ignored."""
    if at.selected:
        start, entry = x.base + at.head * x.h, at.selected + SELECTED_BYTES * first
        for j in range(count):
            row = types.int64(get_i32(entry + SELECTED_BYTES * j + 4)) * x.l
            put_i64(table + 8 * j, start + get_i64(entry + SELECTED_BYTES * j + 8) * x.b + row)
    elif p.table:
        number, row, j = p.table + at.b * p.table_b + first // p.page * 4, first % p.page, 0
        while j < count:  # a page at a time: a division for each key would cost more than reading it
            run = min(p.page - row, count - j)
            start = x.base + types.int64(get_i32(number)) * x.b + at.head * x.h + row * x.l
            put_series(table + 8 * j, start, x.l, run)
            number, row, j = number + 4, 0, j + run
    else:
        put_series(table, row_address(p, x.base, x.b, x.h, x.l, at, first), x.l, count)
    repeat_last(table, count, up(count, pad))


@jit
def list_ahead(p, x, at, table, first, count, end, distance):
    """Lists `count` rows, padded to a multiple of 16, and `distance` more to prefetch, up to the last before `end`."""
    available, padded = min(count + distance, end - first), up(count, LIST_PAD) + distance
    list_rows(p, x, at, table, first, available, ONE)
    repeat_last(table, available, padded)


@jit
def list_scales(p, x, at, table, first, count, pad, ld):
    """The scales of `count` rows as float32, [groups, ld]; zeros up to a multiple of `pad`."""
    groups = (x.width + x.group - 1) // x.group
    j = 0
    while j < count:
        start = row_address(p, x.scales, x.scales_b, x.scales_h, x.scales_l, at, first + j)
        run = count
        if at.selected:
            run = 1
        elif p.table:
            run = min(p.page - (first + j) % p.page, count - j)
        for g in range(groups):
            for i in range(run):
                put_f32(table + 4 * (g * ld + j + i), get_one(start + i * x.scales_l, x.scales_dtype, g))
        j += run
    for g in range(groups):
        fill(table + 4 * g * ld, count, up(count, pad), F(0))


@jit
def rows_to_f32(p, x, at, table, to, first, count, pad):
    """Converts the listed rows to float32 in `to`, and lists those. Returns NaN if one is not finite, else 0."""
    padded = up(x.width + x.shared, W)
    bad = F(0)
    for j in range(count):
        if x.shared:  # columns of k_shared follow
            row, rest = to + 4 * j * padded, to + 4 * (j * padded + x.width)
            bad += row_to_f32(row, get_i64(table + 8 * j), x.dtype, x.width, x.width, ZERO, ZERO, ONE)
            start = row_address(p, p.k_shared, p.k_shared_b, ZERO, p.k_shared_l, at, first + j)
            bad += row_to_f32(rest, start, x.dtype, x.shared, padded - x.width, ZERO, ZERO, ONE)
            continue
        scales = types.int64(0)
        if dtypes.is_quantised(x.dtype):
            scales = row_address(p, x.scales, x.scales_b, x.scales_h, x.scales_l, at, first + j)
        row = to + 4 * j * padded
        bad += row_to_f32(row, get_i64(table + 8 * j), x.dtype, x.width, padded, scales, x.scales_dtype, x.group)
    for j in range(up(count, pad)):
        put_i64(table + 8 * j, to + 4 * min(j, count - 1) * padded)
    return bad
