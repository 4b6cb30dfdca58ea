"""Decode of int8 and int4 caches by products of whole numbers, four to a lane, exact sums (AVX-512 VNNI).

Queries and weights become whole numbers of 24 bits with one factor for each row, as exact as float32 is next to the
largest of them: three digits of a byte. K and V stay bytes. A product of one digit takes 64 elements of a row, where
one in float32 takes 16, and no element is widened.

    dots    16 keys in the lanes, 4 elements of each: K's rows are turned, so that no sum goes across lanes and a scale
            is a vector. K is taken as K + 128 (8 of int4), since one side of a product has no sign; sums start with
            what that adds.
    adds    16 columns in the lanes, 4 keys of each: bytes of four rows of V are put side by side. Weights have no sign.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ..codegen.prefetch import ask
from ..codegen.vector import F32, I8, I16, I32, I64, Emit, Value, W, microkernel
from ..isa import cpu_features
from .fixed_point import DIGITS, LINE
from .gemv_fp32 import adds_by_rows, dots_by_rows

KEYS = 16  # of dots
PARTS = {"int8": 1, "int4": 2}  # elements of a byte


def serves(kind: str, width: int, group: int) -> bool:
    """Whether rows of `width` elements are whole lines, none of them of two scales."""
    return has_vnni() and kind in PARTS and width % (LINE * PARTS[kind]) == 0 and group >= LINE


def has_vnni() -> bool:
    return W == 16 and {"avx512vnni", "avx512bw"} <= set(cpu_features())


def _product(e: Emit, total: Value, plain: Value, signed: Value) -> Value:
    """total + the sums of four products of bytes, `plain` without a sign, in each lane."""
    kind = ir.FunctionType(total.type, [total.type] * 3)
    function = cgutils.get_or_insert_function(e.builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
    return e.builder.call(function, [total, plain, signed])


def _joined(e: Emit, digits: list[Value]) -> Value:
    """Sums of three digits, the lowest first, as float32."""
    b, f32 = e.builder, e.vector(F32)
    low = b.sitofp(b.add(digits[0], b.shl(digits[1], e.i32s(8))), f32)
    return e.fma(b.sitofp(digits[2], f32), e.f32s(65536.0), low)


def _word(e: Emit, address: Value, offset: Value) -> Value:
    return e.splat_i32(e.load_scalar(address, offset, I32))


def make_dots(kind: str, queries: int) -> Any:
    """s[i, j] = q[i] . k[j], scaled, of `queries` rows that `tell_queries` has laid; `count` is a multiple of 16."""
    parts = PARTS[kind]

    @microkernel("iiiiiiiiiii")
    def dots(
        e: Emit, q: Value, ldq: Value, rows: Value, count: Value, width: Value, s: Value, lds: Value, scales: Value,
        line: Value, group: Value, ahead: Value,
    ) -> None:  # fmt: skip
        b = e.builder
        size = b.sdiv(width, e.whole(parts))  # bytes of a row
        words, spans = b.sdiv(width, e.whole(4)), b.sdiv(width, e.whole(LINE))
        bits = b.cttz(group, ir.Constant(ir.IntType(1), 1))
        starts = [b.mul(ldq, e.whole(i)) for i in range(queries)]
        digits_at = [[b.add(start, b.mul(words, e.whole(n))) for n in range(DIGITS)] for start in starts]
        sums_at = [
            [b.add(start, b.add(b.mul(words, e.whole(DIGITS)), b.mul(spans, e.whole(n)))) for n in range(DIGITS)]
            for start in starts
        ]
        factors_at = [b.add(start, b.mul(b.add(words, spans), e.whole(DIGITS))) for start in starts]
        with e.loop(count, KEYS) as key:
            scores = [e.var(e.zeros) for _ in range(queries)]
            with e.loop(size, LINE) as byte:
                lines = []
                for j in range(KEYS):
                    number = b.add(key, e.whole(j))
                    ask(e, b.add(e.load_scalar(rows, b.add(number, ahead), I64), byte), near=False)
                    lines.append(e.load_i32(b.add(e.load_scalar(rows, number, I64), byte)))
                turned = e.transpose(lines)  # [16 words, 16 keys]
                flip = e.i32s(-0x7F7F7F80 if kind == "int8" else -0x77777778)  # the highest bit of each element
                turned = [b.xor(x, flip) for x in turned]
                for part in range(parts):
                    element = b.add(byte, b.mul(size, e.whole(part)))
                    word, span = b.lshr(element, e.whole(2)), b.lshr(element, e.whole(6))
                    sums = [[_word(e, q, b.add(at, span)) for at in row] for row in sums_at]
                    for n, x in enumerate(turned):
                        if kind == "int4":
                            x = b.and_(b.lshr(x, e.i32s(4)) if part else x, e.i32s(0x0F0F0F0F))
                        place = b.add(word, e.whole(n))
                        for row, at in zip(sums, digits_at, strict=True):
                            for m in range(DIGITS):
                                row[m] = _product(e, row[m], x, _word(e, q, b.add(at[m], place)))
                    factor = e.load(scales, b.add(b.mul(b.lshr(element, bits), line), key))
                    for score, row in zip(scores, sums, strict=True):
                        score.set(e.fma(_joined(e, row), factor, score.get()))
            for i, score in enumerate(scores):
                factor = e.splat(e.load_scalar(q, factors_at[i], F32))
                e.store(b.fmul(score.get(), factor), s, b.add(b.mul(lds, e.whole(i)), key))

    return dots


def make_adds(kind: str, queries: int) -> Any:
    """acc[i] += p[i, j] * v[j] over `count` keys, for a line of V's bytes from `start` on.

    Weights are laid by `lay_weights`, a row every `ldp` words, those of the next group `line` words on.
    """
    parts = PARTS[kind]

    @microkernel("iiiiiiiiiii")
    def adds(
        e: Emit, acc: Value, lda: Value, rows: Value, count: Value, width: Value, p: Value, ldp: Value, line: Value,
        group: Value, start: Value, ahead: Value,
    ) -> None:  # fmt: skip
        b = e.builder
        bits = b.cttz(group, ir.Constant(ir.IntType(1), 1))
        room = b.lshr(ldp, e.whole(2))  # words of a digit
        i16, i32 = e.vector(I16, 2 * W), e.vector(I32)
        for part in range(parts):
            element = b.add(start, b.mul(b.sdiv(width, e.whole(parts)), e.whole(part)))
            group_at = b.mul(b.lshr(element, bits), line)
            weights_at = [b.add(group_at, b.mul(ldp, e.whole(i))) for i in range(queries)]
            halves: list[list[list[Value]]] = []  # [half, query, 2]: 16 sums each
            for half in range(2):
                sums = [[[e.var(e.i32s(0)) for _ in range(DIGITS)] for _ in range(2)] for _ in range(queries)]
                with e.loop(count, 4) as key:
                    lines = []
                    for j in range(4):
                        number = b.add(key, e.whole(j))
                        if not half and not part:
                            ask(e, b.add(e.load_scalar(rows, b.add(number, ahead), I64), start), near=False)
                        lines.append(e._load(b.add(e.load_scalar(rows, number, I64), start), 0, I8, 4 * W))
                    pairs = [b.bitcast(_woven(e, x, y, 16, half), i16) for x, y in (lines[:2], lines[2:])]
                    fours = [b.bitcast(_woven(e, pairs[0], pairs[1], 8, n), i32) for n in range(2)]
                    if kind == "int4":  # in the upper half of a byte: 16 times as large
                        fours = [b.and_(x if part else b.shl(x, e.i32s(4)), e.i32s(-0x0F0F0F10)) for x in fours]
                    word = b.lshr(key, e.whole(2))
                    for i in range(queries):
                        for m in range(DIGITS):
                            at = b.add(b.add(weights_at[i], b.mul(room, e.whole(m))), word)
                            weight = _word(e, p, at)
                            for n, x in enumerate(fours):
                                sums[i][n][m].set(_product(e, sums[i][n][m].get(), weight, x))
                halves.append([[_joined(e, [x.get() for x in two]) for two in row] for row in sums])
            for i in range(queries):
                factor = e.load_scalar(p, b.add(weights_at[i], b.mul(room, e.whole(DIGITS))), F32)
                if kind == "int4":
                    factor = b.fmul(factor, ir.Constant(F32, 1 / 16))
                factor = e.splat(factor)
                four = halves[0][i] + halves[1][i]  # in quarter L of the n-th: columns 16 L + 4 n and three more
                for n, x in enumerate(_quarters_turned(e, four)):
                    at = b.add(b.mul(lda, e.whole(i)), b.add(element, e.whole(W * n)))
                    e.store(e.fma(x, factor, e.load(acc, at)), acc, at)

    return adds


def _woven(e: Emit, x: Value, y: Value, quarter: int, half: int) -> Value:
    """Elements of x and y in turns, of the lower or upper half of each quarter of `quarter` elements."""
    lanes = []
    for first in range(0, 4 * quarter, quarter):
        for i in range(quarter // 2):
            at = first + half * quarter // 2 + i
            lanes += [at, at + 4 * quarter]
    return e.shuffle(x, y, lanes)


def _quarters_turned(e: Emit, four: list[Value]) -> list[Value]:
    """Four vectors as a matrix of 4 x 4 quarters; its columns."""
    quarter = W // 4
    pairs = []
    for x, y in (four[:2], four[2:]):
        for n in range(2):
            first = range(2 * n * quarter, (2 * n + 2) * quarter)
            lanes = [lane + side for i in (0, 1) for side in (0, W) for lane in first[i * quarter : (i + 1) * quarter]]
            pairs.append(e.shuffle(x, y, lanes))  # [x_2n, y_2n, x_2n+1, y_2n+1]
    low0, low1, high0, high1 = pairs
    found = []
    for a, c in ((low0, high0), (low1, high1)):
        for n in range(2):
            half = range(n * W // 2, (n + 1) * W // 2)
            lanes = [*half, *(W + lane for lane in half)]
            found.append(e.shuffle(a, c, lanes))
    return found


def dots_function(kind: str) -> Any:
    """As `straight.dots_function`: `q` is what `tell_queries` has laid, `count` a multiple of 16."""
    return dots_by_rows(*(make_dots(kind, n) for n in (4, 2, 1)))


def adds_function(kind: str) -> Any:
    """As `straight.adds_function`, with weights that `lay_weights` has laid; `count` is a multiple of 4."""
    strip, parts = adds_by_rows(f"whole_{kind}", *(make_adds(kind, n) for n in (4, 2, 1))), PARTS[kind]

    def adds(acc, lda, R, rows, count, width, p, ldp, line, group, ahead):  # type: ignore[no-untyped-def]
        for start in range(0, width // parts, LINE):
            strip(acc, lda, R, rows, count, width, p, ldp, line, group, start, ahead)

    return adds
