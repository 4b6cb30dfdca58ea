"""Where things are: a sequence's place, a key's row. Numba code, called by the kernels."""

# mypy: ignore-errors
from __future__ import annotations

from collections import namedtuple

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from .micro import (
    get_f32,
    get_fp8,
    get_i32,
    get_i64,
    get_one,
    get_u8,
    put_f32,
    put_i64,
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
)  # fmt: skip
from .params import END, ITEM, MASK_BOOL, NO_LIMIT, PARAMS
from .simd import W

F = np.float32
INF = np.float32(np.inf)
ZERO, ONE = np.int64(0), np.int64(1)  # not int: Numba compiles a function anew for every literal it is called with
# None of these is called from Python: without the wrappers for that, kernels are compiled in 3/4 of the time.
OPTIONS = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
jit = njit(**OPTIONS)
KEY_PAD = np.int64(8)  # keys that `dots` takes at once
LIST_PAD = np.int64(16)  # those of whole numbers

# K or V: base, strides over the batch (or pages), heads and rows, storage code, width; its scales likewise, their group
Source = namedtuple("Source", "base b h l code width scales scales_b scales_h scales_l scales_code group")
# The sequence and KV head that rows come from
Place = namedtuple("Place", "b head kv_start")


@intrinsic
def pointer(typingctx, address):
    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@jit
def params_at(address):
    return carray(pointer(address), 1, dtype=PARAMS)[0]


@jit
def item_at(address):
    return carray(pointer(address), 1, dtype=ITEM)[0]


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


call_work, call_walk, call_parallel, call_tiles, call_adds, call_dots = map(_caller, (2, 3, 4, 10, 11, 12))


@njit(**OPTIONS, inline="always")
def up(n, to):
    return (n + to - 1) // to * to


@jit
def fill(address, start, end, value):
    for j in range(start, end):
        put_f32(address + 4 * j, value)


@jit
def sequence(p, b):
    """Batch row b: its first query row, its queries, its first key row, its keys, the position of its first query."""
    q_start, q_len, kv_start, kv_len = 0, p.q_len, 0, p.kv_len
    if p.cu_q:
        q_start = types.int64(get_i32(p.cu_q + 4 * b))
        q_len = types.int64(get_i32(p.cu_q + 4 * b + 4)) - q_start
    if p.cu_k:
        kv_start = types.int64(get_i32(p.cu_k + 4 * b))
        kv_len = types.int64(get_i32(p.cu_k + 4 * b + 4)) - kv_start
    if p.kv_lengths:
        kv_len = types.int64(get_i32(p.kv_lengths + 4 * b))
    offset = p.offset
    if p.q_offsets:
        offset = types.int64(get_i32(p.q_offsets + 4 * b))
    elif offset == END:
        offset = kv_len - q_len
    return q_start, q_len, kv_start, kv_len, offset


@jit
def key_span(p, position, kv_len):
    """Keys [lo, hi) that position and length rules leave to a query; hi <= lo if none."""
    lo, hi = 0, kv_len
    if p.causal:
        hi = min(hi, position + 1)
    if p.left != NO_LIMIT:
        lo = max(lo, position - p.left)
    if p.right != NO_LIMIT:
        hi = min(hi, position + p.right + 1)
    if p.chunk:
        start = position // p.chunk * p.chunk
        lo, hi = max(lo, start), min(hi, start + p.chunk)
    return lo, hi


