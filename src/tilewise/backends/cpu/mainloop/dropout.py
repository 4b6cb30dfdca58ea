"""Dropout in the mainloops, after the softmax: `core/dropout.py` for vectors of cells. Numba code.

Weights of dropped cells become 0. In prefill the others are multiplied once, in the accumulator (`scale_kept`).
"""

# mypy: ignore-errors
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types

from ....core.dropout import KEY_STEPS, MULTIPLIERS, ROUNDS
from ..codegen.load_store import get_f32, get_i32, get_i64, put_f32, row_scale
from ..codegen.numba_ops import ONE, ZERO, F, jit, up
from ..codegen.vector import I16, I32, I64, Emit, Value, W, microkernel
from ..gemm.amx import BLOCK, TILE
from ..kv_access import affine
from .selected_keys import selected_key
from .softmax import LOG2E

KEYS_OF_COUNTER = 8
PAIRS, PAIR_BYTES = np.int64(BLOCK // 2), 4 * W  # of keys in a block, and of W rows
Words = list[Value]


def multiply(e: Emit, x: Value, by: int) -> tuple[Value, Value]:
    """High and low halves of the products of W words: of the even lanes, then of the odd ones, in 64 bits."""
    b, wide = e.builder, ir.VectorType(I64, W // 2)
    words = b.bitcast(x, wide)
    low, shift, factor = (ir.Constant(wide, [n] * (W // 2)) for n in (0xFFFFFFFF, 32, by))
    even, odd = (b.bitcast(b.mul(y, factor), x.type) for y in (b.and_(words, low), b.lshr(words, shift)))

    def lanes(first: int) -> Value:
        return e.shuffle(even, odd, [i // 2 * 2 + first + i % 2 * W for i in range(W)])

    return lanes(1), lanes(0)


def philox(e: Emit, counter: Words, seed: Value) -> Words:
    b, words = e.builder, list(counter)
    keys = [b.trunc(seed, I32), b.trunc(b.lshr(seed, e.i64(32)), I32)]
    for n in range(ROUNDS):
        k0, k1 = (
            e.splat_i32(b.add(key, ir.Constant(I32, n * step & 0xFFFFFFFF)))
            for key, step in zip(keys, KEY_STEPS, strict=True)
        )
        (high_a, low_a), (high_b, low_b) = (multiply(e, words[2 * i], MULTIPLIERS[i]) for i in range(2))
        words = [b.xor(b.xor(high_b, words[1]), k0), low_b, b.xor(b.xor(high_a, words[3]), k1), low_a]
    return words


class Cells:
    """Numbers of cells of W rows: what their counters share."""

    def __init__(self, e: Emit, heads: Value, qpos: Value, batch: Value, seed: Value, threshold: Value) -> None:
        self.e, self.heads, self.qpos, self.seed = e, heads, qpos, seed
        self.batch = e.splat_i32(e.builder.trunc(batch, I32))
        self.least = e.splat_i32(e.builder.trunc(threshold, I32))

    def words(self, block: Value) -> Words:
        """Of the eight keys from position 8 * block on, a scalar or a vector."""
        e = self.e
        block = block if isinstance(block.type, ir.VectorType) else e.splat_i32(e.builder.trunc(block, I32))
        return philox(e, [block, self.qpos, self.heads, self.batch], self.seed)

    def is_kept(self, word: Value, odd: Value | bool) -> Value:
        """Whether the cells of a word's low or high halves keep their weights. `odd`: of i32, which half."""
        e, b = self.e, self.e.builder
        if isinstance(odd, bool):
            number = b.lshr(word, e.i32s(16)) if odd else b.and_(word, e.i32s(0xFFFF))
        else:
            number = b.and_(b.lshr(word, b.shl(odd, e.i32s(4))), e.i32s(0xFFFF))
        return b.icmp_unsigned(">=", number, self.least)

    def at(self, position: Value) -> Value:
        """Whether the cells of keys at positions, a vector of i32, keep their weights."""
        e, b = self.e, self.e.builder
        words = self.words(b.ashr(position, e.i32s(3)))
        number = b.and_(b.lshr(position, e.i32s(1)), e.i32s(3))
        word = words[0]
        for n in range(1, 4):
            word = b.select(b.icmp_signed("==", number, e.i32s(n)), words[n], word)
        return self.is_kept(word, b.and_(position, e.i32s(1)))

    def each(self, count: Value, first: Value, stride: Value, do: Callable[[Value, Value], None]) -> None:
        """`do(j, kept)` for `count` keys, that of number j at position first + stride * j. With a stride of 1, eight
        keys share their words.
        """
        e, b = self.e, self.e.builder
        with b.if_else(b.icmp_signed("==", stride, e.i64(1))) as (dense, strided):
            with dense:
                skip = b.and_(first, e.i64(KEYS_OF_COUNTER - 1))
                with e.loop(b.add(count, skip), KEYS_OF_COUNTER) as at:
                    words = self.words(b.ashr(b.add(first, at), e.i64(3)))
                    j = b.sub(at, skip)
                    for n in range(KEYS_OF_COUNTER):
                        here = b.add(j, e.i64(n))
                        with b.if_then(b.icmp_unsigned("<", here, count)):
                            do(here, self.is_kept(words[n // 2], n % 2 == 1))
            with strided, e.loop(count) as j:
                position = e.splat_i32(b.trunc(b.add(first, b.mul(stride, j)), I32))
                do(j, self.at(position))


def cells_of_rows(e: Emit, heads: Value, positions: Value, k_start: Value, batch: Value, seed: Value,
                  threshold: Value) -> Cells:  # fmt: skip
    """Of W rows, whose heads and distances from the first key are in memory."""
    qpos = e.builder.add(e.load_i32(positions), e.splat_i32(e.builder.trunc(k_start, I32)))
    return Cells(e, e.load_i32(heads), qpos, batch, seed, threshold)


@microkernel("iiiiiiiiiii")
def drop_cells(e: Emit, s: Value, step: Value, count: Value, heads: Value, positions: Value, batch: Value,
               k_start: Value, first: Value, stride: Value, seed: Value, threshold: Value) -> None:  # fmt: skip
    """Weights s of W rows and `count` keys, `step` floats apart, the first at position `first`."""
    cells = cells_of_rows(e, heads, positions, k_start, batch, seed, threshold)

    def drop(j: Value, kept: Value) -> None:
        at = e.builder.mul(j, step)
        e.store(e.builder.select(kept, e.load(s, at), e.zeros), s, at)

    cells.each(count, first, stride, drop)


@microkernel("iiiiiifiiiiiiiif")
def probs_dropped(e: Emit, s: Value, ds: Value, step: Value, count: Value, lse: Value, delta: Value, factor: Value,
                  heads: Value, positions: Value, batch: Value, k_start: Value, first: Value, stride: Value,
                  seed: Value, threshold: Value, scale: Value) -> None:  # fmt: skip
    """`backward_cells.probs_masked` with dropout: scores s to P after it, and dP in `ds` to dS = P (dP - delta), with P
    before it and dP after it.
    """
    b = e.builder
    cells = cells_of_rows(e, heads, positions, k_start, batch, seed, threshold)
    minus_lse, minus_delta, log2e = b.fneg(e.load(lse)), b.fneg(e.load(delta)), e.f32s(LOG2E)
    factor, scale = e.splat(factor), e.splat(scale)

    def drop(j: Value, kept: Value) -> None:
        at = b.mul(j, step)
        x, dp = e.load(s, at), e.load(ds, at)
        p = e.exp2_of_product(e.fma(x, factor, minus_lse), log2e)
        y = b.fmul(p, b.select(kept, e.fma(scale, dp, minus_delta), minus_delta))
        hidden = b.fcmp_ordered("==", x, e.f32s(-math.inf))  # V may be NaN there, and the row's lse too
        y = b.select(hidden, e.zeros, y)
        p = b.select(b.or_(hidden, b.not_(kept)), e.zeros, b.fmul(p, scale))
        e.store(p, s, at)
        e.store(y, ds, at)

    cells.each(count, first, stride, drop)


@microkernel("iiiiiiiiif")
def drop_row(e: Emit, s: Value, vectors: Value, head: Value, qpos: Value, batch: Value, first: Value, stride: Value,
             seed: Value, threshold: Value, scale: Value) -> None:  # fmt: skip
    """Weights of one row over `vectors` vectors of keys; those that are kept are multiplied by `scale`."""
    b = e.builder
    head, qpos, step, start = (e.splat_i32(b.trunc(x, I32)) for x in (head, qpos, stride, first))
    cells, scale = Cells(e, head, qpos, batch, seed, threshold), e.splat(scale)
    lanes = ir.Constant(e.vector(I32), list(range(W)))
    with e.loop(b.mul(vectors, e.i64(W)), W) as j:
        position = b.add(start, b.mul(step, b.add(e.splat_i32(b.trunc(j, I32)), lanes)))
        weights = b.fmul(e.load(s, j), scale)
        e.store(b.select(cells.at(position), weights, e.zeros), s, j)


@microkernel("iiiiiiiiiiii")
def drop_pairs(e: Emit, pairs: Value, part: Value, parts: Value, count: Value, heads: Value, positions: Value,
               batch: Value, k_start: Value, first: Value, stride: Value, seed: Value,
               threshold: Value) -> None:  # fmt: skip
    """Weights of W rows as tiles of bf16 (`softmax_tiles.py`): `count` pairs of keys, in `parts` parts, `part` bytes
    apart. A word has the numbers of a pair, if the first key's position is a multiple of 8.
    """
    b = e.builder
    cells = cells_of_rows(e, heads, positions, k_start, batch, seed, threshold)
    halves = ir.VectorType(I16, 2 * W)
    most = b.trunc(b.sub(threshold, e.i64(1)), I16)
    most = b.shuffle_vector(
        b.insert_element(ir.Constant(halves, ir.Undefined), most, ir.Constant(I32, 0)),
        ir.Constant(halves, ir.Undefined),
        ir.Constant(ir.VectorType(I32, 2 * W), [0] * (2 * W)),
    )

    def drop(number: Value, mask: Value) -> None:
        """A pair of 32 keys' 16; blocks are 2 * TILE bytes apart."""
        at = b.mul(b.lshr(number, e.i64(4)), e.i64(2 * TILE))
        at = b.add(b.add(pairs, at), b.mul(b.and_(number, e.i64(15)), e.i64(PAIR_BYTES)))
        with e.loop(parts) as n:
            to = b.add(at, b.mul(n, part))
            kept = b.and_(b.bitcast(e.load(to), e.vector(I32)), mask)
            e.store(b.bitcast(kept, e.load(to).type), to)

    whole = b.and_(b.or_(first, b.mul(count, e.i64(2))), e.i64(KEYS_OF_COUNTER - 1))
    aligned = b.and_(b.icmp_signed("==", stride, e.i64(1)), b.icmp_signed("==", whole, e.i64(0)))
    with b.if_else(aligned) as (by_words, one_by_one):
        with by_words, e.loop(count, 4) as number:
            words = cells.words(b.ashr(b.add(first, b.mul(number, e.i64(2))), e.i64(3)))
            for n, word in enumerate(words):
                kept = b.sext(b.icmp_unsigned(">", b.bitcast(word, halves), most), halves)
                drop(b.add(number, e.i64(n)), b.bitcast(kept, e.vector(I32)))
        with one_by_one, e.loop(count) as number:
            position = b.trunc(b.add(first, b.mul(stride, b.mul(number, e.i64(2)))), I32)
            both = [e.splat_i32(x) for x in (position, b.add(position, b.trunc(stride, I32)))]
            low, high = (b.sext(cells.at(x), e.vector(I32)) for x in both)
            drop(number, b.or_(b.and_(low, e.i32s(0xFFFF)), b.and_(high, e.i32s(-0x10000))))


@jit
def has_dropout(p):
    return p.dropout_seed != 0


@jit
def drop_columns(p, t, item, s, step, first, key, count):
    """Weights of W query rows from `first` on and `count` keys from `key` on."""
    places, seed = affine(p, item.b, ZERO), get_i64(p.dropout_seed)
    heads, positions, start, stride = t.heads + 4 * first, t.positions + 4 * first, places.k_start, places.k_stride
    n = ONE if p.indices else types.int64(count)
    for j in range(0, count, n):
        at = start + stride * (selected_key(t.selected, key + j) if p.indices else types.int64(key))
        drop_cells(s + 4 * j * step, step, n, heads, positions, item.b, start, at, stride, seed, p.dropout_threshold)


@jit
def probs_of_columns(p, t, tile, s, ds, step, first, key, count, factor):
    """P and dS of the same, of their scores and dP."""
    places, seed = affine(p, tile.b, ZERO), get_i64(p.dropout_seed)
    heads, positions, start, stride = t.heads + 4 * first, t.positions + 4 * first, places.k_start, places.k_stride
    n, m, l = ONE if p.indices else types.int64(count), t.m + 4 * first, t.l + 4 * first
    for j in range(0, count, n):
        at, here = start + stride * (selected_key(t.selected, key + j) if p.indices else types.int64(key)), 4 * j * step
        probs_dropped(s + here, ds + here, step, n, m, l, factor, heads, positions, tile.b, start, at, stride, seed,
                      p.dropout_threshold, F(p.dropout_scale))  # fmt: skip


@jit
def drop_tiles(p, t, item, pairs, part, parts, first, key, blocks):
    """Weights of W query rows from `first` on as tiles of bf16: `blocks` blocks of keys from `key` on."""
    places, seed, threshold = affine(p, item.b, ZERO), get_i64(p.dropout_seed), p.dropout_threshold
    heads, positions, start, stride = t.heads + 4 * first, t.positions + 4 * first, places.k_start, places.k_stride
    if p.indices:
        last = get_i64(t.selected_count) - 1
        for n in range(types.int64(blocks * PAIRS)):
            at = start + stride * selected_key(t.selected, min(key + 2 * n, last))
            after = start + stride * selected_key(t.selected, min(key + 2 * n + 1, last))
            to = pairs + n // PAIRS * 2 * TILE + n % PAIRS * PAIR_BYTES
            drop_pairs(to, part, parts, ONE, heads, positions, item.b, start, at, after - at, seed, threshold)
    else:
        at = start + stride * key
        drop_pairs(pairs, part, parts, blocks * PAIRS, heads, positions, item.b, start, at, stride, seed, threshold)


@jit
def drop_keys_of_row(p, t, item, r, row, key, count):
    """Weights of query row r over `count` keys from `key` on."""
    places, seed, threshold = affine(p, item.b, ZERO), get_i64(p.dropout_seed), p.dropout_threshold
    start, stride, scale = places.k_start, places.k_stride, F(p.dropout_scale)
    head = item.head * (p.heads // p.kv_heads) + r // item.rows
    qpos = start + types.int64(get_i32(t.positions + 4 * r))
    if p.indices:
        for j in range(count):
            put_f32(t.mask_rows, get_f32(row + 4 * j))
            at = start + stride * selected_key(t.selected, key + j)
            drop_row(t.mask_rows, ONE, head, qpos, item.b, at, stride, seed, threshold, scale)
            put_f32(row + 4 * j, get_f32(t.mask_rows))
    else:
        vectors = up(count, np.int64(W)) // W
        drop_row(row, vectors, head, qpos, item.b, start + stride * key, stride, seed, threshold, scale)


@jit
def scale_kept(p, t, R):
    """Multiplies the accumulator of R rows by what the weights of kept cells are multiplied by."""
    row_scale(t.acc, R * up(p.value_dim, W), F(p.dropout_scale))
