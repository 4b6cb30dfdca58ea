"""GEMM by Intel AMX: micro-kernels that multiply bf16 tiles with float32 accumulation.

A tile register holds 16 rows of 64 bytes. One instruction adds A [16, 32] B [32, 16] to C [16, 16]; rows of B hold
pairs: elements 2i and 2i + 1 of each column are adjacent. It does the work of 256 vector FMAs in the time of 32, so
float16 uses it too, each number split exactly into two bf16 parts.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from ....core.private.numba import cgutils
from ..codegen.vector import I8, Emit, Value, W, microkernel
from ..isa import cpu_features
from . import Tiles

TILE = 1024  # bytes
# Rows and columns of a product: four tiles of sums, two of each operand. Tiles are contiguous in memory, 16 rows of 64
# bytes: strided loads are slower (cpu/amx-tiles in benchmarks/cpu/LOG.md).
# Operands are [blocks of 32, steps of 32, 2 halves, 16, 64 bytes]: see `tile_row`.
BLOCK = 32
PARTS = {"bf16": 1, "f16": 2}  # bf16 parts of a number; float32 would need three, and is faster by vectors
# The pairs of parts that are multiplied. Consecutive pairs share an operand, which stays in registers. Scores need all,
# since lse is float32; in P V the smallest is far below the last bit of a float16.
KEY_PRODUCTS = {1: [(0, 0)], 2: [(0, 1), (1, 1), (1, 0), (0, 0)]}
VALUE_PRODUCTS = {1: [(0, 0)], 2: [(0, 1), (0, 0), (1, 0)]}


@cache
def usable() -> bool:
    """Whether this process may use AMX tiles. Linux must be asked for them: they add 8 KiB to a thread's state."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64" and W == 16):
        return False
    if not cpu_features() >= {"amx-tile", "amx-bf16"}:
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18
    try:
        return ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0
    except (OSError, AttributeError):
        return False


def _tile_config() -> Any:
    """The tile configuration: eight tiles of 16 rows of 64 bytes."""
    bytes_ = np.zeros(64, dtype=np.uint8)
    bytes_[0] = 1
    bytes_[16:32:2] = 64
    bytes_[48:56] = 16
    return bytes_


TILE_CONFIG = _tile_config()


def _tile(e: Emit, name: str, *args: Any) -> None:
    """A tile instruction; registers are numbers."""
    values = [ir.Constant(I8, a) if isinstance(a, int) else a for a in args]
    kind = ir.FunctionType(ir.VoidType(), [v.type for v in values])
    e.builder.call(cgutils.get_or_insert_function(e.builder.module, kind, f"llvm.x86.{name}"), values)


def _at(e: Emit, address: Value, offset: Any = 0) -> Value:
    offset = e.i64(offset) if isinstance(offset, int) else offset
    return e.builder.inttoptr(e.builder.add(address, offset), I8.as_pointer())


@microkernel("i")
def load_tile_config(e: Emit, tile_config: Value) -> None:
    _tile(e, "ldtilecfg", _at(e, tile_config))


@microkernel("")
def release(e: Emit) -> None:
    """Gives the tile registers back."""
    _tile(e, "tilerelease")


def multiply(
    e: Emit, products: Any, a: Value, a_part: Value, b: Value, b_part: Value, n: Value,
    overlapped: Callable[[Value], None],
) -> None:  # fmt: skip
    """Tiles 0 to 3 += A [32, 32 n] B [32 n, 32], operands as `BLOCK` says, their parts `a_part` and `b_part` apart.

    `overlapped(g)` emits vector code that runs meanwhile, after group g of n times `products`.
    """
    c = e.builder
    width = e.i64(64)
    with e.loop(n) as step:
        down = c.mul(step, e.i64(2 * TILE))
        held_a = held_b = None
        for group, (i, j) in enumerate(products):
            left = c.add(c.add(a, c.mul(a_part, e.i64(i))), down)
            right = c.add(c.add(b, c.mul(b_part, e.i64(j))), down)
            if i != held_a:
                _tile(e, "tileloadd64", 4, _at(e, left), width)
            if j != held_b:
                _tile(e, "tileloadd64", 6, _at(e, right), width)
            _tile(e, "tdpbf16ps", 0, 4, 6)
            if j != held_b:
                _tile(e, "tileloadd64", 7, _at(e, right, TILE), width)
            _tile(e, "tdpbf16ps", 1, 4, 7)
            if i != held_a:
                _tile(e, "tileloadd64", 5, _at(e, left, TILE), width)
            _tile(e, "tdpbf16ps", 2, 5, 6)
            _tile(e, "tdpbf16ps", 3, 5, 7)
            held_a, held_b = i, j
            overlapped(c.add(c.mul(step, e.i64(len(products))), e.i64(group)))


def _corners(e: Emit, c: Value, half: Value) -> list[Value]:
    """Addresses of tiles 0 to 3 of a product: [2 halves of the columns, rows, 16], the halves `half` bytes apart."""
    right = e.builder.add(c, half)
    return [c, right, e.builder.add(c, e.i64(TILE)), e.builder.add(right, e.i64(TILE))]


def nothing(group: Value) -> None:
    pass


def make_scores(
    e: Emit, parts: int, k: Value, k_part: Value, q: Value, q_part: Value, s: Value, half: Value, n: Value,
    overlapped: Callable[[Value], None] = nothing,
) -> None:  # fmt: skip
    """s [32 keys, 32 rows] = K Q^T over 32 n elements."""
    for tile in range(4):
        _tile(e, "tilezero", tile)
    multiply(e, KEY_PRODUCTS[parts], k, k_part, q, q_part, n, overlapped)
    for tile, corner in enumerate(_corners(e, s, half)):
        _tile(e, "tilestored64", tile, _at(e, corner), e.i64(64))


def make_products(parts: int) -> tuple[Any, Any]:
    """`keys(k, k_part, q, q_part, s, half, n)`: `make_scores`.

    `values(v, v_part, p, p_part, acc, half, n, sums)`: acc [32 columns, 32 rows] += V^T P over 32 n keys.
    """

    @microkernel("iiiiiii")
    def keys(e: Emit, k: Value, k_part: Value, q: Value, q_part: Value, s: Value, half: Value, n: Value) -> None:
        make_scores(e, parts, k, k_part, q, q_part, s, half, n)

    @microkernel("iiiiiiii")
    def values(
        e: Emit, v: Value, v_part: Value, p: Value, p_part: Value, acc: Value, half: Value, n: Value, sums: Value
    ) -> None:
        b = e.builder
        corners = _corners(e, acc, half)
        for tile, corner in enumerate(corners):
            if parts == 1:
                _tile(e, "tileloadd64", tile, _at(e, corner), e.i64(64))
            else:
                _tile(e, "tilezero", tile)
        multiply(e, VALUE_PRODUCTS[parts], v, v_part, p, p_part, n, nothing)
        for tile, corner in enumerate(corners):
            to = corner if parts == 1 else b.add(sums, e.i64(tile * TILE))
            _tile(e, "tilestored64", tile, _at(e, to), e.i64(64))
        if parts > 1:  # summing in short runs rounds less
            for tile, corner in enumerate(corners):
                with e.loop(e.i64(TILE // 4), W) as i:
                    more = e.load(sums, b.add(i, e.i64(tile * TILE // 4)))
                    e.store(b.fadd(e.load(corner, i), more), corner, i)

    return keys, values


def tiles(dtype: str) -> Tiles:
    """The products for a storage type."""
    return Tiles(PARTS[dtype], load_tile_config, release, make_scores, *make_products(PARTS[dtype]))
