"""Packs operands of tiles: q, k and v as blocks of bf16 parts (`amx.py`)."""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import numpy as np

from ..codegen import dtypes
from ..codegen.load_store import clear, get_f32, put_i64, put_one, transpose
from ..codegen.numba_ops import ONE, ZERO, F, jit, policy_jit, row_to_f32, up
from ..codegen.vector import F32, I16, I32, Emit, Value, W, microkernel
from ..kv_access import query_row, row_address
from ..mainloop.nonfinite import is_visible
from .amx import BLOCK, TILE


def split(e: Emit, x: Value, parts: int) -> list[Value]:
    """Splits float32 into a sum of bf16 parts, the largest first."""
    b = e.builder
    result = []
    for _ in range(parts):
        bits = b.add(b.bitcast(x, e.vector(I32)), e.i32s(0x8000))
        top = b.bitcast(b.and_(bits, e.i32s(-0x10000)), e.vector(F32))
        result.append(top)
        x = b.fsub(x, top)
    return result


def pair(e: Emit, even: Value, odd: Value) -> Value:
    """Two parts of `split` as pairs of bf16."""
    b = e.builder
    low = b.lshr(b.bitcast(even, e.vector(I32)), e.i32s(16))
    return b.or_(low, b.bitcast(odd, e.vector(I32)))


def make_split_row(parts: int, kind: str = "f32") -> Any:
    """`fn(to, part, jump, source, count)`: a row as bf16 rows, `part` bytes apart; NaN if it is not finite.

    From 32 elements to the next 32 it is `jump` bytes.
    """

    @microkernel("iiiii>f")
    def split_row(e: Emit, to: Value, part: Value, jump: Value, source: Value, count: Value) -> Value:
        b = e.builder
        check = e.var(e.zeros)
        with e.loop(b.sdiv(count, e.i64(BLOCK))) as step:
            for half in range(0, BLOCK, W):
                x = e.load(source, b.add(b.mul(step, e.i64(BLOCK)), e.i64(half)), kind)
                check.set(e.fma(x, e.zeros, check.get()))
                for n, top in enumerate(split(e, x, parts)):
                    short = b.trunc(b.lshr(b.bitcast(top, e.vector(I32)), e.i32s(16)), e.vector(I16))
                    at = b.add(b.add(to, b.mul(part, e.i64(n))), b.mul(step, jump))
                    b.store(short, e.pointer(at, half, I16, short.type)).align = 2
        return e.reduce(check.get(), b.fadd)

    return split_row


@microkernel("iiii")
def copy_row(e: Emit, to: Value, jump: Value, source: Value, count: Value) -> None:
    """`count` bf16 numbers, 32 of them `jump` bytes from the next 32."""
    b = e.builder
    with e.loop(b.sdiv(count, e.i64(BLOCK))) as step:
        e.store(e.load(source, b.mul(step, e.i64(W))), b.add(to, b.mul(step, jump)))


def make_transpose_pairs(parts: int, kind: str) -> Any:
    """`fn(to, part, source, step)`: 16 columns of 32 rows become the rows of a tile; NaN if a number is not finite.

    The rows are `step` bytes apart, the tiles of their parts `part` bytes.
    """

    @microkernel("iiii>f")
    def transpose_pairs(e: Emit, to: Value, part: Value, source: Value, step: Value) -> Value:
        b = e.builder
        check = e.var(e.zeros)
        pairs: list[list[Value]] = [[] for _ in range(parts)]
        for i in range(0, BLOCK, 2):
            rows = [e.load(b.add(source, b.mul(step, e.i64(i + n))), 0, kind) for n in (0, 1)]
            for x in rows:
                check.set(e.fma(x, e.zeros, check.get()))
            even, odd = ([x] if kind == "bf16" else split(e, x, parts) for x in rows)
            for n in range(parts):
                pairs[n].append(b.bitcast(pair(e, even[n], odd[n]), e.vector(F32)))
        for n in range(parts):
            for i, row in enumerate(e.transpose(pairs[n])):
                e.store(row, b.add(to, b.mul(part, e.i64(n))), i * W)
        return e.reduce(check.get(), b.fadd)

    return transpose_pairs


