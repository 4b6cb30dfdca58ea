"""Micro-kernels for memory and for decode: the inner loops, in vector registers.

dots, adds   K Q^T and P V straight from K and V rows, for few query rows, at the speed of memory
widen, store rows of any storage type to float32 and back
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import F16, F32, I8, I16, I32, I64, Emit, Value, W, microkernel

# Scalars in memory, by address


def _scalar(element: Any, kind: Any) -> tuple[Any, Any]:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.load(builder.inttoptr(args[0], element.as_pointer()))

        return kind(types.int64), codegen

    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            builder.store(args[1], builder.inttoptr(args[0], element.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.int64, kind), codegen

    return load, store


get_f32, put_f32 = _scalar(F32, types.float32)
get_i64, put_i64 = _scalar(I64, types.int64)
get_i32, put_i32 = _scalar(I32, types.int32)
get_u8, _ = _scalar(I8, types.uint8)


@intrinsic
def next_item(typingctx: Any, address: Any) -> Any:
    """Takes the next number from a counter that threads share."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "seq_cst")

    return types.int64(types.int64), codegen


@microkernel("iii>f")
def get_one(e: Emit, address: Value, code: Value, index: Value) -> Value:
    """One element of a row of floats: storage code 0 (f32), 1 (f16) or 2 (bf16)."""
    b = e.builder
    result = e.var(ir.Constant(F32, 0.0))
    with b.if_else(b.icmp_signed("==", code, e.whole(0))) as (wide, narrow):
        with wide:
            result.set(e.load_scalar(address, index, F32))
        with narrow, b.if_else(b.icmp_signed("==", code, e.whole(1))) as (half, brain):
            with half:
                result.set(b.fpext(e.load_scalar(address, index, F16), F32))
            with brain:
                bits = b.shl(b.zext(e.load_scalar(address, index, I16), I32), ir.Constant(I32, 16))
                result.set(b.bitcast(bits, F32))
    return result.get()


@microkernel("iiif")
def put_one(e: Emit, address: Value, code: Value, index: Value, value: Value) -> None:
    """The other way round, rounding to nearest even."""
    b = e.builder
    with b.if_else(b.icmp_signed("==", code, e.whole(0))) as (wide, narrow):
        with wide:
            b.store(value, e.pointer(address, index, F32, F32))
        with narrow, b.if_else(b.icmp_signed("==", code, e.whole(1))) as (half, brain):
            with half:
                b.store(b.fptrunc(value, F16), e.pointer(address, index, F16, F16))
            with brain:
                bits = e.bf16_bits(value, lambda n: ir.Constant(I32, n))
                b.store(b.trunc(bits, I16), e.pointer(address, index, I16, I16))


@microkernel("ii>f")
def get_fp8(e: Emit, address: Value, index: Value) -> Value:
    return e.fp8(e.load_scalar(address, index, I8), lambda n: ir.Constant(I32, n), I16, F16, F32)


# Rows to float32 and back


def _widen(kind: str) -> Any:
    @microkernel("iii>f")
    def widen(e: Emit, to: Value, source: Value, count: Value) -> Value:
        """`count` elements, a multiple of W. Returns NaN if one is not finite, else 0."""
        check = e.var(e.zeros)
        with e.loop(count, W) as i:
            x = e.load(source, i, kind)
            e.store(x, to, i)
            check.set(e.fma(x, e.zeros, check.get()))
        return e.reduce(check.get(), e.builder.fadd)

    return widen


widen_f32, widen_f16, widen_bf16, widen_int8, widen_int4, widen_int4_high, widen_fp8 = map(
    _widen, ("f32", "f16", "bf16", "int8", "int4", "int4 high", "fp8_e4m3")
)


def _store(kind: str) -> Any:
    @microkernel("iiif")
    def store(e: Emit, to: Value, source: Value, count: Value, factor: Value) -> None:
        """`count` floats times `factor`, rounded to nearest even."""
        b = e.builder
        factor = e.splat(factor)
        with e.loop(count, W) as i:
            x = b.fmul(e.load(source, i), factor)
            if kind == "f32":
                e.store(x, to, i)
            elif kind == "f16":
                half = b.fptrunc(x, e.vector(F16))
                b.store(half, e.pointer(to, i, F16, half.type)).align = 2
            else:
                short = b.trunc(e.bf16_bits(x, e.i32s), e.vector(I16))
                b.store(short, e.pointer(to, i, I16, short.type)).align = 2

    return store


store_f32, store_f16, store_bf16 = map(_store, ("f32", "f16", "bf16"))


@microkernel("ii")
def clear(e: Emit, to: Value, count: Value) -> None:
    """`count` zeros, a multiple of W."""
    with e.loop(count, W) as i:
        e.store(e.zeros, to, i)


@microkernel("iif")
def row_scale(e: Emit, row: Value, count: Value, factor: Value) -> None:
    factor = e.splat(factor)
    with e.loop(count, W) as i:
        e.store(e.builder.fmul(e.load(row, i), factor), row, i)


@microkernel("iiii")
def transpose(e: Emit, to: Value, to_width: Value, source: Value, width: Value) -> None:
    """to[j, i] = source[i, j] of W rows and columns; rows are `to_width` and `width` floats apart."""
    b = e.builder
    rows = [e.load(source, b.mul(width, e.whole(i))) for i in range(W)]
    for j, column in enumerate(e.transpose(rows)):
        e.store(column, to, b.mul(to_width, e.whole(j)))


