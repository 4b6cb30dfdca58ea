"""Micro-kernels for memory: scalars by address; rows of any storage type to float32 and back."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import dtypes
from .formats import DECODE, ENCODE
from .vector import F16, F32, I8, I16, I32, I64, Emit, Value, W, microkernel

# Scalars in memory, by address


def _scalar(element: Any, kind: Any) -> tuple[Any, Any]:
    """`load(address)` and `store(address, value)` of one number."""

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


@microkernel("iiii")
def put_series(e: Emit, to: Value, first: Value, step: Value, count: Value) -> None:
    """Stores `count` int64: `first`, `first + step`, ...

    From stores by address the compiler would make scatters: it does not see that they are contiguous.
    """
    b, lanes = e.builder, W // 2
    kind = e.vector(I64, lanes)

    def splat(x: Value) -> Value:
        one = b.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(I32, 0))
        return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(e.vector(I32, lanes), [0] * lanes))

    values = e.var(b.add(splat(first), b.mul(splat(step), ir.Constant(kind, list(range(lanes))))))
    further, whole = splat(b.mul(step, e.i64(lanes))), b.and_(count, e.i64(-lanes))
    with e.loop(whole, lanes) as i:
        b.store(values.get(), e.pointer(to, i, I64, kind)).align = 8
        values.set(b.add(values.get(), further))
    with e.loop(b.sub(count, whole)) as i:
        at = b.add(whole, i)
        b.store(b.add(first, b.mul(at, step)), e.pointer(to, at, I64, I64))


@intrinsic
def fetch_add(typingctx: Any, address: Any) -> Any:
    """Atomic fetch-and-add of 1, by which threads take work items."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "seq_cst")

    return types.int64(types.int64), codegen


def by_dtype(e: Emit, dtype: Value, names: Sequence[str], emit: Callable[[str], None]) -> None:
    """Code for each of the storage formats `names`, of which the one that `dtype` says is run."""
    name, *others = names
    if not others:
        emit(name)
        return
    with e.builder.if_else(e.builder.icmp_signed("==", dtype, e.i64(dtypes.CODES[name]))) as (this, other):
        with this:
            emit(name)
        with other:
            by_dtype(e, dtype, others, emit)


def _get(names: Sequence[str], part: int = 0) -> Any:
    """`fn(address, dtype, index)`: one element of a row as float32; `part`: which one of a stored number."""

    @microkernel("iii>f")
    def get(e: Emit, address: Value, dtype: Value, index: Value) -> Value:
        result = e.var(ir.Constant(F32, 0.0))
        by_dtype(e, dtype, names, lambda name: result.set(e.load_one(address, index, name, part)))
        return result.get()

    return get


FLOATS = [name for name in DECODE if name not in ENCODE]
PAIRS = [name for name, (_, parts) in DECODE.items() if len(parts) == 2]
get_one = _get(FLOATS)  # of a row of floats
get_element = _get([name for name in DECODE if name not in PAIRS])  # formats with one element a stored number
get_first, get_second = _get(PAIRS), _get(PAIRS, 1)  # the two elements of stored number `index`


@microkernel("iiif")
def put_one(e: Emit, address: Value, dtype: Value, index: Value, value: Value) -> None:
    """Stores one float, rounded to nearest even."""
    b = e.builder
    with b.if_else(b.icmp_signed("==", dtype, e.i64(dtypes.F32))) as (wide, narrow):
        with wide:
            b.store(value, e.pointer(address, index, F32, F32))
        with narrow, b.if_else(b.icmp_signed("==", dtype, e.i64(dtypes.F16))) as (half, brain):
            with half:
                b.store(b.fptrunc(value, F16), e.pointer(address, index, F16, F16))
            with brain:
                bits = e.bf16_bits(value, lambda n: ir.Constant(I32, n))
                b.store(b.trunc(bits, I16), e.pointer(address, index, I16, I16))


# Rows to float32 and back


def _to_f32(names: Sequence[str], part: int = 0) -> Any:
    """`fn(to, source, dtype, count)`: `count` stored numbers, a multiple of W, to float32. NaN if one is not finite."""

    @microkernel("iiii>f")
    def convert(e: Emit, to: Value, source: Value, dtype: Value, count: Value) -> Value:
        check = e.var(e.zeros)

        def loop(name: str) -> None:
            with e.loop(count, W) as i:
                x = e.load(source, i, name, part)
                e.store(x, to, i)
                check.set(e.fma(x, e.zeros, check.get()))

        by_dtype(e, dtype, names, loop)
        return e.reduce(check.get(), e.builder.fadd)

    return convert


floats_to_f32, first_to_f32, second_to_f32 = _to_f32(FLOATS), _to_f32(list(DECODE)), _to_f32(PAIRS, 1)


@microkernel("iii>f")
def copy_checked(e: Emit, to: Value, source: Value, count: Value) -> Value:
    """A copy of `count` floats, a multiple of W. Returns NaN if one is not finite, else 0."""
    check = e.var(e.zeros)
    with e.loop(count, W) as i:
        x = e.load(source, i)
        e.store(x, to, i)
        check.set(e.fma(x, e.zeros, check.get()))
    return e.reduce(check.get(), e.builder.fadd)


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


@microkernel("ii>f")
def check_finite(e: Emit, row: Value, count: Value) -> Value:
    """NaN if one of `count` floats, a multiple of W, is not finite, else 0."""
    check = e.var(e.zeros)
    with e.loop(count, W) as i:
        check.set(e.fma(e.load(row, i), e.zeros, check.get()))
    return e.reduce(check.get(), e.builder.fadd)


@microkernel("iif")
def row_scale(e: Emit, row: Value, count: Value, factor: Value) -> None:
    """row *= factor, of `count` floats, a multiple of W."""
    factor = e.splat(factor)
    with e.loop(count, W) as i:
        e.store(e.builder.fmul(e.load(row, i), factor), row, i)


@microkernel("iiii")
def row_times(e: Emit, to: Value, x: Value, y: Value, vectors: Value) -> None:
    """to = x * y, of `vectors` vectors."""
    with e.loop(e.builder.mul(vectors, e.i64(W)), W) as i:
        e.store(e.builder.fmul(e.load(x, i), e.load(y, i)), to, i)


@microkernel("iiii")
def transpose(e: Emit, to: Value, to_width: Value, source: Value, width: Value) -> None:
    """to[j, i] = source[i, j] of W rows and columns; rows are `to_width` and `width` floats apart."""
    b = e.builder
    rows = [e.load(source, b.mul(width, e.i64(i))) for i in range(W)]
    for j, column in enumerate(e.transpose(rows)):
        e.store(column, to, b.mul(to_width, e.i64(j)))


def _row_add(fused: bool) -> Any:
    @microkernel("iiif")
    def row_add(e: Emit, to: Value, source: Value, count: Value, factor: Value) -> None:
        """to += factor * source, of `count` floats, a multiple of W."""
        factor = e.splat(factor)
        with e.loop(count, W) as i:
            x, y = e.load(source, i), e.load(to, i)
            e.store(e.fma(x, factor, y) if fused else e.builder.fadd(y, e.builder.fmul(factor, x)), to, i)

    return row_add


row_fma, row_add = _row_add(True), _row_add(False)


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """An atomic load (acquire) of a number that other threads change."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """An atomic store (release) of a number that other threads wait for."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
