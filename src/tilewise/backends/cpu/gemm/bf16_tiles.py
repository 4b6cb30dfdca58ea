"""The products of `amx.py` by AVX-512 BF16 (VDPBF16PS), for bf16 on processors without AMX; the same operands.

Beside float32 vectors: cpu/bf16-tiles in benchmarks/cpu/LOG.md.
"""

from __future__ import annotations

from collections.abc import Callable

from ..codegen.bf16_dot import dot_pairs
from ..codegen.vector import F32, Emit, Value, microkernel
from . import Tiles
from .amx import BLOCK, TILE

ROWS = 8  # rows of A in registers, over two vectors of columns: 16 sums
LINE = 64  # bytes of a row of a tile


def multiply(e: Emit, a: Value, b: Value, c: Value, half: Value, n: Value, accumulate: bool) -> None:
    """C [32, 32] = A [32, 32 n] B [32 n, 32], or += it. C is [2 halves of the columns, 32, 16], `half` bytes apart."""
    x = e.builder
    with e.loop(e.i64(BLOCK), ROWS) as first:
        down = x.mul(first, e.i64(LINE))
        corners = [x.add(c, down), x.add(x.add(c, half), down)]
        sums = [
            [e.var(e.load(corner, i * LINE // 4) if accumulate else e.zeros) for corner in corners] for i in range(ROWS)
        ]
        rows = x.add(a, down)
        with e.loop(n) as step:
            along = x.mul(step, e.i64(2 * TILE))
            left, right = x.add(rows, along), x.add(b, along)
            for pair in range(BLOCK // 2):
                columns = [e.load(right, (side * TILE + pair * LINE) // 4) for side in (0, 1)]
                for i in range(ROWS):
                    value = e.splat(e.load_scalar(left, i * LINE // 4 + pair, F32))
                    for side in (0, 1):
                        sums[i][side].set(dot_pairs(e, value, columns[side], sums[i][side].get()))
        for i in range(ROWS):
            for side in (0, 1):
                e.store(sums[i][side].get(), corners[side], i * LINE // 4)


def make_scores(
    e: Emit, parts: int, k: Value, k_part: Value, q: Value, q_part: Value, s: Value, half: Value, n: Value,
    overlapped: Callable[[Value], None] | None = None,
) -> None:  # fmt: skip
    """s [32 keys, 32 rows] = K Q^T over 32 n elements."""
    multiply(e, k, q, s, half, n, False)
    if overlapped is not None:
        with e.loop(n) as group:
            overlapped(group)


def tiles(dtype: str) -> Tiles:
    """The products for bf16: as `amx.tiles`."""
    assert dtype == "bf16"

    @microkernel("i")
    def load_tile_config(e: Emit, tile_config: Value) -> None:
        pass

    @microkernel("")
    def release(e: Emit) -> None:
        pass

    @microkernel("iiiiiii")
    def keys(e: Emit, k: Value, k_part: Value, q: Value, q_part: Value, s: Value, half: Value, n: Value) -> None:
        multiply(e, k, q, s, half, n, False)

    @microkernel("iiiiiiii")
    def values(
        e: Emit, v: Value, v_part: Value, p: Value, p_part: Value, acc: Value, half: Value, n: Value, sums: Value
    ) -> None:
        multiply(e, v, p, acc, half, n, True)

    return Tiles(1, load_tile_config, release, make_scores, keys, values)
