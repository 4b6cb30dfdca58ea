"""GEMV for decode: Q K^T and P V for few query rows; K and V are read in place, at memory bandwidth.

`rows` is a table of row addresses, so pages are read in place. It extends past the rows of a product: while a row is
multiplied, the one `distance` keys later is prefetched, line by line.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from ....core.storage import FORMATS
from ..codegen.bf16_dot import dot_pairs
from ..codegen.numba_ops import ZERO, jit
from ..codegen.prefetch import prefetch_line
from ..codegen.vector import F32, I64, REGISTERS, Emit, Value, W, microkernel
from ..params import CACHE_LINE

BF16_DOT = "bf16_dot"
I1 = ir.IntType(1)
# Keys in flight for 4, 3, 2 or 1 rows: as many accumulators as leave registers for K and q.
KEYS = {4: 4, 3: 8, 2: 8, 1: 8} if REGISTERS == 32 else {4: 2, 3: 2, 2: 4, 1: 8}


def make_qk(kind: str, queries: int, keys: int) -> Any:
    """s[i, j] = q[i] . k[j] of `queries` rows and `count` keys (a multiple of `keys`), K loaded once.

    `scales` has a float for each key; those of the next group of elements are `group_stride` floats later. For BF16_DOT
    a float of q and k is a pair of bf16 numbers, multiplied by AVX-512 BF16.
    """
    bf16_dot = kind == BF16_DOT
    kind = "f32" if bf16_dot else kind
    parts, size = FORMATS[kind].packing, FORMATS[kind].dtype.itemsize

    @microkernel("iiiiiiiiiii")
    def qk(
        e: Emit, q: Value, ldq: Value, rows: Value, count: Value, width: Value, s: Value, lds: Value, scales: Value,
        group_stride: Value, group: Value, distance: Value,
    ) -> None:  # fmt: skip
        b, multiply = e.builder, partial(dot_pairs, e) if bf16_dot else e.fma
        span = b.sdiv(width, e.i64(parts))  # elements of a row that a part holds
        bits = b.cttz(group, ir.Constant(I1, 1))  # groups are powers of two
        with e.loop(count, keys) as key:
            sums = [[e.var(e.zeros) for _ in range(keys)] for _ in range(queries)]
            numbers = [b.add(key, e.i64(j)) for j in range(keys)]
            sources = [e.load_scalar(rows, n, I64) for n in numbers]
            later = [e.load_scalar(rows, b.add(n, distance), I64) for n in numbers]
            with e.loop(span, W) as d:
                for row in later:
                    prefetch_line(e, b.add(row, b.mul(d, e.i64(size))), level=2)
                for part in range(parts):
                    element = b.add(d, b.mul(span, e.i64(part)))
                    ks = [e.load(source, d, kind, part) for source in sources]
                    if FORMATS[kind].is_quantised:
                        first = b.mul(b.lshr(element, bits), group_stride)
                        factors = [e.splat(e.load_scalar(scales, b.add(first, n), F32)) for n in numbers]
                        ks = [b.fmul(x, factor) for x, factor in zip(ks, factors, strict=True)]
                    for i in range(queries):
                        x = e.load(q, b.add(b.mul(ldq, e.i64(i)), element))
                        for j in range(keys):
                            sums[i][j].set(multiply(x, ks[j], sums[i][j].get()))
            row_sums = [x.get() for row in sums for x in row]
            total = len(row_sums)
            step = W if total >= W else total & -total  # a power of two: 2 for three rows of two keys
            folded = [e.sums(row_sums[n : n + step]) for n in range(0, len(row_sums), step)]  # together: fewer shuffles
            run = min(step, keys)
            for first in range(0, len(row_sums), run):
                part, lane = divmod(first, step)
                i, j = divmod(first, keys)
                scores = e.shuffle(folded[part], folded[part], range(lane, lane + run))
                e.store(scores, s, b.add(b.mul(lds, e.i64(i)), b.add(key, e.i64(j))))

    return qk


def make_pv(kind: str, queries: int, vectors: int) -> Any:
    """acc[i] += p[i, j] * v[j] over `count` keys, for `vectors` vectors of V's columns from element `start` on.

    Weights of the next group of elements, with its scales folded in, are `group_stride` floats later.
    """
    parts, size = FORMATS[kind].packing, FORMATS[kind].dtype.itemsize
    vectors //= parts

    @microkernel("iiiiiiiiiii")
    def pv(
        e: Emit, acc: Value, lda: Value, rows: Value, count: Value, width: Value, p: Value, ldp: Value,
        group_stride: Value, group: Value, start: Value, distance: Value,
    ) -> None:  # fmt: skip
        b = e.builder
        span = b.sdiv(width, e.i64(parts))
        strips = [(part, n) for part in range(parts) for n in range(vectors)]
        elements = {(m, n): b.add(b.add(start, e.i64(n * W)), b.mul(span, e.i64(m))) for m, n in strips}
        cells = [(i, strip) for i in range(queries) for strip in strips]
        at = {(i, strip): b.add(b.mul(lda, e.i64(i)), elements[strip]) for i, strip in cells}
        groups = dict.fromkeys(strips, e.i64(0))
        if FORMATS[kind].is_quantised:
            bits = b.cttz(group, ir.Constant(I1, 1))
            groups = {strip: b.mul(b.lshr(elements[strip], bits), group_stride) for strip in strips}
        weights_at = {(i, strip): b.add(b.mul(ldp, e.i64(i)), groups[strip]) for i, strip in cells}
        sums = {cell: e.var(e.zeros) for cell in cells}
        with e.loop(count) as key:
            source = e.load_scalar(rows, key, I64)
            later = b.add(e.load_scalar(rows, b.add(key, distance), I64), b.mul(start, e.i64(size)))
            for byte in range(0, vectors * W * size, CACHE_LINE):
                prefetch_line(e, b.add(later, e.i64(byte)), level=2)
            for strip in strips:
                part, n = strip
                x = e.load(source, b.add(start, e.i64(n * W)), kind, part)
                for i in range(queries):
                    weight = e.splat(e.load_scalar(p, b.add(weights_at[i, strip], key), F32))
                    sums[i, strip].set(e.fma(weight, x, sums[i, strip].get()))
        for cell in cells:  # acc is added last, as in the GEMMs
            e.store(b.fadd(e.load(acc, at[cell]), sums[cell].get()), acc, at[cell])

    return pv


def qk_function(kind: str) -> Any:
    """`fn(q, ldq, R, rows, count, width, s, lds, scales, group_stride, group, distance)`: s [R, count] = q k^T.

    `count` is a multiple of 8.
    """
    return by_rows(f"qk_{kind}", *(make_qk(kind, n, KEYS[n]) for n in ROWS))


ROWS = (4, 3, 2, 1)


def by_rows(name: str, four: Any, three: Any, two: Any, one: Any) -> Any:
    """`qk`, or a strip of `pv`, of R rows, compiled as `name`: four rows at a time, then the remainder.

    x and y have rows of ldx and ldy floats; a, b and c are the other arguments of `make_qk` or `make_pv`.
    """

    def product(x, ldx, R, rows, count, width, y, ldy, a, b, c, distance):  # type: ignore[no-untyped-def]
        i = 0
        while i + 4 <= R:
            four(x + 4 * i * ldx, ldx, rows, count, width, y + 4 * i * ldy, ldy, a, b, c, distance)
            i += 4
            distance = ZERO  # prefetched already
        if i + 3 == R:
            three(x + 4 * i * ldx, ldx, rows, count, width, y + 4 * i * ldy, ldy, a, b, c, distance)
        elif i + 2 == R:
            two(x + 4 * i * ldx, ldx, rows, count, width, y + 4 * i * ldy, ldy, a, b, c, distance)
        elif i < R:
            one(x + 4 * i * ldx, ldx, rows, count, width, y + 4 * i * ldy, ldy, a, b, c, distance)

    product.__qualname__ = name  # cached code is found by name, which must be unique
    return product


def pv_function(kind: str) -> Any:
    """`fn(acc, lda, R, rows, count, width, p, ldp, group_stride, group, distance)`: acc [R, width] += p v."""
    parts = FORMATS[kind].packing  # a step takes a vector from each half of a packed row
    wide = [make_pv(kind, n, 4) for n in ROWS]
    thin = [make_pv(kind, n, parts) for n in ROWS]

    wide_strip, thin_strip = jit(by_rows(f"wide_{kind}", *wide)), jit(by_rows(f"thin_{kind}", *thin))
    step = 4 // parts * W

    def pv(acc, lda, R, rows, count, width, p, ldp, group_stride, group, distance):  # type: ignore[no-untyped-def]
        span = width // parts
        start = 0
        while start + step <= span:
            wide_strip(acc, lda, R, rows, count, width, p, ldp, group_stride, group, start, distance)
            start += step
        while start < span:
            thin_strip(acc, lda, R, rows, count, width, p, ldp, group_stride, group, start, distance)
            start += W

    return pv