@jit
def query_row(p, item, q_start, g, i):
    """Where query i of an item's rows is in q, for head g of the group."""
    head = item.head * (p.heads // p.kv_heads) + g
    b = types.int64(0) if p.cu_q else item.b
    return p.q + b * p.q_b + head * p.q_h + (q_start + item.row + i) * p.q_l


@jit
def key_source(p):
    return Source(p.k, p.k_b, p.k_h, p.k_l, p.k_code, p.head_dim,
                  p.k_scales, p.k_scales_b, p.k_scales_h, p.k_scales_l, p.k_scales_code, p.k_group)  # fmt: skip


@jit
def value_source(p):
    return Source(p.v, p.v_b, p.v_h, p.v_l, p.v_code, p.value_dim,
                  p.v_scales, p.v_scales_b, p.v_scales_h, p.v_scales_l, p.v_scales_code, p.v_group)  # fmt: skip


@jit
def place(p, item, kv_start):
    return Place(types.int64(0) if p.cu_k else item.b, item.head, kv_start)


@jit
def row_address(p, base, stride_b, stride_h, stride_l, at, j):
    """Where key j's row is in k, v or their scales."""
    if p.table:
        page = types.int64(get_i32(p.table + at.b * p.table_b + j // p.page * 4))
        return base + page * stride_b + at.head * stride_h + j % p.page * stride_l
    return base + at.b * stride_b + at.head * stride_h + (at.kv_start + j) * stride_l


@jit
def list_rows(p, x, at, table, first, count, pad):
    """Addresses of `count` rows, the last one repeated up to a multiple of `pad`: it may be read, it does not count."""
    if p.table:
        j = 0
        while j < count:  # a page at a time: a division for each key would cost more than reading it
            start = row_address(p, x.base, x.b, x.h, x.l, at, first + j)
            run = min(p.page - (first + j) % p.page, count - j)
            for i in range(run):
                put_i64(table + 8 * (j + i), start + i * x.l)
            j += run
    else:
        start = row_address(p, x.base, x.b, x.h, x.l, at, first)
        for j in range(count):
            put_i64(table + 8 * j, start + j * x.l)
    for j in range(count, up(count, pad)):
        put_i64(table + 8 * j, get_i64(table + 8 * (count - 1)))


@jit
def list_ahead(p, x, at, table, first, count, end, ahead):
    """Addresses of `count` rows up to a multiple of 16, and `ahead` more; the last before `end` stands for others."""
    there, wanted = min(count + ahead, end - first), up(count, LIST_PAD) + ahead
    list_rows(p, x, at, table, first, there, ONE)
    for j in range(there, wanted):
        put_i64(table + 8 * j, get_i64(table + 8 * (there - 1)))


@jit
def list_scales(p, x, at, table, first, count, pad, line):
    """The scales of `count` rows as float32, [groups, line]; zeros up to a multiple of `pad`."""
    groups = (x.width + x.group - 1) // x.group
    j = 0
    while j < count:
        start = row_address(p, x.scales, x.scales_b, x.scales_h, x.scales_l, at, first + j)
        run = min(p.page - (first + j) % p.page, count - j) if p.table else count
        for g in range(groups):
            for i in range(run):
                put_f32(table + 4 * (g * line + j + i), get_one(start + i * x.scales_l, x.scales_code, g))
        j += run
    for g in range(groups):
        fill(table + 4 * g * line, count, up(count, pad), F(0))


@jit
def widen_rows(p, x, at, table, to, first, count, pad):
    """Rows that `table` lists, to float32 in `to`, which the table lists then. Returns NaN if one is not finite."""
    padded = up(x.width, W)
    bad = F(0)
    for j in range(count):
        scales = types.int64(0)
        if x.code >= 3:
            scales = row_address(p, x.scales, x.scales_b, x.scales_h, x.scales_l, at, first + j)
        row = to + 4 * j * padded
        bad += widen_row(row, get_i64(table + 8 * j), x.code, x.width, padded, scales, x.scales_code, x.group)
    for j in range(up(count, pad)):
        put_i64(table + 8 * j, to + 4 * min(j, count - 1) * padded)
    return bad


@jit
def widen_row(to, source, code, width, padded, scales, scales_code, group):
    """A row of `width` elements to float32, with zeros up to `padded`; returns NaN if an element is not finite."""
    bad = F(0)
    if code == 4:
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
        if code == 0:
            bad += widen_f32(to, source, whole)
        elif code == 1:
            bad += widen_f16(to, source, whole)
        elif code == 2:
            bad += widen_bf16(to, source, whole)
        elif code == 3:
            bad += widen_int8(to, source, whole)
        else:
            bad += widen_fp8(to, source, whole)
        for i in range(whole, width):
            if code <= 2:
                x = get_one(source, code, i)
            elif code == 3:
                byte = types.int64(get_u8(source + i))
                x = F(byte - 256 if byte > 127 else byte)
            else:
                x = get_fp8(source, i)
            put_f32(to + 4 * i, x)
            bad += x * F(0)
    fill(to, width, padded, F(0))
    if code >= 3:
        for g in range((width + group - 1) // group):
            scale = get_one(scales, scales_code, g)
            bad += scale * F(0)
            row_scale(to + 4 * g * group, up(min(group, padded - g * group), W), scale)
    return bad


@jit
def store_row(to, code, source, width, factor):
    """out = source * factor in the output's dtype."""
    whole = width // W * W
    if code == 0:
        store_f32(to, source, whole, factor)
    elif code == 1:
        store_f16(to, source, whole, factor)
    else:
        store_bf16(to, source, whole, factor)
    for d in range(whole, width):
        put_one(to, code, d, get_f32(source + 4 * d) * factor)


@jit
def is_plain(p):
    """Whether scores are dot products until the softmax, scaled only there."""
    biased = p.mask != 0 and p.mask_code != MASK_BOOL
    return not (p.softcap > 0 or p.slopes != 0 or p.scale <= 0 or biased)


@jit
def unit(p):
    """What scores and their maximum m are multiplied by in the softmax."""
    return F(p.scale) if is_plain(p) else F(1)
