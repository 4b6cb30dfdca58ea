"""Decode: few query rows, products straight from K and V rows, so that memory is read once and at its own speed.

All rows of a group go over a tile of keys while it is in the first-level cache. Tiles that some row sees only in part
are widened into scratch first, where values that are not finite can be taken out.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

from numba import types

from .access import (
    INF,
    ONE,
    ZERO,
    F,
    call,
    fill,
    is_plain,
    item_at,
    jit,
    key_source,
    list_rows,
    list_scales,
    params_at,
    place,
    query_row,
    sequence,
    unit,
    up,
    value_source,
    widen_row,
    widen_rows,
)  # fmt: skip
from .masks import FULL, SKIP, list_mask, mask_row, read_states
from .micro import fetch, get_f32, get_i32, get_i64, make_adds, make_dots, put_f32, row_scale
from .rows import add_strays, set_up, take_out_strays
from .scratch import KEY_PAD, PAD, TAIL, cut
from .simd import REGISTERS, W
from .softmax import LOG2E, alibi_row, bias_cells, exp_row, max_row, scale_cells, softcap_cells

# V's rows are asked for while K's are multiplied, and the next tile's K while V's are: this many keys at a time. Rows
# of pages lie apart, where no hardware looks ahead; where it does, it starts anew with each tile and stops at each page
# of memory. (Without: 0.68x and 0.47x for pages in f32 and f16; contiguous 0.77x in bf16 and f16, on one core.)
CHUNK = 48
# Keys in flight for 4, 2 or 1 rows: as many accumulators as leave registers for K and q.
KEYS = {4: 4, 2: 8, 1: 8} if REGISTERS == 32 else {4: 2, 2: 4, 1: 8}


def dots_function(kind):
    """`fn(q, ldq, R, rows, count, width, s, lds, scales, group)`: s [R, count] = q k^T; count is a multiple of 8."""
    dots_4, dots_2, dots_1 = (make_dots(kind, n, KEYS[n]) for n in (4, 2, 1))

    def dots(q, ldq, R, rows, count, width, s, lds, scales, group):
        i = 0
        while i + 4 <= R:
            dots_4(q + 4 * i * ldq, ldq, rows, count, width, s + 4 * i * lds, lds, scales, group)
            i += 4
        if i + 2 <= R:
            dots_2(q + 4 * i * ldq, ldq, rows, count, width, s + 4 * i * lds, lds, scales, group)
            i += 2
        if i < R:
            dots_1(q + 4 * i * ldq, ldq, rows, count, width, s + 4 * i * lds, lds, scales, group)

    return dots


def adds_function(kind):
    """`fn(acc, lda, R, rows, count, width, p, ldp, scales, group)`: acc [R, width] += p v."""
    parts = 2 if kind == "int4" else 1  # a step of int4 is a vector in each half of a row
    wide = [make_adds(kind, n, 4) for n in (4, 2, 1)]
    thin = [make_adds(kind, n, parts) for n in (4, 2, 1)]

    def strip(name, fours, twos, ones):
        def go(acc, lda, R, rows, count, width, p, ldp, scales, group, start):
            i = 0
            while i + 4 <= R:
                fours(acc + 4 * i * lda, lda, rows, count, width, p + 4 * i * ldp, ldp, scales, group, start)
                i += 4
            if i + 2 <= R:
                twos(acc + 4 * i * lda, lda, rows, count, width, p + 4 * i * ldp, ldp, scales, group, start)
                i += 2
            if i < R:
                ones(acc + 4 * i * lda, lda, rows, count, width, p + 4 * i * ldp, ldp, scales, group, start)

        go.__qualname__ = f"{name}_{kind}"  # kept code is found by name: no two functions may share one
        return jit(go)

    wide_strip, thin_strip = strip("wide", *wide), strip("thin", *thin)
    step = 4 // parts * W

    def adds(acc, lda, R, rows, count, width, p, ldp, scales, group):
        span = width // parts
        start = 0
        while start + step <= span:
            wide_strip(acc, lda, R, rows, count, width, p, ldp, scales, group, start)
            start += step
        while start < span:
            thin_strip(acc, lda, R, rows, count, width, p, ldp, scales, group, start)
            start += W

    return adds


@jit
def soften(p, t, item, r, origin, count, line, Dv):
    """One row of scores over `count` keys from `origin` on becomes weights; older sums fade."""
    row, m, l = t.s + 4 * r * line, t.m + 4 * r, t.l + 4 * r
    lo, hi = max(get_i32(t.lo + 4 * r) - origin, 0), min(get_i32(t.hi + 4 * r) - origin, count)
    g = r // item.rows
    state = get_i64(t.states + 8 * g)
    if lo >= hi or state == SKIP:
        fill(row, ZERO, count, F(0))
        return
    vectors = up(count, W) // W
    scale = F(p.scale)
    if p.softcap > 0:
        softcap_cells(row, W, vectors, scale / F(p.softcap), F(p.softcap))
    elif not is_plain(p):
        scale_cells(row, W, vectors, scale)
    if p.slopes:
        alibi_row(row, vectors, get_f32(t.slopes + 4 * r), get_i32(t.positions + 4 * r) - origin)
    if p.mask and state != FULL:
        mask = mask_row(p, item.b, item.head * (p.heads // p.kv_heads) + g, item.row + r % item.rows)
        list_mask(p, mask, t.mask_rows, origin, count, vectors * W)
        bias_cells(row, W, vectors, t.mask_rows)
    fill(row, ZERO, lo, -INF)
    fill(row, hi, vectors * W, -INF)

    old = get_f32(m)
    new = max(old, max_row(row, vectors))
    if new == -INF:
        fill(row, ZERO, count, F(0))
        return
    total = exp_row(row, vectors, unit(p) * F(LOG2E), new)
    shrink = F(math.exp((old - new) * unit(p)))
    put_f32(m, new)
    put_f32(l, get_f32(l) * shrink + total)
    if shrink != F(1) and old != -INF:
        row_scale(t.acc + 4 * r * Dv, Dv, shrink)


@jit
def multiply_keys(p, t, dots, R, count, width, D, line):
    """s = q k^T; V is asked for meanwhile."""
    step = types.int64(CHUNK if p.ask else count)
    for j in range(0, count, step):
        n = min(step, count - j)
        if p.ask:
            fetch(t.v_table + 8 * j, n, p.v_row)
        scales = t.k_scales + 4 * j * ((width + p.k_group - 1) // p.k_group)
        call(dots, t.q, D, R, t.k_table + 8 * j, up(n, KEY_PAD), width, t.s + 4 * j, line, scales, p.k_group)


@jit
def add_values(p, t, adds, R, count, width, Dv, line, ahead):
    """acc += p v; the next tile's K is asked for meanwhile. A sum may not depend on whether it is: always in chunks."""
    for j in range(0, count, CHUNK):
        n = min(CHUNK, count - j)
        fetch(t.ahead + 8 * j, min(n, ahead - j), p.k_row)
        scales = t.v_scales + 4 * j * ((width + p.v_group - 1) // p.v_group)
        call(adds, t.acc, Dv, R, t.v_table + 8 * j, n, width, t.s + 4 * j, line, scales, p.v_group)


def walk_direct(params, scratch, address):
    """All keys of the item at `address`; m, l and acc hold the result."""
    p, item = params_at(params), item_at(address)
    t = cut(p, scratch)
    q_start, _, kv_start, kv_len, _ = sequence(p, item.b)
    R = p.heads // p.kv_heads * item.rows
    D, Dv, BK, line = up(p.head_dim, W), up(p.value_dim, W), p.tile_keys, p.tile_keys + TAIL  # line: of scores
    k, v, at = key_source(p), value_source(p), place(p, item, kv_start)
    for r in range(R):
        row = query_row(p, item, q_start, r // item.rows, r % item.rows)
        widen_row(t.q + 4 * r * D, row, p.q_code, p.head_dim, D, ZERO, ZERO, ONE)
    first, last = set_up(p, t, item, R, Dv)
    tile = item.start + max(0, first - item.start) // BK * BK
    while tile < last:
        size = BK if p.mask or last - tile > BK + TAIL else BK + TAIL
        origin, end = max(tile, first), min(tile + size, last)
        count = end - origin
        whole, nothing = read_states(p, item, t.states, tile, min(tile + BK, kv_len))
        tile += size
        if nothing:
            continue
        for r in range(R):
            whole &= get_i32(t.lo + 4 * r) <= origin and get_i32(t.hi + 4 * r) >= end

        list_rows(p, k, at, t.k_table, origin, count, PAD)
        dots, width = p.dots, p.head_dim
        if not whole or p.dots == 0:
            widen_rows(p, k, at, t.k_table, t.keys, origin, count, PAD)
            dots, width = p.dots_f32, D
        elif k.code >= 3:
            list_scales(p, k, at, t.k_scales, origin, count, KEY_PAD)
        list_rows(p, v, at, t.v_table, origin, count, ONE)
        multiply_keys(p, t, dots, R, count, width, D, line)

        for r in range(R):
            soften(p, t, item, r, origin, count, line, Dv)

        adds, width, strays = p.adds, p.value_dim, False
        if not whole or p.adds == 0:
            bad = widen_rows(p, v, at, t.v_table, t.values, origin, count, ONE)
            adds, width, strays = p.adds_f32, Dv, bad != F(0) and not whole
            if strays:
                take_out_strays(t, count, Dv)
        elif v.code >= 3:
            list_scales(p, v, at, t.v_scales, origin, count, ONE)
        ahead = max(0, min(BK, last - tile)) if p.ask else 0
        if ahead:
            list_rows(p, k, at, t.ahead, tile, ahead, ONE)
        add_values(p, t, adds, R, count, width, Dv, line, ahead)
        if strays:
            add_strays(p, t, item, ZERO, R, count, Dv, origin, ONE, line)
