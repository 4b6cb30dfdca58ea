"""Numbers as sums of bf16 ones, and blocks of them as matrix tiles (`amx.py`)."""

from __future__ import annotations

from typing import Any

from .amx import BLOCK
from .simd import F32, I16, I32, Emit, Value, W, microkernel


def split(e: Emit, x: Value, parts: int) -> list[Value]:
    """float32 as a sum of numbers with 8 bits each, those of bf16, the largest first."""
    b = e.builder
    result = []
    for _ in range(parts):
        bits = b.add(b.bitcast(x, e.vector(I32)), e.i32s(0x8000))
        top = b.bitcast(b.and_(bits, e.i32s(-0x10000)), e.vector(F32))
        result.append(top)
        x = b.fsub(x, top)
    return result


def pair(e: Emit, even: Value, odd: Value) -> Value:
    """Two parts of `_split` as pairs of bf16."""
    b = e.builder
    low = b.lshr(b.bitcast(even, e.vector(I32)), e.i32s(16))
    return b.or_(low, b.bitcast(odd, e.vector(I32)))


def make_split_row(parts: int, kind: str = "f32") -> Any:
    """`fn(to, part, jump, source, count)`: a row as bf16 rows, `part` bytes apart; NaN if it is not finite.

    From 32 elements to the next 32 it is `jump` bytes.
    """

    @microkernel("iiiii>f")
    def split_row(e: Emit, to: Value, part: Value, jump: Value, source: Value, count: Value) -> Value:
        b = e.builder
        check = e.var(e.zeros)
        with e.loop(b.sdiv(count, e.whole(BLOCK))) as step:
            for half in range(0, BLOCK, W):
                x = e.load(source, b.add(b.mul(step, e.whole(BLOCK)), e.whole(half)), kind)
                check.set(e.fma(x, e.zeros, check.get()))
                for n, top in enumerate(split(e, x, parts)):
                    short = b.trunc(b.lshr(b.bitcast(top, e.vector(I32)), e.i32s(16)), e.vector(I16))
                    at = b.add(b.add(to, b.mul(part, e.whole(n))), b.mul(step, jump))
                    b.store(short, e.pointer(at, half, I16, short.type)).align = 2
        return e.reduce(check.get(), b.fadd)

    return split_row


@microkernel("iiii")
def copy_row(e: Emit, to: Value, jump: Value, source: Value, count: Value) -> None:
    """`count` bf16 numbers, 32 of them `jump` bytes from the next 32."""
    b = e.builder
    with e.loop(b.sdiv(count, e.whole(BLOCK))) as step:
        e.store(e.load(source, b.mul(step, e.whole(W))), b.add(to, b.mul(step, jump)))


def make_turn(parts: int, kind: str) -> Any:
    """`fn(to, part, source, step)`: 16 columns of 32 rows become the rows of a tile; NaN if a number is not finite.

    The rows are `step` bytes apart, the tiles of their parts `part` bytes.
    """

    @microkernel("iiii>f")
    def turn(e: Emit, to: Value, part: Value, source: Value, step: Value) -> Value:
        b = e.builder
        check = e.var(e.zeros)
        pairs: list[list[Value]] = [[] for _ in range(parts)]
        for i in range(0, BLOCK, 2):
            rows = [e.load(b.add(source, b.mul(step, e.whole(i + n))), 0, kind) for n in (0, 1)]
            for x in rows:
                check.set(e.fma(x, e.zeros, check.get()))
            even, odd = ([x] if kind == "bf16" else split(e, x, parts) for x in rows)
            for n in range(parts):
                pairs[n].append(b.bitcast(pair(e, even[n], odd[n]), e.vector(F32)))
        for n in range(parts):
            for i, row in enumerate(e.transpose(pairs[n])):
                e.store(row, b.add(to, b.mul(part, e.whole(n))), i * W)
        return e.reduce(check.get(), b.fadd)

    return turn
