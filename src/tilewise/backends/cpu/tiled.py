"""Prefill by matrix tiles: query rows in panels of 32, keys and columns of V in blocks of 32.

    s [keys, 32] = K Q^T            K and Q^T copied into tiles, in parts if they are not bf16 (`amx.py`)
    s -> P                          16 rows side by side; written as the tiles that the next product reads
    acc [Dv, 32] += V^T P           V turned once for each tile of keys

A number that is not finite has no parts, and in V it may not meet the weight of a row that does not see it: there it is
taken out and added where it is seen. An item with an infinity in q or k is left to the walk by vectors.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from .access import (
    INF,
    ONE,
    ZERO,
    F,
    fill,
    item_at,
    jit,
    key_source,
    params_at,
    place,
    query_row,
    row_address,
    sequence,
    unit,
    up,
    value_source,
    widen_row,
)  # fmt: skip
from .amx import (
    BLOCK,
    TILE,
    configure,
    copy_row,
    fade_columns,
    make_products,
    make_soften,
    make_split_row,
    release,
    turn,
)
from .columns import list_spans, seen_by_all, seen_by_some, shape_scores
from .masks import read_states
from .micro import clear, get_f32, get_i64, get_one, put_f32, put_i64, put_one, transpose
from .rows import sees, set_up
from .scratch import cut, cut_tiles
from .simd import CODES, W
from .softmax import LOG2E

# np.int64 and not int: Numba compiles a function anew for every literal that it is called with.
W_ = np.int64(W)
ROW, STEP = np.int64(2 * BLOCK), np.int64(2 * TILE)  # bytes from 32 elements to the next: of a row, of an operand
BF16 = CODES["bf16"]


@jit
def tile_row(row, steps):
    """Where row `row` of an operand starts, in bytes; it goes on in the next of `steps` steps 2 tiles further."""
    return row // BLOCK * steps * STEP + row % BLOCK // 16 * TILE + row % 16 * 64


@jit
def panel_span(t, row, R, tile, end):
    """The blocks of keys of a tile that some row of a panel sees, from key to key of the tile; none: from 0 to 0."""
    if row >= R:
        return 0, 0
    lo, hi = seen_by_some(t, row, row + BLOCK)
    lo, hi = max(lo, tile) - tile, min(hi, end) - tile
    return (lo // BLOCK * BLOCK, up(hi, BLOCK)) if lo < hi else (0, 0)


@jit
def turn_back(t, w, R, Dv, padded):
    """acc [panels, 2, Dv, 16] as the rows that the rest of the backend knows."""
    for row in range(0, up(R, BLOCK), W):
        for d in range(0, Dv, W):
            transpose(t.acc + 4 * (row * Dv + d), Dv, w.acc + 4 * (row * padded + d * W), W_)


def walk_function(parts):
    """`fn(params, scratch, item)`: all keys of the item; m, l and acc hold the result if `done` does not hold 0."""
    multiply_keys, multiply_values = make_products(parts)
    soften, split_row = make_soften(parts), make_split_row(parts)
    PARTS_ = np.int64(parts)

    def piece(fn):
        fn.__qualname__ = f"{fn.__name__}_{parts}"  # kept code is found by name: no two functions may share one
        return jit(fn)

    @piece
    def lay_row(w, code, width, to, part, jump, source, padded, keep):
        """A row as bf16 rows, `part` bytes apart, with zeros up to `padded`. Was a number not finite, or infinite?

        Such a number is its own first part, or 0 if it is not to be kept.
        """
        if parts == 1 and code == BF16 and width == padded and keep:
            copy_row(to, jump, source, padded)
            return False, False
        widen_row(w.rows, source, code, width, padded, ZERO, ZERO, ONE)
        if split_row(to, part, jump, w.rows, padded) == F(0):
            return False, False
        infinite = False
        for i in range(width):
            x = get_f32(w.rows + 4 * i)
            if x - x != F(0):
                infinite |= x == x
                at = to + i // BLOCK * jump + 2 * (i % BLOCK)
                put_one(at, BF16, ZERO, x if keep else F(0))
                for n in range(1, parts):
                    put_one(at + n * part, BF16, ZERO, F(0))
        return True, infinite

    @piece
    def lay_key(p, w, x, at, to, part, jump, key, padded, keep):
        """The row of a key in K or V."""
        source = row_address(p, x.base, x.b, x.h, x.l, at, key)
        return lay_row(w, x.code, x.width, to, part, jump, source, padded, keep)

    @piece
    def lay_queries(p, w, item, q_start, R, D, spare):
        """Q^T, an operand of 32 columns for each panel. Is a number infinite?"""
        bad, n = False, item.rows
        rows, part, q_part = w.rows + 4 * spare, 2 * W * D, 2 * up(R, BLOCK) * D  # rows: [parts, W, D]
        for first in range(0, up(R, BLOCK), W):
            for r in range(first, first + W):
                row = rows + 2 * (r - first) * D
                if r < R:
                    at = query_row(p, item, q_start, r // n, r % n)
                    bad |= lay_row(w, p.q_code, p.head_dim, row, part, ROW, at, D, True)[1]
                else:
                    for i in range(parts):
                        clear(row + i * part, D // 2)
            for i in range(parts):
                tile = w.q + i * q_part + first // BLOCK * (D // BLOCK) * STEP + first % BLOCK // W * TILE
                for d in range(D // BLOCK):
                    transpose(tile + d * STEP, W_, rows + i * part + 4 * d * W, D // 2)
        return bad and parts > 1

    @piece
    def lay_keys(p, w, x, at, tile, count, D, part):
        """K, an operand of `count` rows and some more, which do not matter. Is a number infinite?"""
        bad = False
        for j in range(count):
            bad |= lay_key(p, w, x, at, w.k + tile_row(j, D // BLOCK), part, STEP, tile + j, D, True)[1]
        return bad and parts > 1

    @piece
    def lay_values(p, t, w, x, at, tile, count, Dv, BK, spare, keep):
        """V^T, an operand of Dv rows; keys up to the next multiple of 32 are zeros. Is a number not finite?

        Numbers that are not are taken out if they are not to be kept; `v_table` says which keys have one.
        """
        bad = False
        rows, part, v_part = w.rows + 4 * spare, 2 * BLOCK * Dv, 2 * Dv * BK  # rows: [parts, 32, Dv]
        for j in range(0, count, BLOCK):
            base, step = rows, 2 * Dv
            evenly = p.table == 0 or p.page % BLOCK == 0
            if parts == 1 and keep and x.width % W == 0 and j + BLOCK <= count and evenly:
                base, step = row_address(p, x.base, x.b, x.h, x.l, at, tile + j), x.l
            else:
                for i in range(BLOCK):
                    if j + i < count:
                        stray, _ = lay_key(p, w, x, at, rows + 2 * i * Dv, part, ROW, tile + j + i, Dv, keep)
                        put_i64(t.v_table + 8 * (j + i), ONE if stray else ZERO)
                        bad |= stray
                    else:
                        for n in range(parts):
                            clear(rows + 2 * i * Dv + n * part, Dv // 2)
            for n in range(parts):
                for c in range(0, up(x.width, W), W):
                    to = w.v + n * v_part + tile_row(c, BK // BLOCK) + j // BLOCK * STEP
                    bad |= turn(to, base + n * part + 2 * c, step) != F(0)
        return bad

    @piece
    def add_back(p, t, w, item, x, at, row, u, R, tile, k0, k1, Dv, BK):
        """acc += weight * stray in the rows of panel u that see it."""
        row += u * BLOCK
        for j in range(k0, k1):
            if get_i64(t.v_table + 8 * j) == 0:
                continue
            widen_row(w.rows, row_address(p, x.base, x.b, x.h, x.l, at, tile + j), x.code, x.width, Dv, ZERO, ZERO, ONE)
            pair = w.p + 2 * u * BK * BLOCK + j // BLOCK * STEP + j % BLOCK // 2 * 64 + j % 2 * 2
            for r in range(min(BLOCK, R - row)):
                if not sees(p, t, item, row + r, tile + j):
                    continue
                weight = F(0)
                for n in range(parts):
                    weight += get_one(pair + 4 * n * BK * BLOCK + r // W * TILE + r % W * 4, BF16, ZERO)
                for d in range(x.width):
                    stray = get_f32(w.rows + 4 * d)
                    if stray - stray != F(0):
                        cell = w.acc + 4 * (row * Dv + r // W * W * Dv + d * W + r % W)
                        put_f32(cell, get_f32(cell) + weight * stray)

    @piece
    def weights(p, t, w, item, row, u, R, tile, k0, k1, count, Dv, BK):
        """The scores of panel u become weights; older sums fade."""
        if k0 >= k1:
            return
        there = min(k1, count) - k0
        for half in range(BLOCK // W):
            first, s = row + u * BLOCK + half * W, w.s + 4 * W * ((2 * u + half) * BK + k0)
            fill(s, there * W, (k1 - k0) * W, -INF)
            shape_scores(p, t, item, s, W_, first, R, tile + k0, there)
            pairs = w.p + 2 * u * BK * BLOCK + k0 // BLOCK * STEP + half * TILE
            m, l, shrink = t.m + 4 * first, t.l + 4 * first, t.shrink + 4 * first
            if soften(s, k1 - k0, m, l, shrink, unit(p) * F(LOG2E), pairs, 4 * BK * BLOCK) != F(0):
                fade_columns(w.acc + 4 * first * Dv, Dv, shrink)

    def walk_tiles(params, scratch, address):
        p, item = params_at(params), item_at(address)
        t = cut(p, scratch)
        w = cut_tiles(p, t, PARTS_)
        q_start, _, kv_start, kv_len, _ = sequence(p, item.b)
        R = p.heads // p.kv_heads * item.rows
        D, Dv, BK = up(p.head_dim, BLOCK), up(p.value_dim, BLOCK), up(p.tile_keys, BLOCK)
        k, v, at = key_source(p), value_source(p), place(p, item, kv_start)
        put_i64(t.done, ZERO)
        spare, k_part, q_part = max(D, Dv), 2 * BK * D, 2 * up(R, BLOCK) * D
        v_part, p_panel = 2 * Dv * BK, 2 * BK * BLOCK
        if lay_queries(p, w, item, q_start, R, D, spare):
            return
        first, last = set_up(p, t, item, up(R, BLOCK), up(p.value_dim, W))
        list_spans(t, up(R, BLOCK))
        all_lo, all_hi = seen_by_all(t, R)
        clear(w.acc, up(R, BLOCK) * Dv)
        clear(w.v, PARTS_ * Dv * BK // 2)  # columns that are not there
        configure(p.configuration)
        tile = item.start + max(0, first - item.start) // BK * BK
        while tile < last:
            end = min(tile + BK, last)
            count = end - tile
            whole, nothing = read_states(p, item, t.states, tile, min(tile + BK, kv_len))
            if nothing:
                tile += BK
                continue
            whole &= all_lo <= tile and all_hi >= end
            if lay_keys(p, w, k, at, tile, count, D, k_part):
                release()
                return
            strays = lay_values(p, t, w, v, at, tile, count, Dv, BK, spare, True)
            strays &= parts > 1 or not whole
            if strays:
                lay_values(p, t, w, v, at, tile, count, Dv, BK, spare, False)
            for row in range(0, R, 2 * BLOCK):  # two panels at a time: a block of K or V is used twice where it is
                a0, a1 = panel_span(t, row, R, tile, end)
                b0, b1 = panel_span(t, row + BLOCK, R, tile, end)
                for j in range(min(a0, b0), max(a1, b1), BLOCK):
                    keys = w.k + j // BLOCK * (D // BLOCK) * STEP
                    for u in range(2):
                        if (b0 if u else a0) <= j < (b1 if u else a1):
                            q, s = w.q + 2 * (row + u * BLOCK) * D, w.s + 4 * (u * BK * BLOCK + j * W)
                            multiply_keys(keys, k_part, q, q_part, s, 4 * W * BK, D // BLOCK)
                for u in range(2):
                    weights(p, t, w, item, row, u, R, tile, b0 if u else a0, b1 if u else a1, count, Dv, BK)
                for c in range(0, Dv, BLOCK):
                    for u in range(2):
                        k0, k1 = b0 if u else a0, b1 if u else a1
                        if k0 < k1:
                            along, steps = k0 // BLOCK * STEP, (k1 - k0) // BLOCK
                            values, pairs = w.v + 2 * c * BK + along, w.p + u * p_panel + along
                            acc = w.acc + 4 * ((row + u * BLOCK) * Dv + c * W)
                            multiply_values(values, v_part, pairs, 2 * p_panel, acc, 4 * W * Dv, steps, w.sums)
                if strays:
                    add_back(p, t, w, item, v, at, row, 0, R, tile, a0, min(a1, count), Dv, BK)
                    add_back(p, t, w, item, v, at, row, 1, R, tile, b0, min(b1, count), Dv, BK)
            tile += BK
        release()
        turn_back(t, w, R, up(p.value_dim, W), Dv)
        put_i64(t.done, ONE)

    return walk_tiles