@microkernel("iii")
def fetch(e: Emit, rows: Value, count: Value, size: Value) -> None:
    """Asks for `size` bytes of each listed row, to be there when they are read."""
    b = e.builder
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    reading, keep, data = ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)
    with e.loop(count) as j:
        row = e.load_scalar(rows, j, I64)
        with e.loop(size, 64) as i:
            b.call(prefetch, [b.inttoptr(b.add(row, i), pointer), reading, keep, data])


# Straight from K and V rows. `rows` is a table of their addresses, so that pages are read in place.

QUANTISED = ("int8", "int4", "fp8_e4m3")
PARTS = {"int4": ("int4", "int4 high")}  # what a load of W bytes holds


def _scaled(e: Emit, x: Value, scales: Value, key: Value, groups: Value, element: Value, group: Value) -> Value:
    at = e.builder.add(e.builder.mul(key, groups), e.builder.sdiv(element, group))
    return e.builder.fmul(x, e.splat(e.load_scalar(scales, at, F32)))


def make_dots(kind: str, queries: int, keys: int) -> Any:
    """s[i, j] = q[i] . k[j] of `queries` rows and `count` keys (a multiple of `keys`), K loaded once."""
    parts = PARTS.get(kind, (kind,))

    @microkernel("iiiiiiiii")
    def dots(
        e: Emit, q: Value, ldq: Value, rows: Value, count: Value, width: Value, s: Value, lds: Value, scales: Value,
        group: Value,
    ) -> None:  # fmt: skip
        b = e.builder
        groups = b.sdiv(b.add(width, b.sub(group, e.whole(1))), group)
        span = b.sdiv(width, e.whole(len(parts)))  # elements of a row that a part holds
        with e.loop(count, keys) as key:
            sums = [[e.var(e.zeros) for _ in range(keys)] for _ in range(queries)]
            sources = [e.load_scalar(rows, b.add(key, e.whole(j)), I64) for j in range(keys)]
            with e.loop(span, W) as d:
                for part, name in enumerate(parts):
                    element = b.add(d, b.mul(span, e.whole(part)))
                    ks = [e.load(source, d, name) for source in sources]
                    if kind in QUANTISED:
                        numbers = [b.add(key, e.whole(j)) for j in range(keys)]
                        ks = [
                            _scaled(e, x, scales, n, groups, element, group) for n, x in zip(numbers, ks, strict=True)
                        ]
                    for i in range(queries):
                        x = e.load(q, b.add(b.mul(ldq, e.whole(i)), element))
                        for j in range(keys):
                            sums[i][j].set(e.fma(x, ks[j], sums[i][j].get()))
            totals = [x.get() for row in sums for x in row]
            step = min(W, len(totals))
            folded = [e.sums(totals[n : n + step]) for n in range(0, len(totals), step)]  # all at once: fewer shuffles
            run = min(step, keys)  # both are powers of two
            for first in range(0, len(totals), run):
                part, lane = divmod(first, step)
                i, j = divmod(first, keys)
                scores = e.shuffle(folded[part], folded[part], range(lane, lane + run))
                e.store(scores, s, b.add(b.mul(lds, e.whole(i)), b.add(key, e.whole(j))))

    return dots


def make_adds(kind: str, queries: int, vectors: int) -> Any:
    """acc[i] += p[i, j] * v[j] over `count` keys, for `vectors` vectors of V's columns from element `start` on."""
    parts = PARTS.get(kind, (kind,))
    vectors //= len(parts)

    @microkernel("iiiiiiiiii")
    def adds(
        e: Emit, acc: Value, lda: Value, rows: Value, count: Value, width: Value, p: Value, ldp: Value, scales: Value,
        group: Value, start: Value,
    ) -> None:  # fmt: skip
        b = e.builder
        groups = b.sdiv(b.add(width, b.sub(group, e.whole(1))), group)
        span = b.sdiv(width, e.whole(len(parts)))
        places = [(part, n) for part in range(len(parts)) for n in range(vectors)]
        elements = {(m, n): b.add(b.add(start, e.whole(n * W)), b.mul(span, e.whole(m))) for m, n in places}
        cells = [(i, place) for i in range(queries) for place in places]
        at = {(i, place): b.add(b.mul(lda, e.whole(i)), elements[place]) for i, place in cells}
        sums = {cell: e.var(e.zeros) for cell in cells}
        with e.loop(count) as key:
            source = e.load_scalar(rows, key, I64)
            weights = [e.splat(e.load_scalar(p, b.add(b.mul(ldp, e.whole(i)), key), F32)) for i in range(queries)]
            for part, n in places:
                x = e.load(source, b.add(start, e.whole(n * W)), parts[part])
                if kind in QUANTISED:
                    x = _scaled(e, x, scales, key, groups, elements[part, n], group)
                for i in range(queries):
                    sums[i, (part, n)].set(e.fma(weights[i], x, sums[i, (part, n)].get()))
        for cell in cells:  # what was there is added last, as in the gemms
            e.store(b.fadd(e.load(acc, at[cell]), sums[cell].get()), acc, at[cell])

    return adds
