"""Micro-kernels of the backward pass: blocked products of matrices in scratch memory, added to C.

gemm_rows     C[KEYS, cols] += A[KEYS, depth] B[depth, cols]       A a row at a time: K Q^T, V dO^T, P^T dO, dS^T Q
gemm_columns  C[ROWS, cols] += A^T[depth, ROWS]^T B[depth, cols]   A a column at a time: dS K

`lda`, `ldb`, `ldc`: floats from a row of A, B, C to the next. Sums are as in `fp32.py`. In the kernels for bf16 a
float of A and B is a pair of bf16 numbers, adjacent in depth, multiplied by AVX-512 BF16 (VDPBF16PS).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..codegen.bf16_dot import dot_pairs
from ..codegen.prefetch import prefetch_line
from ..codegen.vector import F32, Emit, Value, Var, W, microkernel
from .fp32 import KEYS, PANEL, ROWS, products


def _add(e: Emit, sums: list[list[Var]], c: Value, ldc: Value, accumulate: Value) -> None:
    """Stores sums to C, or adds them to it if `accumulate` is not 0."""
    b = e.builder
    fresh = b.icmp_signed("==", accumulate, e.i64(0))
    for i, row in enumerate(sums):
        for j, x in enumerate(row):
            at = b.add(b.mul(ldc, e.i64(i)), e.i64(j * W))
            e.store(b.fadd(b.select(fresh, e.zeros, e.load(c, at)), x.get()), c, at)


def _prefetch(e: Emit, c: Value, ldc: Value, rows: int, vectors: int) -> None:
    """Prefetches C, which is needed after the sums: dQ comes from the last-level cache."""
    b = e.builder
    for i in range(rows):
        for j in range(vectors):
            prefetch_line(e, b.add(c, b.mul(b.add(b.mul(ldc, e.i64(i)), e.i64(j * W)), e.i64(4))))


def rows_times(
    e: Emit, a: Value, lda: Value, b: Value, ldb: Value, depth: Value, vectors: int, pairs: bool
) -> list[list[Var]]:
    """A[KEYS, depth] B[depth, vectors * W] in registers: sums [key][vector]."""
    size = e.builder.mul(lda, e.i64(4))
    rows = [e.builder.add(a, e.builder.mul(size, e.i64(i))) for i in range(KEYS)]
    fma = partial(dot_pairs, e) if pairs else e.fma
    return products(e, KEYS, lambda i, k: e.load_scalar(rows[i], k, F32), b, ldb, depth, vectors, fma)


def _gemm_rows(vectors: int, pairs: bool) -> Any:
    @microkernel("iiiiiiii")
    def gemm(
        e: Emit, a: Value, lda: Value, b: Value, ldb: Value, c: Value, ldc: Value, depth: Value, accumulate: Value
    ) -> None:
        _prefetch(e, c, ldc, KEYS, vectors)
        _add(e, rows_times(e, a, lda, b, ldb, depth, vectors, pairs), c, ldc, accumulate)

    return gemm


def _gemm_columns(vectors: int, pairs: bool) -> Any:
    @microkernel("iiiiiii")
    def gemm(e: Emit, a: Value, lda: Value, b: Value, ldb: Value, c: Value, ldc: Value, depth: Value) -> None:
        def element(i: int, k: Value) -> Value:
            return e.load_scalar(a, e.builder.add(e.builder.mul(k, lda), e.i64(i)), F32)

        fma = partial(dot_pairs, e) if pairs else e.fma
        _prefetch(e, c, ldc, ROWS, vectors)
        _add(e, products(e, ROWS, element, b, ldb, depth, vectors, fma), c, ldc, e.i64(1))

    return gemm


VECTORS = PANEL // W  # most vectors of a `gemm_rows`
gemm_rows, gemm_rows_bf16 = ([_gemm_rows(min(n, VECTORS), pairs) for n in (1, 2, 3, 4)] for pairs in (False, True))
gemm_columns, gemm_columns_bf16 = ([_gemm_columns(n, pairs) for n in (1, 2, 3)] for pairs in (False, True))
