"""Prefetch of cache lines, by address tables of rows."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from .vector import I8, I32, I64, Emit, Value, microkernel


def ask(e: Emit, address: Value, near: bool = True) -> None:
    """Asks for a line of memory, to be there when it is read: `near`, in the first-level cache, or in the second."""
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(e.builder.module, kind, "llvm.prefetch.p0")
    reading, keep, data = ir.Constant(I32, 0), ir.Constant(I32, 3 if near else 2), ir.Constant(I32, 1)
    e.builder.call(prefetch, [e.builder.inttoptr(address, pointer), reading, keep, data])


@microkernel("iiii")
def fetch_part(e: Emit, rows: Value, count: Value, start: Value, size: Value) -> None:
    """Asks for `size` bytes from `start` on of each listed row, into the second-level cache."""
    b = e.builder
    with e.loop(count) as j:
        row = b.add(e.load_scalar(rows, j, I64), start)
        with e.loop(size, 64) as i:
            ask(e, b.add(row, i), near=False)


@microkernel("iii")
def fetch(e: Emit, rows: Value, count: Value, size: Value) -> None:
    """Asks for `size` bytes of each listed row."""
    b = e.builder
    with e.loop(count) as j:
        row = e.load_scalar(rows, j, I64)
        with e.loop(size, 64) as i:
            ask(e, b.add(row, i))
