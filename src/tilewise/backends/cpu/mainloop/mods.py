"""Functions of the user in the mainloops: calls of their kernels (`mod_kernels.py`). Numba code.

Tiles have states as those of masks: skip, mixed, full. In a full tile mask_mod is not evaluated.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

from numba import types

from ..codegen import dtypes
from ..codegen.calls import call_mod_columns, call_mod_rows
from ..codegen.load_store import get_f32, get_i32, get_i64, get_u8, put_f32
from ..codegen.numba_ops import ONE, ZERO, F, jit
from ..codegen.vector import F32, I32, I64, Emit, Value, W, microkernel
from ..kv_access import affine
from .mask import FULL, MIXED, SKIP, has_bias
from .selected_keys import selected_key


@microkernel("f>i")
def float_bits(e: Emit, x: Value) -> Value:
    return e.builder.zext(e.builder.bitcast(x, I32), I64)


@microkernel("ii>i")
def hides_some(e: Emit, s: Value, count: Value) -> Value:
    """Whether one of `count` vectors of scores has a -inf."""
    b = e.builder
    hidden = e.var(e.zeros)
    with e.loop(b.mul(count, e.i64(W)), W) as i:
        here = b.uitofp(b.fcmp_ordered("==", e.load(s, i), e.f32s(-math.inf)), e.vector(F32))
        hidden.set(b.fadd(hidden.get(), here))
    return b.fptosi(e.reduce(hidden.get(), b.fadd), I64)


@jit
def scale_in_mods(p):
    """Whether the kernels of score_mod scale the dot products: nothing else comes before it."""
    added = p.slopes != 0 or (p.mask != 0 and p.mask_dtype != dtypes.BOOL) or has_bias(p)
    return p.mod_scores != 0 and not (p.softcap > 0 or added)


@jit
def mod_factor(p):
    """What the kernels multiply scores by, as bits."""
    return float_bits(F(p.scale) if scale_in_mods(p) else F(1))


@jit
def has_mods(p):
    return p.mod_scores != 0 or p.mod_masks != 0 or p.mod_states != 0


@jit
def mod_state(p, item, start, end):
    """The state of a tile by mask_mod alone, for all heads of the group; mixed if nothing is known."""
    if p.mod_states == 0 or p.indices:
        return types.int64(MIXED if p.mod_masks else FULL)
    group = p.heads // p.kv_heads
    full, skipped = True, True
    for g in range(group):
        head = item.head * group + g
        states = p.mod_states + item.b * p.mod_states_b + head * p.mod_states_h
        states += item.row // p.tile_rows * p.mod_states_q
        for k in range(start // p.tile_keys, (end - 1) // p.tile_keys + 1):
            state = get_u8(states + k * p.mod_states_k)
            full &= state == FULL
            skipped &= state == SKIP
    return types.int64(FULL) if full else types.int64(SKIP) if skipped else types.int64(MIXED)


@jit
def mods_apply(p, state):
    """Whether the functions change or hide scores in a tile of this state."""
    return p.mod_scores != 0 or (p.mod_masks != 0 and state != FULL)


@jit
def mods_columns(p, t, item, s, step, first, key, count, keep):
    """The functions on W query rows from `first` on and `count` keys from `key` on; `keep`: -inf is hidden already."""
    places, factor, kept = affine(p, item.b, ZERO), mod_factor(p), ONE if keep else ZERO
    heads, positions = t.heads + 4 * first, t.positions + 4 * first
    n = ONE if p.indices else types.int64(count)
    for j in range(0, count, n):
        here = selected_key(t.selected, key + j) if p.indices else types.int64(key)
        call_mod_columns(p.mod_columns, s + 4 * j * step, step, n, item.b, heads, positions, here, places.k_start,
                         places.k_stride, p.captured, factor, kept,
                         t.derivatives + 4 * W * p.mod_vectors * j)  # fmt: skip


@jit
def mods_row(p, t, item, r, row, key, vectors, keep):
    """The functions on `vectors` vectors of keys from `key` on of query row r. Returns whether a score is -inf."""
    places, factor, kept = affine(p, item.b, ZERO), mod_factor(p), ONE if keep else ZERO
    head = item.head * (p.heads // p.kv_heads) + r // item.rows
    position = types.int64(get_i32(t.positions + 4 * r))
    start, stride, table = places.k_start, places.k_stride, p.captured
    if p.indices:  # one by one
        for j in range(vectors * W):
            put_f32(t.mask_rows, get_f32(row + 4 * j))
            here = selected_key(t.selected, min(key + j, get_i64(t.selected_count) - 1))
            call_mod_rows(
                p.mod_rows, t.mask_rows, ONE, item.b, head, position, here, start, stride, table, factor, kept
            )
            put_f32(row + 4 * j, get_f32(t.mask_rows))
    else:
        call_mod_rows(p.mod_rows, row, vectors, item.b, head, position, key, start, stride, table, factor, kept)
    return hides_some(row, vectors) != 0
