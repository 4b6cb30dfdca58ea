"""GEMV for decode of int8 and int4 caches by integer dot products (AVX-512 VNNI), exact sums.

Queries and weights become 24-bit fixed point, three 8-bit limbs and a factor for each row (`fixed_point.py`). K and V
stay bytes. One instruction multiplies 64 elements, fp32 16, and no element is converted.

    qk      16 keys in the lanes, 4 elements of each: K is transposed, so that there are no horizontal sums and scales
            are a vector. One side is unsigned: K is used as K + 128 (int4: + 8), and sums start with the correction.
    pv      16 columns in the lanes, 4 keys of each: bytes of four rows of V are interleaved. Weights are unsigned.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ....core.private.numba import cgutils
from ....core.storage import StorageFormat
from ..codegen.numba_ops import jit
from ..codegen.prefetch import prefetch_line
from ..codegen.vector import F32, I8, I16, I32, I64, Emit, Value, W, microkernel
from ..isa import cpu_features
from .fixed_point import LIMBS, LINE, PARTS, fits, join_limbs, weight_factor, weights_at
from .gemv_fp32 import ROWS, by_rows

KEYS = 16  # of a block of scores


def serves(stored: StorageFormat, width: int) -> bool:
    """Whether integer dots multiply rows of this storage format and width."""
    return has_vnni() and fits(stored, width)


def has_vnni() -> bool:
    return W == 16 and {"avx512vnni", "avx512bw"} <= set(cpu_features())


def _product(e: Emit, total: Value, unsigned: Value, signed: Value) -> Value:
    """total + the dot product of four bytes in each lane, `unsigned` and `signed`."""
    kind = ir.FunctionType(total.type, [total.type] * 3)
    function = cgutils.get_or_insert_function(e.builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
    return e.builder.call(function, [total, unsigned, signed])


def _splat_word(e: Emit, address: Value, offset: Value) -> Value:
    return e.splat_i32(e.load_scalar(address, offset, I32))


def make_qk(kind: str, queries: int) -> Any:
    """s[i, j] = q[i] . k[j], scaled, of `queries` rows packed by `quantise_queries`; `count` is a multiple of 16."""
    parts = PARTS[kind]

    @microkernel("iiiiiiiiiii")
    def qk(
        e: Emit, q: Value, ldq: Value, rows: Value, count: Value, width: Value, s: Value, lds: Value, scales: Value,
        group_stride: Value, group: Value, distance: Value,
    ) -> None:  # fmt: skip
        b = e.builder
        size = b.sdiv(width, e.i64(parts))  # bytes of a row
        words, spans = b.sdiv(width, e.i64(4)), b.sdiv(width, e.i64(LINE))
        bits = b.cttz(group, ir.Constant(ir.IntType(1), 1))
        starts = [b.mul(ldq, e.i64(i)) for i in range(queries)]
        limbs_at = [[b.add(start, b.mul(words, e.i64(n))) for n in range(LIMBS)] for start in starts]
        sums_at = [
            [b.add(start, b.add(b.mul(words, e.i64(LIMBS)), b.mul(spans, e.i64(n)))) for n in range(LIMBS)]
            for start in starts
        ]
        factors_at = [b.add(start, b.mul(b.add(words, spans), e.i64(LIMBS))) for start in starts]
        with e.loop(count, KEYS) as key:
            scores = [e.var(e.zeros) for _ in range(queries)]
            with e.loop(size, LINE) as byte:
                lines = []
                for j in range(KEYS):
                    number = b.add(key, e.i64(j))
                    prefetch_line(e, b.add(e.load_scalar(rows, b.add(number, distance), I64), byte), level=2)
                    lines.append(e.load_i32(b.add(e.load_scalar(rows, number, I64), byte)))
                transposed = e.transpose(lines)  # [16 words, 16 keys]
                flip = e.i32s(-0x7F7F7F80 if kind == "int8" else -0x77777778)  # the highest bit of each element
                transposed = [b.xor(x, flip) for x in transposed]
                for part in range(parts):
                    element = b.add(byte, b.mul(size, e.i64(part)))
                    word, span = b.lshr(element, e.i64(2)), b.lshr(element, e.i64(6))
                    sums = [[_splat_word(e, q, b.add(at, span)) for at in row] for row in sums_at]
                    for n, x in enumerate(transposed):
                        if kind == "int4":
                            x = b.and_(b.lshr(x, e.i32s(4)) if part else x, e.i32s(0x0F0F0F0F))
                        word_at = b.add(word, e.i64(n))
                        for row, at in zip(sums, limbs_at, strict=True):
                            for m in range(LIMBS):
                                row[m] = _product(e, row[m], x, _splat_word(e, q, b.add(at[m], word_at)))
                    factor = e.load(scales, b.add(b.mul(b.lshr(element, bits), group_stride), key))
                    for score, row in zip(scores, sums, strict=True):
                        score.set(e.fma(join_limbs(e, row), factor, score.get()))
            for i, score in enumerate(scores):
                factor = e.splat(e.load_scalar(q, factors_at[i], F32))
                e.store(b.fmul(score.get(), factor), s, b.add(b.mul(lds, e.i64(i)), key))

    return qk


def make_pv(kind: str, queries: int) -> Any:
    """acc[i] += p[i, j] * v[j] over `count` keys, for a line of V's bytes from `start` on.

    Weights are packed by `pack_weights`, rows `ldp` words apart, those of the next group `group_stride` words later.
    """
    parts = PARTS[kind]

    @microkernel("iiiiiiiiiii")
    def pv(
        e: Emit, acc: Value, lda: Value, rows: Value, count: Value, width: Value, p: Value, ldp: Value,
        group_stride: Value, group: Value, start: Value, distance: Value,
    ) -> None:  # fmt: skip
        b = e.builder
        bits = b.cttz(group, ir.Constant(ir.IntType(1), 1))
        room = b.lshr(ldp, e.i64(2))  # words of a limb
        i16, i32 = e.vector(I16, 2 * W), e.vector(I32)
        for part in range(parts):
            element = b.add(start, b.mul(b.sdiv(width, e.i64(parts)), e.i64(part)))
            starts = weights_at(e, queries, element, bits, ldp, group_stride)
            halves: list[list[list[Value]]] = []  # [half, query, 2]: 16 sums each
            for half in range(2):
                sums = [[[e.var(e.i32s(0)) for _ in range(LIMBS)] for _ in range(2)] for _ in range(queries)]
                with e.loop(count, 4) as key:
                    lines = []
                    for j in range(4):
                        number = b.add(key, e.i64(j))
                        if not half and not part:
                            prefetch_line(e, b.add(e.load_scalar(rows, b.add(number, distance), I64), start), level=2)
                        lines.append(e._load(b.add(e.load_scalar(rows, number, I64), start), 0, I8, 4 * W))
                    pairs = [b.bitcast(_interleave(e, x, y, 16, half), i16) for x, y in (lines[:2], lines[2:])]
                    fours = [b.bitcast(_interleave(e, pairs[0], pairs[1], 8, n), i32) for n in range(2)]
                    if kind == "int4":  # in the upper four bits: times 16
                        fours = [b.and_(x if part else b.shl(x, e.i32s(4)), e.i32s(-0x0F0F0F10)) for x in fours]
                    word = b.lshr(key, e.i64(2))
                    for i in range(queries):
                        for m in range(LIMBS):
                            at = b.add(b.add(starts[i], b.mul(room, e.i64(m))), word)
                            weight = _splat_word(e, p, at)
                            for n, x in enumerate(fours):
                                sums[i][n][m].set(_product(e, sums[i][n][m].get(), weight, x))
                halves.append([[join_limbs(e, [x.get() for x in two]) for two in row] for row in sums])
            for i in range(queries):
                factor = weight_factor(e, kind, p, starts[i], room)
                four = halves[0][i] + halves[1][i]  # in quarter L of the n-th: columns 16 L + 4 n and three more
                for n, x in enumerate(_transpose_quarters(e, four)):
                    at = b.add(b.mul(lda, e.i64(i)), b.add(element, e.i64(W * n)))
                    e.store(e.fma(x, factor, e.load(acc, at)), acc, at)

    return pv


def _interleave(e: Emit, x: Value, y: Value, quarter: int, half: int) -> Value:
    """Interleaves x and y: the lower or upper half of each quarter of `quarter` elements."""
    lanes = []
    for first in range(0, 4 * quarter, quarter):
        for i in range(quarter // 2):
            at = first + half * quarter // 2 + i
            lanes += [at, at + 4 * quarter]
    return e.shuffle(x, y, lanes)


def _transpose_quarters(e: Emit, four: list[Value]) -> list[Value]:
    """Transposes four vectors as a 4 x 4 matrix of quarters."""
    quarter = W // 4
    pairs = []
    for x, y in (four[:2], four[2:]):
        for n in range(2):
            first = range(2 * n * quarter, (2 * n + 2) * quarter)
            lanes = [lane + side for i in (0, 1) for side in (0, W) for lane in first[i * quarter : (i + 1) * quarter]]
            pairs.append(e.shuffle(x, y, lanes))  # [x_2n, y_2n, x_2n+1, y_2n+1]
    low0, low1, high0, high1 = pairs
    rows = []
    for a, c in ((low0, high0), (low1, high1)):
        for n in range(2):
            half = range(n * W // 2, (n + 1) * W // 2)
            lanes = [*half, *(W + lane for lane in half)]
            rows.append(e.shuffle(a, c, lanes))
    return rows


def vnni_qk_function(kind: str) -> Any:
    """As `gemv_fp32.qk_function`: `q` is packed by `quantise_queries`, `count` a multiple of 16."""
    return by_rows(f"vnni_qk_{kind}", *(make_qk(kind, n) for n in ROWS))


def vnni_pv_function(kind: str) -> Any:
    """As `gemv_fp32.pv_function`, with weights packed by `pack_weights`; `count` is a multiple of 4."""
    strip, parts = jit(by_rows(f"vnni_{kind}", *(make_pv(kind, n) for n in ROWS))), PARTS[kind]

    def pv(acc, lda, R, rows, count, width, p, ldp, group_stride, group, distance):  # type: ignore[no-untyped-def]
        for start in range(0, width // parts, LINE):
            strip(acc, lda, R, rows, count, width, p, ldp, group_stride, group, start, distance)

    return pv
