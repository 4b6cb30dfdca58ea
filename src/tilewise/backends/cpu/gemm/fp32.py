"""Micro-kernels for prefill: register-blocked GEMM.

gemm_keys    s[keys, rows]  = K Q^T      a block of keys over a panel of query rows (`max_free.py`: with softmax)
gemm_values  acc[rows, Dv] += P V        a block of query rows over a panel of V's columns
pack         those columns of V's rows, side by side
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..codegen.vector import F32, I64, REGISTERS, Emit, Value, Var, W, microkernel

KEYS = 6  # keys of a gemm_keys block
PANEL = (4 if REGISTERS == 32 else 2) * W  # query rows of a panel: KEYS * PANEL / W accumulators
ROWS = 8 if REGISTERS == 32 else 4  # query rows of a gemm_values block, over up to 3 vectors of columns
WHOLE_ROWS = max(W, ROWS)  # query rows are padded to whole vectors and whole blocks


# Products from scratch memory. C is added last: summing in short runs rounds less.


def by_fours(e: Emit, count: Value, step: Callable[[Value], None]) -> None:
    """`step(i)` for all i below `count`, unrolled by four with AVX-512; NEON would spill.

    The branch predictor foresees the end of a loop of 24 or 32 iterations, not of 96 or 128. Gain: cpu/unroll in
    benchmarks/cpu/LOG.md.
    """
    b = e.builder
    if W != 16:
        with e.loop(count) as i:
            step(i)
        return
    whole = b.mul(b.sdiv(count, e.i64(4)), e.i64(4))
    with e.loop(whole, 4) as i:
        for n in range(4):
            step(b.add(i, e.i64(n)))
    with e.loop(b.sub(count, whole)) as i:
        step(b.add(i, whole))


def products(
    e: Emit,
    rows: int,
    element: Callable[[int, Value], Value],
    b: Value,
    width: Value,
    depth: Value,
    vectors: int,
    fma: Callable[[Value, Value, Value], Value] | None = None,
) -> list[list[Var]]:
    """A[rows, depth] B[depth, vectors * W]: sums [row][vector]. A is `element(i, k)`; a row of B is `width` floats.

    `fma(a, b, c)` is a * b + c, of float32 if not given.
    """
    fma = fma or e.fma
    sums = [[e.var(e.zeros) for _ in range(vectors)] for _ in range(rows)]

    def step(k: Value) -> None:
        start = e.builder.mul(k, width)
        columns = [e.load(b, e.builder.add(start, e.i64(j * W))) for j in range(vectors)]
        for i in range(rows):
            value = e.splat(element(i, k))
            for j in range(vectors):
                sums[i][j].set(fma(value, columns[j], sums[i][j].get()))

    by_fours(e, depth, step)
    return sums


def dot_products(e: Emit, keys: Value, offset: Value, q: Value, depth: Value, vectors: int) -> list[list[Var]]:
    """K[KEYS, depth] Q^T[depth, vectors * W] of listed rows from `offset` bytes on: [key][vector] of sums."""
    rows = [e.builder.add(e.load_scalar(keys, i, I64), offset) for i in range(KEYS)]
    return products(e, KEYS, lambda i, d: e.load_scalar(rows[i], d, F32), q, e.i64(PANEL), depth, vectors)


def _gemm_keys(vectors: int) -> Any:
    @microkernel("iiiii")
    def gemm(e: Emit, keys: Value, offset: Value, q: Value, s: Value, depth: Value) -> None:
        """s[KEYS, rows] = K[KEYS, depth] Q^T[depth, PANEL], or += if `offset`, the bytes into K's rows, is not 0."""
        b = e.builder
        sums = dot_products(e, keys, offset, q, depth, vectors)
        first = b.icmp_signed("==", offset, e.i64(0))
        for i in range(KEYS):
            for j in range(vectors):
                at = i * PANEL + j * W
                before = b.select(first, e.zeros, e.load(s, at))
                e.store(b.fadd(before, sums[i][j].get()), s, at)

    return gemm


def _gemm_values(vectors: int) -> Any:
    @microkernel("iiiiii")
    def gemm(e: Emit, p: Value, v: Value, acc: Value, width: Value, alphas: Value, depth: Value) -> None:
        """acc[ROWS, vectors * W] = alphas[ROWS] * acc + P^T[depth, ROWS]^T V[depth, vectors * W].

        A row of acc has `width` floats.
        """
        b = e.builder

        def weight(i: int, k: Value) -> Value:
            return e.load_scalar(p, b.add(b.mul(k, e.i64(PANEL)), e.i64(i)), F32)

        sums = products(e, ROWS, weight, v, e.i64(vectors * W), depth, vectors)
        for i in range(ROWS):
            rescale = e.splat(e.load_scalar(alphas, i, F32))
            for j in range(vectors):
                at = b.add(b.mul(width, e.i64(i)), e.i64(j * W))
                e.store(e.fma(e.load(acc, at), rescale, sums[i][j].get()), acc, at)

    return gemm


gemm_keys_1, gemm_keys_2, gemm_keys_3, gemm_keys_all = (_gemm_keys(n) for n in (1, 2, 3, PANEL // W))
gemm_values_1, gemm_values_2, gemm_values_3 = (_gemm_values(n) for n in (1, 2, 3))


def _pack(vectors: int) -> Any:
    @microkernel("iiii>f")
    def pack(e: Emit, to: Value, rows: Value, start: Value, count: Value) -> Value:
        """Packs columns `start` to `start + vectors * W` of listed float32 rows. NaN if one is not finite."""
        b = e.builder
        check = e.var(e.zeros)
        with e.loop(count) as k:
            source = e.load_scalar(rows, k, I64)
            for j in range(vectors):
                x = e.load(source, b.add(start, e.i64(j * W)))
                e.store(x, to, b.add(b.mul(k, e.i64(vectors * W)), e.i64(j * W)))
                check.set(e.fma(x, e.zeros, check.get()))
        return e.reduce(check.get(), b.fadd)

    return pack


pack_1, pack_2, pack_3 = (_pack(n) for n in (1, 2, 3))