# np.int64, not int: Numba would compile a function again for every literal argument.
W_ = np.int64(W)
ROW, STEP = np.int64(2 * BLOCK), np.int64(2 * TILE)  # bytes from 32 elements to the next: of a row, of an operand


@jit
def tile_row(row, steps):
    """Where row `row` of an operand starts, in bytes; it goes on in the next of `steps` steps 2 tiles further."""
    return row // BLOCK * steps * STEP + row % BLOCK // 16 * TILE + row % 16 * 64


def pack_functions(tiles):
    """`pack_queries`, `pack_keys` and `pack_values` of the policy."""
    parts, load_tile_config, release = tiles.parts, tiles.load_tile_config, tiles.release
    jit_parts, PARTS_ = policy_jit(parts), np.int64(parts)
    split_row, split_half_row = make_split_row(parts), make_split_row(parts, "f16")
    transpose_pairs, transpose_pairs_f16 = make_transpose_pairs(1, "bf16"), make_transpose_pairs(parts, "f16")

    @jit_parts
    def split_f32(w, width, to, part, jump, padded, keep):
        """`pack_row` of the float32 row at `w.rows`."""
        if split_row(to, part, jump, w.rows, padded) == F(0):
            return False, False
        infinite = False
        for i in range(width):
            x = get_f32(w.rows + 4 * i)
            if x - x != F(0):
                infinite |= x == x
                at = to + i // BLOCK * jump + 2 * (i % BLOCK)
                put_one(at, dtypes.BF16, ZERO, x if keep else F(0))
                for n in range(1, parts):
                    put_one(at + n * part, dtypes.BF16, ZERO, F(0))
        return True, infinite

    @jit_parts
    def pack_row(w, dtype, width, to, part, jump, source, padded, keep):
        """Packs a row as bf16 rows, `part` bytes apart, with zeros up to `padded`. Returns whether a number was not
        finite, and whether one was infinite. Such a number is its own first part, or 0 unless `keep`.
        """
        if parts == 1 and dtype == dtypes.BF16 and width == padded and keep:
            copy_row(to, jump, source, padded)
            return False, False
        if (
            parts > 1
            and dtype == dtypes.F16
            and width == padded
            and split_half_row(to, part, jump, source, padded) == F(0)
        ):
            return False, False
        row_to_f32(w.rows, source, dtype, width, padded, ZERO, ZERO, ONE)
        return split_f32(w, width, to, part, jump, padded, keep)

    @jit_parts
    def pack_key_row(p, w, x, at, to, part, jump, key, padded, keep):
        """The row of a key in K or V."""
        source = row_address(p, x.base, x.b, x.h, x.l, at, key)
        if x.shared:  # columns of k_shared follow
            rest = row_address(p, p.k_shared, p.k_shared_b, ZERO, p.k_shared_l, at, key)
            if parts == 1 and x.width % BLOCK == 0 and x.shared % BLOCK == 0:
                copy_row(to, jump, source, x.width)
                copy_row(to + x.width // BLOCK * jump, jump, rest, x.shared)
                return False, False
            row_to_f32(w.rows, source, x.dtype, x.width, x.width, ZERO, ZERO, ONE)
            row_to_f32(w.rows + 4 * x.width, rest, x.dtype, x.shared, padded - x.width, ZERO, ZERO, ONE)
            return split_f32(w, x.width + x.shared, to, part, jump, padded, keep)
        return pack_row(w, x.dtype, x.width, to, part, jump, source, padded, keep)

    @jit_parts
    def pack_queries(p, t, w, item, q_start, R):
        """Packs Q^T, an operand of 32 columns for each panel; clears the sums. Returns whether a number is infinite."""
        bad, n, D, Dv = False, item.rows, up(p.head_dim, BLOCK), up(p.value_dim, BLOCK)
        rows, part, q_part = w.rows + 4 * max(D, Dv), 2 * W * D, 2 * up(R, BLOCK) * D  # rows: [parts, W, D]
        for first in range(0, up(R, BLOCK), W):
            for r in range(first, first + W):
                row = rows + 2 * (r - first) * D
                if r < R:
                    at = query_row(p, item, q_start, r // n, r % n)
                    bad |= pack_row(w, p.q_dtype, p.head_dim, row, part, ROW, at, D, True)[1]
                else:
                    for i in range(parts):
                        clear(row + i * part, D // 2)
            for i in range(parts):
                tile = w.q + i * q_part + first // BLOCK * (D // BLOCK) * STEP + first % BLOCK // W * TILE
                for d in range(D // BLOCK):
                    transpose(tile + d * STEP, W_, rows + i * part + 4 * d * W, D // 2)
        if bad and parts > 1:
            return True
        clear(w.acc, up(R, BLOCK) * Dv)
        clear(w.v, PARTS_ * Dv * p.tile_keys // 2)  # padding columns
        load_tile_config(p.tile_config)
        return False

    @jit_parts
    def pack_keys(p, t, w, item, x, at, tile, count, last):
        """Packs K, an operand of `count` rows and some padding. Returns whether a row sees an infinite number."""
        bad, D = False, up(p.head_dim, BLOCK)
        part = 2 * p.tile_keys * D
        for j in range(count):
            if pack_key_row(p, w, x, at, w.k + tile_row(j, D // BLOCK), part, STEP, tile + j, D, True)[1] and parts > 1:
                for r in range(p.heads // p.kv_heads * item.rows):
                    bad |= is_visible(p, t, item, r, tile + j)
        if bad:
            release()
            return True
        return False

    @jit_parts
    def pack_value_tiles(p, t, w, x, at, tile, count, keep):
        """Packs V^T, an operand of Dv rows, padded with zeros to a multiple of 32 keys. Returns whether a number is not
        finite. Unless `keep`, such numbers become 0; `v_table` marks their keys.
        """
        bad, D, Dv, BK = False, up(p.head_dim, BLOCK), up(p.value_dim, BLOCK), p.tile_keys
        rows, part, v_part = w.rows + 4 * max(D, Dv), 2 * BLOCK * Dv, 2 * Dv * BK  # rows: [parts, 32, Dv]
        for j in range(0, count, BLOCK):
            base, step = rows, 2 * Dv
            evenly = (p.table == 0 or p.page % BLOCK == 0) and at.selected == 0
            in_place = keep and x.width % W == 0 and j + BLOCK <= count and evenly
            if in_place and (parts == 1 or x.dtype == dtypes.F16):
                base, step = row_address(p, x.base, x.b, x.h, x.l, at, tile + j), x.l
            else:
                in_place = False
                for i in range(BLOCK):
                    if j + i < count:
                        value, _ = pack_key_row(p, w, x, at, rows + 2 * i * Dv, part, ROW, tile + j + i, Dv, keep)
                        put_i64(t.v_table + 8 * (j + i), ONE if value else ZERO)
                        bad |= value
                    else:
                        for n in range(parts):
                            clear(rows + 2 * i * Dv + n * part, Dv // 2)
            for c in range(0, up(x.width, W), W):
                to = w.v + tile_row(c, BK // BLOCK) + j // BLOCK * STEP
                if in_place and parts > 1:
                    bad |= transpose_pairs_f16(to, v_part, base + 2 * c, step) != F(0)
                else:
                    for n in range(parts):
                        bad |= transpose_pairs(to + n * v_part, ZERO, base + n * part + 2 * c, step) != F(0)
        return bad

    @jit_parts
    def pack_values(p, t, w, x, at, tile, count, full):
        """Packs V^T; extracts non-finite values if some row does not see them, or they cannot be split."""
        nonfinite = pack_value_tiles(p, t, w, x, at, tile, count, True) and (parts > 1 or not full)
        if nonfinite:
            pack_value_tiles(p, t, w, x, at, tile, count, False)
        return nonfinite

    return pack_queries, pack_keys, pack_values
