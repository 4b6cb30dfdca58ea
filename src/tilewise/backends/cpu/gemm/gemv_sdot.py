"""GEMV for decode of int8 and int4 caches by AArch64's `sdot`, exact sums: as `gemv_vnni.py`, for vectors of 16 bytes.

`sdot` is signed on both sides, so K is used as it is, and weights have signed limbs too (`fixed_point.py`).

    qk      16 elements of one key in a vector, not transposed; the sums of four keys are reduced to one vector at the
            end of a line.
    pv      4 columns in the lanes, 4 keys of each: bytes of four rows of V are interleaved.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ....core.private.numba import cgutils
from ....core.storage import StorageFormat
from ..codegen.numba_ops import ZERO, jit
from ..codegen.prefetch import prefetch_line
from ..codegen.vector import F32, I8, I32, I64, Emit, Value, W, microkernel
from ..isa import cpu_features
from .fixed_point import LIMBS, LINE, PARTS, fits, join_limbs, weight_factor, weights_at
from .gemv_fp32 import by_rows

KEYS = 4
BYTES = 4 * W  # of a vector


def serves(stored: StorageFormat, width: int) -> bool:
    """Whether integer dots multiply rows of this storage format and width."""
    return has_sdot() and fits(stored, width)


def has_sdot() -> bool:
    return W == 4 and "dotprod" in cpu_features()


def _product(e: Emit, total: Value, x: Value, y: Value) -> Value:
    """total + the dot product of four bytes in each lane."""
    kind = ir.FunctionType(total.type, [total.type, x.type, x.type])
    function = cgutils.get_or_insert_function(e.builder.module, kind, "llvm.aarch64.neon.sdot.v4i32.v16i8")
    return e.builder.call(function, [total, x, y])


def _bytes(e: Emit, address: Value, offset: Any = 0) -> Value:
    return e._load(address, offset, I8, BYTES)


def _elements(e: Emit, x: Value, kind: str, part: int) -> Value:
    """The elements of `part` in each byte, signed; those of int4 are multiplied by 16."""
    if kind == "int8":
        return x
    b = e.builder
    whole = lambda n: ir.Constant(x.type, [n] * BYTES)  # noqa: E731
    return b.and_(x, whole(-16)) if part else b.shl(x, whole(4))


def _fold(e: Emit, four: list[Value]) -> Value:
    """The horizontal sums of four vectors as one vector: three `addp`."""
    b = e.builder

    def pairs(x: Value, y: Value) -> Value:
        return b.add(e.shuffle(x, y, [0, 2, 4, 6]), e.shuffle(x, y, [1, 3, 5, 7]))

    return pairs(pairs(four[0], four[1]), pairs(four[2], four[3]))


def _line(e: Emit, key: list[Value], limb: Value) -> Value:
    """The dot product of a line of a key and a limb, as four partial sums."""
    total = e.i32s(0)
    for n, x in enumerate(key):
        total = _product(e, total, x, _bytes(e, limb, BYTES * n))
    return total


def make_qk(kind: str) -> Any:
    """s[i, j] = q[i] . k[j], scaled, of R rows packed by `quantise_queries`; `count` is a multiple of 4.

    A line of four keys is 16 vectors, which stay in registers while rows are processed one by one: if the loop over
    rows is unrolled, LLVM schedules the products so that most sums are spilled.
    """
    parts = PARTS[kind]

    @microkernel("iiiiiiiiiiii")
    def qk(
        e: Emit, q: Value, ldq: Value, R: Value, rows: Value, count: Value, width: Value, s: Value, lds: Value,
        scales: Value, group_stride: Value, group: Value, distance: Value,
    ) -> None:  # fmt: skip
        b = e.builder
        size = b.sdiv(width, e.i64(parts))  # bytes of a row
        bits = b.cttz(group, ir.Constant(ir.IntType(1), 1))
        with e.loop(count, KEYS) as key:
            sources = [e.load_scalar(rows, b.add(key, e.i64(j)), I64) for j in range(KEYS)]
            later = [e.load_scalar(rows, b.add(b.add(key, e.i64(j)), distance), I64) for j in range(KEYS)]
            with e.loop(R) as i:
                e.store(e.zeros, s, b.add(b.mul(lds, i), key))
            with e.loop(size, LINE) as byte:
                for row in later:
                    prefetch_line(e, b.add(row, byte), level=2)
                for part in range(parts):
                    element = b.add(byte, b.mul(size, e.i64(part)))
                    keys = [
                        [_elements(e, _bytes(e, b.add(x, byte), step), kind, part) for step in range(0, LINE, BYTES)]
                        for x in sources
                    ]
                    factor = e.load(scales, b.add(b.mul(b.lshr(element, bits), group_stride), key))
                    if kind == "int4":
                        factor = b.fmul(factor, e.f32s(1 / 16))
                    with e.loop(R) as i:
                        at = b.add(b.add(q, b.mul(ldq, b.mul(i, e.i64(4)))), element)
                        limbs = [
                            _fold(e, [_line(e, k, b.add(at, b.mul(width, e.i64(m)))) for k in keys])
                            for m in range(LIMBS)
                        ]
                        cell = b.add(b.mul(lds, i), key)
                        e.store(e.fma(join_limbs(e, limbs), factor, e.load(s, cell)), s, cell)
            with e.loop(R) as i:
                scale = e.splat(e.load_scalar(q, b.sub(b.mul(ldq, b.add(i, e.i64(1))), e.i64(1)), F32))
                cell = b.add(b.mul(lds, i), key)
                e.store(b.fmul(e.load(s, cell), scale), s, cell)

    return qk


def make_pv(kind: str, queries: int) -> Any:
    """acc[i] += p[i, j] * v[j] over `count` keys (a multiple of 4), for 16 bytes of V's rows from `start` on.

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
        for part in range(parts):
            element = b.add(start, b.mul(b.sdiv(width, e.i64(parts)), e.i64(part)))
            starts = weights_at(e, queries, element, bits, ldp, group_stride)
            sums = [[[e.var(e.i32s(0)) for _ in range(LIMBS)] for _ in range(4)] for _ in range(queries)]
            with e.loop(count, 4) as key:
                lines = []
                for j in range(4):
                    number = b.add(key, e.i64(j))
                    if not part:
                        prefetch_line(e, b.add(e.load_scalar(rows, b.add(number, distance), I64), start), level=2)
                    row = _bytes(e, b.add(e.load_scalar(rows, number, I64), start))
                    lines.append(_elements(e, row, kind, part))
                columns = _columns(e, lines)
                for i in range(queries):
                    for m in range(LIMBS):
                        at = b.add(b.add(starts[i], b.mul(room, e.i64(m))), b.lshr(key, e.i64(2)))
                        weight = b.bitcast(e.splat_i32(e.load_scalar(p, at, I32)), columns[0].type)
                        for four, x in zip(sums[i], columns, strict=True):
                            four[m].set(_product(e, four[m].get(), x, weight))
            for i in range(queries):
                factor = weight_factor(e, kind, p, starts[i], room)
                for n, four in enumerate(sums[i]):
                    at = b.add(b.mul(lda, e.i64(i)), b.add(element, e.i64(W * n)))
                    total = join_limbs(e, [x.get() for x in four])
                    e.store(e.fma(total, factor, e.load(acc, at)), acc, at)

    return pv


