"""Cache writes: stores rows of K and V into a cache, converted or quantised, in one pass.

A row is converted to float32 in scratch memory. To quantise it, each group's largest magnitude sets its scale; the row
is divided by its scales, rounded, and stored with them. Rows of the cache's own type are copied.

    token i of sequence b goes to position p = starts[b] + i:
        slot p % wrap of row b, or, with a table, slot p % wrap of page table[b, p // wrap]
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False, disallow-untyped-calls=False
from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

from ...core.private.numba import cgutils
from ...core.storage import FORMATS, MOST
from .codegen import dtypes
from .codegen.dtypes import CODES, NAMES
from .codegen.formats import DECODE, ENCODE
from .codegen.load_store import by_dtype, fetch_add, get_i32, put_f32
from .codegen.numba_ops import (
    LATENT,
    LATENT_GROUP,
    LATENT_SCALES,
    ONE,
    ZERO,
    F,
    fill,
    jit,
    row_to_f32,
    store_row,
    struct_at,
    up,
)
from .codegen.vector import F32, I8, Emit, Value, W, microkernel
from .params import fields, offset, put_tensor, record, tensor
from .threads import pool


def side(x: str) -> str:
    """The fields for K or V: source and destination of rows, with their types."""
    source, to, scales = (tensor(f"{x}_{name}") for name in ("source", "to", "scales"))
    return f"{source} {x}_source_dtype {to} {x}_dtype {x}_width {scales} {x}_group"


class WriteParams(ctypes.Structure):
    """The parameter struct of a write: source, destination, and the parts that threads take."""

    _fields_ = fields(
        f"batch heads starts cu packed {tensor('table', 'b')} wrap {side('k')} {side('v')} parts next_part"
    )


write_params_at, NEXT_PART = struct_at(record(WriteParams)), offset(WriteParams, "next_part")
SCRATCH = 4 * 1024 + 1024  # a padded row of up to 576 floats, then its bytes
TINY = F(np.finfo(np.float32).tiny)
THREAD_ELEMENTS = 1 << 18  # least work of a thread: fewer are not worth waking it


@microkernel("ii>f")
def largest(e: Emit, source: Value, count: Value) -> Value:
    """The largest magnitude of `count` floats up to MOST, infinite or NaN if one is."""
    top, bad = e.var(e.zeros), e.var(e.zeros)
    with e.loop(count, W) as i:
        x = e.call("fabs", e.load(source, i))
        top.set(e.max(x, top.get()))
        bad.set(e.builder.fadd(bad.get(), e.builder.fsub(x, x)))  # NaN for NaN and infinity
    value = e.reduce(top.get(), e.max)
    wrong = e.reduce(bad.get(), e.builder.fadd)
    infinite = e.builder.fcmp_ordered("==", value, ir.Constant(F32, float("inf")))
    most = ir.Constant(F32, MOST)
    finite = e.builder.select(e.builder.fcmp_ordered(">", value, most), most, value)
    return e.builder.select(infinite, value, e.builder.fadd(finite, wrong))


@microkernel("iif")
def divide(e: Emit, row: Value, count: Value, by: Value) -> None:
    by = e.splat(by)
    with e.loop(count, W) as i:
        e.store(e.builder.fdiv(e.load(row, i), by), row, i)


@microkernel("iiiii")
def write_bytes(e: Emit, to: Value, low: Value, high: Value, count: Value, dtype: Value) -> None:
    """Stores elements divided by their scales; `high` are those packed with `low` in one number."""

    def loop(name: str) -> None:
        with e.loop(count, W) as i:
            rows = (low, high)[: len(DECODE[name][1])]
            short = e.builder.trunc(ENCODE[name](e, *(e.load(row, i) for row in rows)), e.vector(I8))
            e.builder.store(short, e.pointer(to, i, I8, short.type)).align = 1

    by_dtype(e, dtype, list(ENCODE), loop)


@microkernel("i>f")
def largest_step(e: Emit, dtype: Value) -> Value:
    """The stored number of a group's largest magnitude."""
    result = e.var(ir.Constant(F32, 0.0))
    by_dtype(e, dtype, list(ENCODE), lambda name: result.set(ir.Constant(F32, FORMATS[name].largest)))
    return result.get()


@microkernel("iii")
def copy_bytes(e: Emit, to: Value, source: Value, count: Value) -> None:
    b = e.builder
    kind = I8.as_pointer()
    cgutils.raw_memcpy(b, b.inttoptr(to, kind), b.inttoptr(source, kind), count, 1, align=1)


