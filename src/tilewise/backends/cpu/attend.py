"""The kernels that are called from Python: the list of items, the work on them, the merging of split ones."""

# mypy: ignore-errors
from __future__ import annotations

import math

import numpy as np
from numba import carray

from .access import (
    INF,
    ZERO,
    F,
    call_parallel,
    call_walk,
    call_work,
    fill,
    item_at,
    jit,
    key_span,
    params_at,
    pointer,
    sequence,
    unit,
    up,
)
from .micro import check_finite, get_f32, get_i64, get_one, next_item, put_f32, put_i64, widen_f32
from .params import BLOCK_BYTES, COUNTER, ITEM, NUMBERS, TASK_BYTES
from .rows import SHRUNK, finish, out_row
from .scratch import DIRECT_ROWS, cut
from .simd import W

ITEM_BYTES = ITEM.itemsize


def work(params, scratch):
    """What a thread runs: bunches of items until there are none."""
    p = params_at(params)
    count = get_i64(p.counter + 8)
    t = cut(p, scratch)
    index = next_item(p.counter) * p.bunch
    while index < count:
        address = p.items + index * ITEM_BYTES
        item = item_at(address)
        group = p.heads // p.kv_heads
        R = group * item.rows
        q_start, q_len, _, _, _ = sequence(p, item.b)
        few = group * q_len <= DIRECT_ROWS  # of the sequence: a row must not depend on how it is cut
        put_i64(t.done, 0)
        put_i64(t.done + 8, 0)
        if p.walk_tiles and not few:
            call_walk(p.walk_tiles, params, scratch, address)
        walk = p.walk_direct if few else p.walk_packed
        if get_i64(t.done) == 0 and walk:
            call_walk(walk, params, scratch, address)
            put_i64(t.done, 1)
        bad = F(0)
        for n in range(p.bunch):
            bad += hand_over(p, t, index + n, n * R, R, q_start)
        if get_i64(t.done) == 0 or (bad != F(0) and not walk):
            put_i64(p.counter + 16, 1)  # undone: `launch.py` compiles what it takes and begins anew
        elif bad != F(0):  # sums past float32's range, if values were all finite
            put_i64(t.done + 8, 1)
            call_walk(walk, params, scratch, address)
            for n in range(p.bunch):
                replace_rows(p, t, index + n, n * R, R, q_start)
        for _ in range(p.bunch):
            next_item(p.counter + 24)  # done
        index = next_item(p.counter) * p.bunch


