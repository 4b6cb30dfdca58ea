"""Micro-kernels of the backward pass: blocked products of matrices in scratch memory, added to C.

gemm_rows     C[KEYS, cols] += A[KEYS, depth] B[depth, cols]       A a row at a time: K Q^T, V dO^T, P^T dO, dS^T Q
gemm_columns  C[ROWS, cols] += A^T[depth, ROWS]^T B[depth, cols]   A a column at a time: dS K

A row of a, b and c has so many floats as the argument after it says. The sums are those of `fp32.py`.
"""

from __future__ import annotations

from typing import Any

from ..codegen.vector import F32, Emit, Value, Var, W, microkernel
from .fp32 import KEYS, PANEL, ROWS, products


def _add(e: Emit, sums: list[list[Var]], c: Value, width: Value, keep: Value) -> None:
    """C = its sums, added to what it holds if `keep` is not 0."""
    b = e.builder
    fresh = b.icmp_signed("==", keep, e.i64(0))
    for i, line in enumerate(sums):
        for j, x in enumerate(line):
            at = b.add(b.mul(width, e.i64(i)), e.i64(j * W))
            e.store(b.fadd(b.select(fresh, e.zeros, e.load(c, at)), x.get()), c, at)


def _gemm_rows(vectors: int) -> Any:
    @microkernel("iiiiiiii")
    def gemm(
        e: Emit, a: Value, a_row: Value, b: Value, b_row: Value, c: Value, c_row: Value, depth: Value, keep: Value
    ) -> None:
        size = e.builder.mul(a_row, e.i64(4))
        rows = [e.builder.add(a, e.builder.mul(size, e.i64(i))) for i in range(KEYS)]
        sums = products(e, KEYS, lambda i, k: e.load_scalar(rows[i], k, F32), b, b_row, depth, vectors)
        _add(e, sums, c, c_row, keep)

    return gemm


def _gemm_columns(vectors: int) -> Any:
    @microkernel("iiiiiii")
    def gemm(e: Emit, a: Value, a_row: Value, b: Value, b_row: Value, c: Value, c_row: Value, depth: Value) -> None:
        def element(i: int, k: Value) -> Value:
            return e.load_scalar(a, e.builder.add(e.builder.mul(k, a_row), e.i64(i)), F32)

        _add(e, products(e, ROWS, element, b, b_row, depth, vectors), c, c_row, e.i64(1))

    return gemm


VECTORS = PANEL // W  # of a `gemm_rows`, at most
gemm_rows_1, gemm_rows_2, gemm_rows_3, gemm_rows_4 = (_gemm_rows(min(n, VECTORS)) for n in (1, 2, 3, 4))
gemm_columns_1, gemm_columns_2, gemm_columns_3 = (_gemm_columns(n) for n in (1, 2, 3))
