"""Prefetch of cache lines, by address tables of rows."""

from __future__ import annotations

from llvmlite import ir

from ....core.private.numba import cgutils
from .vector import I8, I32, I64, Emit, Value, W, microkernel


def prefetch_line(e: Emit, address: Value, level: int = 1) -> None:
    """Prefetches a cache line into L1 or L2."""
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(e.builder.module, kind, "llvm.prefetch.p0")
    reading, keep, data = ir.Constant(I32, 0), ir.Constant(I32, 3 if level == 1 else 2), ir.Constant(I32, 1)
    e.builder.call(prefetch, [e.builder.inttoptr(address, pointer), reading, keep, data])


@microkernel("iiii")
def prefetch_row_spans(e: Emit, rows: Value, count: Value, start: Value, size: Value) -> None:
    """Prefetches `size` bytes from `start` on of each listed row into L2."""
    b = e.builder
    with e.loop(count) as j:
        row = b.add(e.load_scalar(rows, j, I64), start)
        with e.loop(size, 64) as i:
            prefetch_line(e, b.add(row, i), level=2)


@microkernel("ii")
def prefetch_column(e: Emit, address: Value, stride: Value) -> None:
    """Prefetches a line of each of W rows, `stride` bytes apart, into L2."""
    for i in range(W):
        prefetch_line(e, e.builder.add(address, e.builder.mul(stride, e.i64(i))), level=2)


@microkernel("iii")
def prefetch_rows(e: Emit, rows: Value, count: Value, size: Value) -> None:
    """Prefetches `size` bytes of each listed row into L1."""
    b = e.builder
    with e.loop(count) as j:
        row = e.load_scalar(rows, j, I64)
        with e.loop(size, 64) as i:
            prefetch_line(e, b.add(row, i))
