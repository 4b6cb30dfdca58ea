"""Gradients of functions of the user: dS by the score that score_mod was given, and sums of dS times derivatives by
captured tensors, for each load by what its indices are made of (`mod_gradients.py`). Numba code.

A thread has memory of its own for a work item. Sums of rows are [heads, rows], of keys [heads, keys, W], of distances
[heads, rows + keys], float32; of cells float64, one for each element, or a list of terms if there are many elements.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from llvmlite import ir

from ....core.expression.sums import AXES
from ..codegen.load_store import clear, get_f32, get_i64, load_acquire, put_f32, put_i64, store_release
from ..codegen.numba_ops import ONE, ZERO, back_off, jit, load_sums_at, up
from ..codegen.vector import F32, I32, I64, Emit, Value, W, microkernel
from ..gemm.fp32 import KEYS
from ..kv_access import sequence
from ..params import LOAD_SUMS_BYTES, Gradients, offset
from .backward_cells import sum_keys
from .selected_keys import selected_key

ROWS_AXIS, KEYS_AXIS, DISTANCES_AXIS, CELLS_AXIS = map(np.int64, range(len(AXES)))
TURN = offset(Gradients, "turn")
F64 = ir.DoubleType()


# Terms: dS times a derivative, of a vector of rows, keys `step` floats apart


@microkernel("iiiii")
def terms_of(e: Emit, d: Value, d_step: Value, ds: Value, step: Value, count: Value) -> None:
    """d *= dS, but 0 where dS is 0: in a hidden cell the derivative may be NaN."""
    b = e.builder
    with e.loop(count) as j:
        at, x = b.mul(j, d_step), e.load(ds, b.mul(j, step))
        e.store(b.select(b.fcmp_ordered("==", x, e.zeros), e.zeros, b.fmul(x, e.load(d, at))), d, at)


@microkernel("iiiiii")
def add_key_terms(e: Emit, to: Value, terms: Value, step: Value, count: Value, heads: Value, head: Value) -> None:
    """to[j] += terms[j] in the lanes whose row is of this head."""
    b = e.builder
    own = b.icmp_signed("==", e.load_i32(heads), e.splat_i32(b.trunc(head, I32)))
    with e.loop(count) as j:
        at = b.mul(j, e.i64(W))
        e.store(b.fadd(e.load(to, at), b.select(own, e.load(terms, b.mul(j, step)), e.zeros)), to, at)


@microkernel("iiiiii")
def add_distance_terms(e: Emit, to: Value, terms: Value, step: Value, count: Value, heads: Value, head: Value) -> None:
    """to[lane - j] += terms[j, lane], likewise. A register holds the sums of W distances: from key to key it moves by
    one lane, and the sum that leaves it is complete.
    """
    b = e.builder
    own = b.icmp_signed("==", e.load_i32(heads), e.splat_i32(b.trunc(head, I32)))
    sums = e.var(e.zeros)
    with e.loop(count) as j:
        x = b.fadd(sums.get(), b.select(own, e.load(terms, b.mul(j, step)), e.zeros))
        at = e.pointer(to, b.sub(e.i64(W - 1), j), F32, F32)
        b.store(b.fadd(b.load(at), b.extract_element(x, ir.Constant(I32, W - 1))), at)
        sums.set(e.shuffle(x, e.zeros, [W, *range(W - 1)]))
    at = b.sub(e.i64(0), count)
    e.store(b.fadd(e.load(to, at), sums.get()), to, at)


@microkernel("iiiiii")
def add_cell_terms(e: Emit, to: Value, elements: Value, terms: Value, step: Value, count: Value, apart: Value) -> None:
    """to[elements[j, lane]] += terms[j, lane], float64, cell by cell; `elements` of a key are `apart` floats apart."""
    b = e.builder
    with e.loop(count) as j:
        x = b.fpext(e.load(terms, b.mul(j, step)), e.vector(F64))
        here = b.add(elements, b.mul(b.mul(j, apart), e.i64(4)))
        for lane in range(W):
            at = e.pointer(to, e.load_scalar(here, lane, I64), F64, F64)
            b.store(b.fadd(b.load(at), b.extract_element(x, ir.Constant(I32, lane))), at)


@microkernel("iiiiiii")
def list_terms(
    e: Emit, to: Value, values: Value, elements: Value, terms: Value, step: Value, count: Value, apart: Value
) -> None:
    """Lists elements and terms."""
    b, kind = e.builder, e.vector(I64)
    with e.loop(count) as j:
        at = b.mul(j, e.i64(W))
        x = b.load(e.pointer(elements, b.mul(j, apart), F32, kind))
        x.align = 4
        b.store(x, e.pointer(to, at, I64, kind)).align = 8
        e.store(e.load(terms, b.mul(j, step)), values, at)


@microkernel("iii")
def add_to_float64(e: Emit, to: Value, source: Value, count: Value) -> None:
    """`count` float32 added to float64."""
    b = e.builder
    with e.loop(count) as i:
        at = e.pointer(to, i, F64, F64)
        b.store(b.fadd(b.load(at), b.fpext(e.load_scalar(source, i, F32), F64)), at)


@microkernel("iii")
def add_lanes_to_float64(e: Emit, to: Value, source: Value, count: Value) -> None:
    """The sums of the lanes of `count` vectors, likewise."""
    b = e.builder
    with e.loop(count) as i:
        at = e.pointer(to, i, F64, F64)
        total = e.reduce(b.fpext(e.load(source, b.mul(i, e.i64(W))), e.vector(F64)), b.fadd)
        b.store(b.fadd(b.load(at), total), at)


@microkernel("iii")
def add_float64(e: Emit, to: Value, source: Value, count: Value) -> None:
    b = e.builder
    with e.loop(count) as i:
        at = e.pointer(to, i, F64, F64)
        b.store(b.fadd(b.load(at), e.load_scalar(source, i, F64)), at)


@microkernel("iiii")
def add_listed(e: Emit, to: Value, elements: Value, values: Value, count: Value) -> None:
    """to[elements[i]] += values[i]."""
    b = e.builder
    with e.loop(count) as i:
        at = e.pointer(to, e.load_scalar(elements, i, I64), F64, F64)
        b.store(b.fadd(b.load(at), b.fpext(e.load_scalar(values, i, F32), F64)), at)


# Work items


@jit
def begin_item(p, t, own, item):
    """The memory of a thread, and the number of its work item."""
    put_i64(t.own, own)
    put_i64(t.item, item)


@jit
def begin_sums(g, t):
    """Clears the sums of a block of keys."""
    own = get_i64(t.own)
    clear(own, g.own_cleared)
    for i in range(g.load_count):
        load = load_sums_at(g.loads + i * LOAD_SUMS_BYTES)
        if load.listed:
            put_i64(own + load.own, ZERO)


@jit
def wait_item(p, t):
    """Waits until all items before this one are done. No deadlock: they were taken first."""
    spins, item = 0, get_i64(t.item)
    while load_acquire(p.gradients + TURN) != item:
        spins = back_off(spins, p.yield_thread)


@jit
def end_item(p, t):
    wait_item(p, t)
    store_release(p.gradients + TURN, get_i64(t.item) + 1)


@jit
def empty_list(p, t, load):
    """Adds the listed terms to the sums of all items, in its turn."""
    at = get_i64(t.own) + load.own
    elements = at + 8
    wait_item(p, t)
    add_listed(load.sums, elements, elements + 8 * (load.listed + W), get_i64(at))
    put_i64(at, ZERO)


@jit
def put_on_list(p, t, load, elements, apart, terms, step, count):
    """Lists terms, as many as the list takes at a time."""
    at = get_i64(t.own) + load.own
    for j in range(count):
        listed = get_i64(at)
        if listed + W > load.listed:
            empty_list(p, t, load)
            listed = ZERO
        to = at + 8 + 8 * listed
        values = at + 8 + 8 * (load.listed + W) + 4 * listed
        list_terms(to, values, elements + 4 * j * apart, terms + 4 * j * step, step, ONE, apart)
        put_i64(at, listed + W)


@jit
def add_heads(p, t, tile, load, terms, step, first, R, key, count):
    """Adds terms of W rows from `first` on and keys from number `key` of the block on, to sums of keys or distances."""
    n, own = tile.rows, get_i64(t.own) + load.own
    for h in range(first // n, (min(first + W, R) - 1) // n + 1):
        head = tile.head * (p.heads // p.kv_heads) + h
        to = own + 4 * h * load.own_h
        if load.axis == KEYS_AXIS:
            add_key_terms(to + 4 * W * key, terms, step, count, t.heads + 4 * first, head)
        else:
            row = tile.row + first - h * n + up(p.tile_keys, KEYS) + W - key
            add_distance_terms(to + 4 * row, terms, step, count, t.heads + 4 * first, head)


@jit
def add_loads(p, g, t, tile, ds, ld, first, R, key, count):
    """Adds dS [count, W], of W rows from `first` on and keys from `key` on, times derivatives, to gradients of captured
    tensors.
    """
    n, apart = tile.rows, p.mod_vectors * W
    for i in range(g.load_count):
        load = load_sums_at(g.loads + i * LOAD_SUMS_BYTES)
        own, terms, step = get_i64(t.own) + load.own, ds, ld
        if load.derivative >= 0:
            terms, step = t.derivatives + 4 * W * load.derivative, apart
            terms_of(terms, step, ds, ld, count)
        if load.axis == ROWS_AXIS:
            sum_keys(terms, step, count, t.mask_columns)
            for r in range(first, min(first + W, R)):
                to = own + 4 * (r // n * load.own_h + tile.row + r % n)
                put_f32(to, get_f32(to) + get_f32(t.mask_columns + 4 * (r - first)))
        elif load.axis == CELLS_AXIS:
            elements = t.derivatives + 4 * W * load.element
            if load.listed:
                put_on_list(p, t, load, elements, apart, terms, step, count)
            else:
                add_cell_terms(own, elements, terms, step, count, apart)
        elif p.indices:
            for j in range(count):
                number = selected_key(t.selected, key + j) - tile.block * p.tile_keys
                add_heads(p, t, tile, load, terms + 4 * j * step, step, first, R, number, ONE)
        else:
            add_heads(p, t, tile, load, terms, step, first, R, key - tile.block * p.tile_keys, count)


@jit
def add_sums(p, g, t, whole):
    """Adds the sums of a block of keys to those of all items, in its turn."""
    q_start, q_len, kv_start, kv_len, _ = sequence(p, whole.b)
    q_row = q_start if p.cu_q else whole.b * p.q_len
    kv_row = kv_start if p.cu_k else whole.b * p.kv_len
    group, keys = p.heads // p.kv_heads, whole.end - whole.start
    wait_item(p, t)
    for i in range(g.load_count):
        load = load_sums_at(g.loads + i * LOAD_SUMS_BYTES)
        own = get_i64(t.own) + load.own
        if load.axis == CELLS_AXIS:
            if load.listed:
                empty_list(p, t, load)
            else:
                add_float64(load.sums, own, load.sums_h)
            continue
        for h in range(group):
            source, to = own + 4 * h * load.own_h, load.sums + 8 * (whole.head * group + h) * load.sums_h
            if load.axis == ROWS_AXIS:
                add_to_float64(to + 8 * q_row, source, q_len)
            elif load.axis == KEYS_AXIS:
                add_lanes_to_float64(to + 8 * (kv_row + whole.start), source, keys)
            else:  # row i and key j of the block: i - j + up(tile_keys) + W in the thread's, + kv_len - 1 in all
                source += 4 * (up(p.tile_keys, KEYS) + W - (keys - 1))
                add_to_float64(to + 8 * (q_row + kv_row + kv_len - whole.end), source, q_len + keys - 1)