@jit
def hand_over(p, t, index, first, R, q_start):
    """The result of an item whose R rows are in m, l and acc from row `first` on: finished, or kept as a part.

    Returns NaN if a sum is not finite, else 0.
    """
    item, Dv = item_at(p.items + index * ITEM_BYTES), up(p.value_dim, W)
    slot, acc = p.partials + index * p.partial_bytes, t.acc + 4 * first * Dv
    part = item.splits > 1 or p.keep_parts != 0
    bad = widen_f32(slot, acc, R * Dv) if part else check_finite(acc, R * Dv)
    for r in range(R):
        m, l = get_f32(t.m + 4 * (first + r)), get_f32(t.l + 4 * (first + r))
        if part:
            put_f32(slot + 4 * (R * Dv + 2 * r), m)
            put_f32(slot + 4 * (R * Dv + 2 * r + 1), l)
        else:
            finish(p, item, r // item.rows, r % item.rows, q_start, acc + 4 * r * Dv, m, l)
    return bad


@jit
def replace_rows(p, t, index, first, R, q_start):
    """Rows that `hand_over` has found not finite, from sums of shrunk weights: those of which a cell now is."""
    item, Dv = item_at(p.items + index * ITEM_BYTES), up(p.value_dim, W)
    slot, part = p.partials + index * p.partial_bytes, item.splits > 1 or p.keep_parts != 0
    for r in range(R):
        acc, g, i = t.acc + 4 * (first + r) * Dv, r // item.rows, r % item.rows
        before, code = (slot + 4 * r * Dv, ZERO) if part else (out_row(p, item, g, i, q_start), p.q_code)
        gained = False
        for d in range(p.value_dim):
            old, new = get_one(before, code, d), get_f32(acc + 4 * d)
            gained |= old - old != F(0) and new - new == F(0)
        if not gained:
            continue
        m, l = get_f32(t.m + 4 * (first + r)), get_f32(t.l + 4 * (first + r))
        if part:
            widen_f32(before, acc, Dv)
            put_f32(slot + 4 * (R * Dv + 2 * r), m)
            put_f32(slot + 4 * (R * Dv + 2 * r + 1), -l)
        else:
            finish(p, item, g, i, q_start, acc, m, -l)


def begin(template, scratch, memories, q, k, v, out, lse, k_scales, v_scales):
    """A whole call that comes again, on a block of numbers that is made of `template` in `scratch`.

    In torch's threads if there are `memories` for them, else in this one. Behind the block lie the threads' task, the
    parts of split items, and this thread's own memory.
    """
    for i in range(NUMBERS):
        put_i64(scratch + 8 * i, get_i64(template + 8 * i))
    p = params_at(scratch)
    p.q, p.k, p.v, p.out, p.lse, p.k_scales, p.v_scales = q, k, v, out, lse, k_scales, v_scales
    p.counter = scratch + 8 * COUNTER
    task = scratch + BLOCK_BYTES
    p.partials = task + TASK_BYTES
    own = p.partials + up(get_i64(p.counter + 8) * p.partial_bytes, 64)
    if memories:
        put_i64(task, 0)
        put_i64(task + 8, p.work)
        put_i64(task + 16, scratch)
        put_i64(task + 24, memories)
        call_parallel(p.parallel, p.team, task, p.threads, 0)
    else:
        call_work(p.work, scratch, own)
    if p.partial_bytes:
        call_work(p.merge, scratch, own)


def team(task):
    """What each of torch's threads runs, a kernel. `task` is the number of the next thread, the kernel, its block of
    numbers, and where the addresses of the threads' memories are."""
    slot = next_item(task)
    call_work(get_i64(task + 8), get_i64(task + 16), get_i64(get_i64(task + 24) + 8 * slot))


def merge(params, scratch):
    """Combines the parts of split items; run by one thread when all are there."""
    p = params_at(params)
    count = get_i64(p.counter + 8)
    items = carray(pointer(p.items), count, dtype=ITEM)
    Dv = up(p.value_dim, W)
    for index in range(count):
        item = items[index]
        if item.splits < 2 or item.split:
            continue
        R = p.heads // p.kv_heads * item.rows
        q_start = sequence(p, item.b)[0]
        for r in range(R):
            m, shrunk = -INF, False
            for part in range(item.splits):
                slot = p.partials + (index + part * p.kv_heads) * p.partial_bytes
                m = max(m, get_f32(slot + 4 * (R * Dv + 2 * r)))
                shrunk |= get_f32(slot + 4 * (R * Dv + 2 * r + 1)) < F(0)
            l = merge_row(p, index, item.splits, R, r, Dv, m, scratch, shrunk)
            if not shrunk and check_finite(scratch, Dv) != F(0):
                l = -merge_row(p, index, item.splits, R, r, Dv, m, scratch, True)
            finish(p, item, r // item.rows, r % item.rows, q_start, scratch, m, -l if shrunk else l)


@jit
def merge_row(p, index, parts, R, r, Dv, m, to, shrunk):
    """The sums of row r over an item's parts; returns the softmax's. `shrunk`: those of values times SHRUNK."""
    l = F(0)
    fill(to, ZERO, Dv, F(0))
    for part in range(parts):
        slot = p.partials + (index + part * p.kv_heads) * p.partial_bytes
        top = get_f32(slot + 4 * (R * Dv + 2 * r))
        if top == -INF:
            continue
        weight, own = F(math.exp((top - m) * unit(p))), get_f32(slot + 4 * (R * Dv + 2 * r + 1))
        l += weight * abs(own)
        if shrunk and not own < F(0):
            weight *= SHRUNK
        for d in range(Dv):
            x = get_f32(slot + 4 * (r * Dv + d))
            put_f32(to + 4 * d, get_f32(to + 4 * d) + weight * x)
    return l


def list_items(params, order):
    """Writes the items, the most work first, and their number. `order` has room for an int64 for each batch row."""
    p = params_at(params)
    items = carray(pointer(p.items), 1 << 40, dtype=ITEM)
    rows = carray(pointer(order), p.batch, dtype=np.int64)
    for b in range(p.batch):
        rows[b] = b
    gap = p.batch // 2 if p.cu_q or p.cu_k or p.kv_lengths else 0  # Shell's sort: longest sequences first
    while gap:
        for i in range(gap, p.batch):
            b, j = rows[i], i
            size = weigh(p, b)
            while j >= gap and weigh(p, rows[j - gap]) < size:
                rows[j] = rows[j - gap]
                j -= gap
            rows[j] = b
        gap //= 2
    count, group = 0, p.heads // p.kv_heads
    for at in range(p.batch):
        b = rows[at]
        _, q_len, _, kv_len, offset = sequence(p, b)
        tiles = (q_len + p.tile_rows - 1) // p.tile_rows
        for tile in range(tiles - 1, -1, -1):  # under a causal rule the last rows see the most
            row = tile * p.tile_rows
            n = min(p.tile_rows, q_len - row)
            lo, hi = key_span(p, offset + row, kv_len)[0], key_span(p, offset + row + n - 1, kv_len)[1]
            start, parts, size = 0, 1, p.split_size
            if p.split_few and group * q_len > DIRECT_ROWS:
                size = 0
            if size and lo < hi:
                start = lo // size
                parts = (hi + size - 1) // size - start
            for part in range(parts):  # outside: what heads of a page share is then found in the caches of addresses
                for head in range(p.kv_heads):
                    item = items[count]
                    item.b, item.head, item.row, item.rows = b, head, row, n
                    item.start = (start + part) * size
                    item.end = min(kv_len, item.start + size) if size else kv_len
                    item.split, item.splits = part, parts
                    count += 1
    put_i64(p.counter, 0)
    put_i64(p.counter + 8, count)
    put_i64(p.counter + 24, 0)


@jit
def weigh(p, b):
    _, q_len, _, kv_len, _ = sequence(p, b)
    return q_len * kv_len