@jit
def put_quantised(to, dtype, width, scales, group, row):
    """Quantises and stores a row of float32 in scratch memory."""
    padded = up(width, W)
    fill(row, padded, up(width, group) + W, F(0))  # pads the last group; int4 reads past the upper half
    for g in range((width + group - 1) // group):
        at = row + 4 * g * group
        scale = largest(at, group) / largest_step(dtype)
        put_f32(scales + 4 * g, scale)
        divide(at, group, TINY if scale < TINY else scale)
    packed = row + 4096
    span = width // 2 if dtypes.is_packed(dtype) else width  # stored numbers
    write_bytes(packed, row, row + 4 * span, up(span, W), dtype)
    copy_bytes(to, packed, span)


@jit
def put_row(source, source_dtype, to, dtype, width, scales, group, row):
    """One row of a head; `row` is scratch memory."""
    if dtype == source_dtype:
        copy_bytes(to, source, width * (4 if dtype == dtypes.F32 else 2))
        return
    padded = up(width, W)
    row_to_f32(row, source, source_dtype, width, padded, ZERO, ZERO, ONE)
    if dtype == dtypes.LATENT:
        store_row(to + LATENT + LATENT_SCALES, dtypes.BF16, row + 4 * LATENT, width - LATENT, F(1))
        put_quantised(to, dtypes.FP8, LATENT, to + LATENT, LATENT_GROUP, row)
    elif dtypes.is_quantised(dtype):
        put_quantised(to, dtype, width, scales, group, row)
    else:
        store_row(to, dtype, row, width, F(1))


def append(params, scratch):
    """A thread's main function: takes parts of a call's tokens until there are none."""
    p = write_params_at(params)
    part = fetch_add(params + NEXT_PART)
    while part < p.parts:
        append_part(p, scratch, part, p.parts)
        part = fetch_add(params + NEXT_PART)


@jit
def append_part(p, scratch, part, parts):
    """Stores the rows of one of `parts` equal parts of the tokens."""
    tokens = types.int64(get_i32(p.cu + 4 * p.batch))
    low, high = tokens * part // parts, tokens * (part + 1) // parts
    for b in range(p.batch):
        first = types.int64(get_i32(p.cu + 4 * b))
        new = types.int64(get_i32(p.cu + 4 * b + 4)) - first
        start = types.int64(get_i32(p.starts + 4 * b))
        begin = max(types.int64(0), low - first)
        if not p.table:
            begin = max(begin, new - p.wrap)  # a ring keeps only the last tokens
        for i in range(begin, min(new, high - first)):
            position = start + i
            slot, cache_row = position % p.wrap, b
            if p.table:
                cache_row = types.int64(get_i32(p.table + b * p.table_b + position // p.wrap * 4))
            source_row, token = (types.int64(0), first + i) if p.packed else (b, i)
            for h in range(p.heads):
                put_row(
                    p.k_source + source_row * p.k_source_b + h * p.k_source_h + token * p.k_source_l, p.k_source_dtype,
                    p.k_to + cache_row * p.k_to_b + h * p.k_to_h + slot * p.k_to_l, p.k_dtype, p.k_width,
                    p.k_scales + cache_row * p.k_scales_b + h * p.k_scales_h + slot * p.k_scales_l, p.k_group, scratch,
                )  # fmt: skip
                if not p.v_width:  # V is in K
                    continue
                put_row(
                    p.v_source + source_row * p.v_source_b + h * p.v_source_h + token * p.v_source_l, p.v_source_dtype,
                    p.v_to + cache_row * p.v_to_b + h * p.v_to_h + slot * p.v_to_l, p.v_dtype, p.v_width,
                    p.v_scales + cache_row * p.v_scales_b + h * p.v_scales_h + slot * p.v_scales_l, p.v_group, scratch,
                )  # fmt: skip


class Append:
    """The writer of one cache; calls differ in sources and places. See `core/kv_store.py`."""

    def __init__(self, k: Any, v: Any, wrap: int) -> None:
        params = WriteParams(wrap=wrap, heads=k.data.shape[1])
        for x, store in (("k", k), ("v", v)):
            put_tensor(params, f"{x}_to", store.data)
            setattr(params, f"{x}_dtype", CODES[store.format.name])
            setattr(params, f"{x}_width", 0 if store.inside else store.format.width)
            if store.scales is not None:
                put_tensor(params, f"{x}_scales", store.scales)
                setattr(params, f"{x}_group", store.format.group)
        self.params, self.kept = params, (k, v)
        self.elements = k.data.shape[1] * (params.k_width + params.v_width)  # of a token
        self.latest: tuple[Any, Any] = None, params  # the last call's key and its struct

    def __call__(self, k: torch.Tensor, v: torch.Tensor, places: Any) -> None:
        params = self._params(k, v, places)
        pool.run_kernel("append", ctypes.addressof(params), params.parts, SCRATCH)

    def bound(self, k: torch.Tensor, v: torch.Tensor, places: Any) -> Callable[..., None]:
        """This write as a function of addresses, for other caches and rows of the same kind; not thread-safe."""
        params = self._params(k, v, places)
        address, parts = ctypes.addressof(params), params.parts

        def write(k_to: int, v_to: int, k: int, v: int) -> None:
            params.k_to, params.v_to, params.k_source, params.v_source, params.next_part = k_to, v_to, k, v, 0
            pool.run_kernel("append", address, parts, SCRATCH)

        write.kept = places  # type: ignore[attr-defined]
        return write

    def _params(self, k: torch.Tensor, v: torch.Tensor, places: Any) -> WriteParams:
        """The struct of one call; not shared, since other threads may write too."""
        batch, table = len(places.starts), places.table
        key = (
            k.stride(), v.stride(), k.dtype, v.dtype, batch, places.packed, None if table is None else table.stride(0),
        )  # fmt: skip
        before, params = self.latest
        if key != before:
            params = WriteParams.from_buffer_copy(self.params)
            params.batch, params.packed = batch, places.packed
            for name, x in (("table", table), ("k_source", k), ("v_source", v)):
                if x is not None:
                    put_tensor(params, name, x)
            params.k_source_dtype, params.v_source_dtype = CODES[NAMES[k.dtype]], CODES[NAMES[v.dtype]]
            self.latest = key, params
        params = WriteParams.from_buffer_copy(params)
        params.starts, params.cu = places.starts.data_ptr(), places.cu.data_ptr()
        params.k_source, params.v_source = k.data_ptr(), v.data_ptr()
        if table is not None:
            params.table = table.data_ptr()
        params.parts = min(torch.get_num_threads(), 1 + places.tokens * self.elements // THREAD_ELEMENTS)
        return params
