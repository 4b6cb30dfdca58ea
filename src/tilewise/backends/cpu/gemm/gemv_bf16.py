"""Decode by AVX-512 BF16 (VDPBF16PS), for V in K: each instruction multiplies 32 pairs of bf16 numbers.

Query rows are in blocks of 32, 16, 8, 4, 2 or 1, so that every lane is used. Q K^T multiplies words of K (two elements
each), read in place, by packed queries; P V multiplies pairs of rows of V, interleaved on load, by weights rounded to
bf16.

    packed Q     [D / 2 / words, rows, words]    two vectors hold `words` words of each row of a block
    s            [rows, keys] = q k^T            lanes of a row are added at the end
    acc          [rows, Dv] += p v
"""

from __future__ import annotations

from typing import Any

from ..codegen.bf16_dot import dot_pairs
from ..codegen.load_store import get_i32, put_i32
from ..codegen.numba_ops import ZERO, jit
from ..codegen.prefetch import prefetch_line
from ..codegen.vector import F32, I16, I64, Emit, Value, W, microkernel
from ..scratch import SCORES

BLOCKS = (32, 16, 8, 4, 2, 1)  # query rows
KEYS = 8  # of a block of scores: their addresses fit in registers
LDS = int(SCORES)  # floats of a row of scores


@jit
def block_rows(left):  # type: ignore[no-untyped-def]
    """Rows of the next block, if `left` are left."""
    rows = 32
    while rows > left:
        rows //= 2
    return rows