def _columns(e: Emit, rows: list[Value]) -> list[Value]:
    """Bytes of four rows as four vectors: 4 columns in the lanes, a byte of each row in a lane."""
    b, half = e.builder, BYTES // 2
    low = [lane for i in range(half) for lane in (i, i + BYTES)]
    pairs = [[e.shuffle(x, y, [lane + n * half for lane in low]) for n in range(2)] for x, y in (rows[:2], rows[2:])]
    i16 = ir.VectorType(ir.IntType(16), half)
    low = [lane for i in range(half // 2) for lane in (i, i + half)]
    columns = []
    for n in range(2):
        x, y = b.bitcast(pairs[0][n], i16), b.bitcast(pairs[1][n], i16)
        columns += [b.bitcast(e.shuffle(x, y, [lane + m * half // 2 for lane in low]), rows[0].type) for m in range(2)]
    return columns


def sdot_qk_function(kind: str) -> Any:
    """As `gemv_fp32.qk_function`: `q` is packed by `quantise_queries`, `count` a multiple of 4."""
    product = make_qk(kind)

    def qk(q, ldq, R, rows, count, width, s, lds, scales, group_stride, group, distance):  # type: ignore[no-untyped-def]
        product(q, ldq, R, rows, count, width, s, lds, scales, group_stride, group, distance)

    return qk


def sdot_pv_function(kind: str) -> Any:
    """As `gemv_fp32.pv_function`, with weights packed by `pack_weights`; `count` is a multiple of 4."""
    two, one, parts = make_pv(kind, 2), make_pv(kind, 1), PARTS[kind]

    @jit
    def four(acc, lda, rows, count, width, p, ldp, group_stride, group, start, distance):  # type: ignore[no-untyped-def]
        """Two and two: the sums of four rows would not fit in registers."""
        two(acc, lda, rows, count, width, p, ldp, group_stride, group, start, distance)
        two(acc + 8 * lda, lda, rows, count, width, p + 8 * ldp, ldp, group_stride, group, start, ZERO)

    @jit
    def three(acc, lda, rows, count, width, p, ldp, group_stride, group, start, distance):  # type: ignore[no-untyped-def]
        two(acc, lda, rows, count, width, p, ldp, group_stride, group, start, distance)
        one(acc + 8 * lda, lda, rows, count, width, p + 8 * ldp, ldp, group_stride, group, start, ZERO)

    strip = jit(by_rows(f"sdot_{kind}", four, three, two, one))

    def pv(acc, lda, R, rows, count, width, p, ldp, group_stride, group, distance):  # type: ignore[no-untyped-def]
        for start in range(0, width // parts, BYTES):
            strip(acc, lda, R, rows, count, width, p, ldp, group_stride, group, start, distance)

    return pv
