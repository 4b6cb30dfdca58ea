"""What kernel code in Numba is made of: `jit`, struct views, calls by address, rows to float32 and back."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from ..params import PARAMS, TASK, TEAM, WORK_ITEM
from . import dtypes
from .load_store import (
    get_f32,
    get_fp8,
    get_one,
    get_u8,
    put_f32,
    put_one,
    row_scale,
    store_bf16,
    store_f16,
    store_f32,
    widen_bf16,
    widen_f16,
    widen_f32,
    widen_fp8,
    widen_int4,
    widen_int4_high,
    widen_int8,
)
from .vector import W

F = np.float32
INF = np.float32(np.inf)
ZERO, ONE = np.int64(0), np.int64(1)  # not int: Numba compiles a function anew for every literal it is called with
# None of these is called from Python: without the wrappers for that, kernels are compiled in 3/4 of the time.
OPTIONS = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
jit = njit(**OPTIONS)


@intrinsic
def pointer(typingctx, address):
    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


def struct_at(name, record):
    """`fn(address)`: the struct there, whose fields can be read and set."""

    def at(address):
        return carray(pointer(address), 1, dtype=record)[0]

    at.__qualname__ = f"{name}_at"  # kept code is found by name: no two functions may share one
    return jit(at)


params_at, item_at = struct_at("params", PARAMS), struct_at("item", WORK_ITEM)
task_at, team_at = struct_at("task", TASK), struct_at("team", TEAM)


def _caller(count):
    """Calls a compiled function of `count` int64 by its address, the first argument."""
    names = ", ".join(f"a{i}" for i in range(count))

    def typed(fn, *args):
        def codegen(context, builder, sig, values):
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count)
            builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
            return context.get_dummy_value()

        return types.void(*[types.int64] * (count + 1)), codegen

    scope = {"typed": typed}
    exec(f"def call(typingctx, fn, {names}):\n    return typed(fn, {names})", scope)  # Numba counts arguments
    return intrinsic(scope["call"])


call_kernel, call_mainloop, call_parallel, call_amx, call_pv, call_qk = map(_caller, (2, 3, 4, 10, 11, 12))


@njit(**OPTIONS, inline="always")
def up(n, to):
    return (n + to - 1) // to * to


@jit
def fill(address, start, end, value):
    for j in range(start, end):
        put_f32(address + 4 * j, value)


@jit
def widen_row(to, source, dtype, width, padded, scales, scales_dtype, group):
    """A row of `width` elements to float32, with zeros up to `padded`; returns NaN if an element is not finite."""
    bad = F(0)
    if dtype == dtypes.INT4:
        half = width // 2
        whole = half // W * W
        bad += widen_int4(to, source, whole) + widen_int4_high(to + 4 * half, source, whole)
        for i in range(whole, half):
            byte = types.int64(get_u8(source + i))
            low, high = byte & 15, byte >> 4
            put_f32(to + 4 * i, F(low - 16 if low > 7 else low))
            put_f32(to + 4 * (half + i), F(high - 16 if high > 7 else high))
    else:
        whole = width // W * W
        if dtype == dtypes.F32:
            bad += widen_f32(to, source, whole)
        elif dtype == dtypes.F16:
            bad += widen_f16(to, source, whole)
        elif dtype == dtypes.BF16:
            bad += widen_bf16(to, source, whole)
        elif dtype == dtypes.INT8:
            bad += widen_int8(to, source, whole)
        else:
            bad += widen_fp8(to, source, whole)
        for i in range(whole, width):
            if not dtypes.is_quantised(dtype):
                x = get_one(source, dtype, i)
            elif dtype == dtypes.INT8:
                byte = types.int64(get_u8(source + i))
                x = F(byte - 256 if byte > 127 else byte)
            else:
                x = get_fp8(source, i)
            put_f32(to + 4 * i, x)
            bad += x * F(0)
    fill(to, width, padded, F(0))
    if dtypes.is_quantised(dtype):
        for g in range((width + group - 1) // group):
            scale = get_one(scales, scales_dtype, g)
            bad += scale * F(0)
            row_scale(to + 4 * g * group, up(min(group, padded - g * group), W), scale)
    return bad


@jit
def store_row(to, dtype, source, width, factor):
    """out = source * factor in the output's dtype."""
    whole = width // W * W
    if dtype == dtypes.F32:
        store_f32(to, source, whole, factor)
    elif dtype == dtypes.F16:
        store_f16(to, source, whole, factor)
    else:
        store_bf16(to, source, whole, factor)
    for d in range(whole, width):
        put_one(to, dtype, d, get_f32(source + 4 * d) * factor)