@jit
def pack_pairs(to, row, r, rows, words):  # type: ignore[no-untyped-def]
    """Packs a bf16 row of `words` words as row `r` of a block of `rows` rows."""
    each = 32 // rows if rows > 1 else 16  # words of a row in two vectors; a lone row has one
    for i in range(words):
        put_i32(to + 4 * ((i // each * rows + r) * each + i % each), get_i32(row + 4 * i))


def make_qk(rows: int) -> Any:
    """Scores of a block of `rows` query rows."""
    vectors = 2 if rows > 1 else 1  # with more, loads would be the bottleneck
    words = vectors * W // rows

    @microkernel("iiiiii")
    def qk(e: Emit, s: Value, table: Value, q: Value, steps: Value, sums: Value, distance: Value) -> None:
        """s[rows, 16 keys] over 32 * steps elements. `sums` is memory for 32 vectors."""
        b = e.builder
        with e.loop(e.i64(W), KEYS) as first:
            at = b.add(table, b.mul(first, e.i64(8)))
            totals = [[e.var(e.zeros) for _ in range(vectors)] for _ in range(KEYS)]
            keys = [e.load_scalar(at, j, I64) for j in range(KEYS)]
            later = [e.load_scalar(at, b.add(distance, e.i64(j)), I64) for j in range(KEYS)]
            with e.loop(steps) as step:  # a cache line of each key
                for row in later:
                    prefetch_line(e, b.add(row, b.mul(step, e.i64(4 * W))), level=2)
                for u in range(W // words):
                    block = b.mul(b.add(b.mul(step, e.i64(W // words)), e.i64(u)), e.i64(vectors * W))
                    queries = [e.load(q, b.add(block, e.i64(n * W))) for n in range(vectors)]
                    for key, total in zip(keys, totals, strict=True):
                        part = e._load(key, b.add(b.mul(step, e.i64(W)), e.i64(u * words)), F32, words)
                        x = e.shuffle(part, part, [lane % words for lane in range(W)])
                        for n in range(vectors):
                            total[n].set(dot_pairs(e, x, queries[n], total[n].get()))
            for j, total in enumerate(totals):
                for n in range(vectors):
                    e.store(total[n].get(), sums, b.mul(b.add(first, e.i64(n * W + j)), e.i64(W)))
        columns = []  # [lane][key]
        for n in range(vectors):
            columns += e.transpose([e.load(sums, (n * W + j) * W) for j in range(W)])
        for r in range(rows):
            row = columns[r * words]
            for column in columns[r * words + 1 : (r + 1) * words]:
                row = b.fadd(row, column)
            e.store(row, s, r * LDS)

    return qk


def make_pv(rows: int, vectors: int) -> Any:
    """Adds to `vectors` vectors of columns of a block of `rows` rows."""

    @microkernel("iiiiii")
    def pv(e: Emit, acc: Value, width: Value, p: Value, table: Value, start: Value, pairs: Value) -> None:
        """acc[rows, vectors * W] += p v over `pairs` pairs of keys, of V's columns from byte `start` of a row on."""
        b = e.builder
        cells = [(r, n) for r in range(rows) for n in range(vectors)]
        sums = {cell: e.var(e.zeros) for cell in cells}
        with e.loop(pairs) as i:
            both = [b.add(e.load_scalar(table, b.add(b.mul(i, e.i64(2)), e.i64(j)), I64), start) for j in (0, 1)]
            for n in range(vectors):
                x, y = (e._load(row, n * W, I16, W) for row in both)
                interleaved = e.shuffle(x, y, [lane for m in range(W) for lane in (m, m + W)])
                values = b.bitcast(interleaved, e.zeros.type)
                for r in range(rows):
                    weights = e.splat(e.load_scalar(p, b.add(i, e.i64(r * LDS)), F32))
                    sums[r, n].set(dot_pairs(e, weights, values, sums[r, n].get()))
        for r, n in cells:
            at = b.add(b.mul(width, e.i64(r)), e.i64(n * W))
            e.store(b.fadd(e.load(acc, at), sums[r, n].get()), acc, at)

    return pv


@microkernel("ii")
def round_row(e: Emit, s: Value, count: Value) -> None:
    """Rounds `count` weights to bf16 in place, each pair of keys in one word."""
    b = e.builder
    with e.loop(count, W) as i:
        short = b.trunc(e.bf16_bits(e.load(s, i), e.i32s), e.vector(I16))
        b.store(short, e.pointer(s, i, I16, short.type)).align = 2


qk_32, qk_16, qk_8, qk_4, qk_2, qk_1 = map(make_qk, BLOCKS)
pv_8x3, pv_8x2, pv_4x4, pv_4x2, pv_2x8, pv_2x2, pv_1x8, pv_1x2 = (
    make_pv(rows, vectors) for rows, vectors in ((8, 3), (8, 2), (4, 4), (4, 2), (2, 8), (2, 2), (1, 8), (1, 2))
)


def bf16_qk(s, lds, R, rows, count, q, steps, copy, sums, distance):  # type: ignore[no-untyped-def]
    """s [R, count] = q k^T; `count` is a multiple of 32. As `amx_qk`."""
    r = 0
    while r < R:
        n = block_rows(R - r)
        queries = q + 64 * r * steps
        for j in range(0, count, 16):
            to, keys = s + 4 * (r * lds + j), rows + 8 * j
            if n == 32:
                qk_32(to, keys, queries, steps, sums, distance)
            elif n == 16:
                qk_16(to, keys, queries, steps, sums, distance)
            elif n == 8:
                qk_8(to, keys, queries, steps, sums, distance)
            elif n == 4:
                qk_4(to, keys, queries, steps, sums, distance)
            elif n == 2:
                qk_2(to, keys, queries, steps, sums, distance)
            else:
                qk_1(to, keys, queries, steps, sums, distance)
        r += n
        distance = ZERO  # prefetched already


@jit
def add_strip(acc, columns, p, table, c, pairs, rows):  # type: ignore[no-untyped-def]
    """Adds to some columns from `c` on, for 8, 4, 2 or 1 `rows`; returns how many."""
    to, left = acc + 4 * c, (columns - c) // 16
    if rows == 8 and (left == 3 or left > 4):
        pv_8x3(to, columns, p, table, 2 * c, pairs)
        return 48
    if rows == 8:
        pv_8x2(to, columns, p, table, 2 * c, pairs)
    elif rows == 4 and left >= 4:
        pv_4x4(to, columns, p, table, 2 * c, pairs)
        return 64
    elif rows == 4:
        pv_4x2(to, columns, p, table, 2 * c, pairs)
    elif rows == 2 and left >= 8:
        pv_2x8(to, columns, p, table, 2 * c, pairs)
        return 128
    elif rows == 2:
        pv_2x2(to, columns, p, table, 2 * c, pairs)
    elif left >= 8:
        pv_1x8(to, columns, p, table, 2 * c, pairs)
        return 128
    else:
        pv_1x2(to, columns, p, table, 2 * c, pairs)
    return 32


def bf16_pv(acc, columns, s, lds, R, rows, count, pairs, weights, distance):  # type: ignore[no-untyped-def]
    """acc [R, columns] += p v; `count` is a multiple of 32. As `amx_pv`; V is cached, since K was read."""
    for r in range(R):
        round_row(s + 4 * r * lds, count)
    r = 0
    while r < R:
        n = min(8, block_rows(R - r))
        c = 0
        while c < columns:
            c += add_strip(acc + 4 * r * columns, columns, s + 4 * r * lds, rows, c, count // 2, n)
        r += n
