"""The five products of a tile of the backward pass, over the micro-kernels of a GEMM policy (`gemm/backward.py`)."""

# mypy: ignore-errors
from __future__ import annotations

from collections import namedtuple

import numpy as np

from ..codegen.load_store import get_i64
from ..codegen.numba_ops import ONE, policy_jit
from ..codegen.vector import W
from ..gemm.backward import VECTORS
from ..gemm.fp32 import KEYS, PANEL, ROWS
from .prefill_fp32 import DOT_LENGTH, strip_vectors
from .rows import seen_by_some

# A policy: loads K and V of a block, and Q and dO of a tile; computes P and dS in one step if it can, else s and dP;
# packs P and dS for products; adds to dV, dK and dQ
Policy = namedtuple("Policy", "name load_keys load_rows cells dots pack_cells add_values add_keys add_queries")


def blocked_products(suffix, rows_kernels, columns_kernels, numbers):
    """`multiply`, `dot_rows`, `add_to_keys`, `add_to_rows` by these kernels.

    A 32-bit unit of A and B holds `numbers` numbers.
    """
    rows_1, rows_2, rows_3, rows_4 = rows_kernels
    columns_1, columns_2, columns_3 = columns_kernels
    PER = np.int64(numbers)

    @policy_jit(suffix)
    def multiply(a, lda, b, ldb, c, ldc, depth, accumulate, vectors):
        """C[KEYS, vectors * W] += A[KEYS, depth] B."""
        if vectors == 1:
            rows_1(a, lda, b, ldb, c, ldc, depth, accumulate)
        elif vectors == 2:
            rows_2(a, lda, b, ldb, c, ldc, depth, accumulate)
        elif vectors == 3:
            rows_3(a, lda, b, ldb, c, ldc, depth, accumulate)
        else:
            rows_4(a, lda, b, ldb, c, ldc, depth, accumulate)

    @policy_jit(suffix)
    def dot_rows(t, keys, panels, to, ld, count, width, depth):
        """s [count, ld] = K Q^T, or dP = V dO^T, for rows that see any key of a block.

        `width` (of a row of K or V) and `depth` are in units.
        """
        for d in range(0, depth, DOT_LENGTH):
            for panel in range(0, ld, PANEL):
                for k in range(0, count, KEYS):
                    first = max(panel, get_i64(t.first_row + 8 * (k // KEYS)) // W * W)
                    last = min(panel + PANEL, get_i64(t.last_row + 8 * (k // KEYS)))
                    if first < last:
                        a = keys + 4 * (k * width + d)
                        b = panels + 4 * (panel * width + d * PANEL + first - panel)
                        c = to + 4 * (k * ld + first)
                        n = (last - first + W - 1) // W
                        multiply(a, width, b, PANEL, c, ld, min(DOT_LENGTH, depth - d), d, n)

    @policy_jit(suffix)
    def add_to_keys(t, cells, ld, rows, to, count, width):
        """dV [count, width] += P dO, or dK += dS Q."""
        c = 0
        while c < width:
            left = (width - c) // W
            n = min(left, VECTORS)
            if left == VECTORS + 1 and VECTORS > 2:
                n = VECTORS - 1
            for k in range(0, count, KEYS):
                first, last = get_i64(t.first_row + 8 * (k // KEYS)), get_i64(t.last_row + 8 * (k // KEYS))
                if first < last:
                    a, b = cells + 4 * ((k * ld + first) // PER), rows + 4 * (first // PER * width + c)
                    depth = (last - first) // PER
                    multiply(a, ld // PER, b, width, to + 4 * (k * width + c), width, depth, ONE, n)
            c += n * W

    @policy_jit(suffix)
    def add_to_rows(t, tile, cells, ld, keys, to, R, D, most):
        """dQ [R, D] += dS^T K, for each block of rows over the keys that any of them sees, `most` units at a time."""
        c = 0
        while c < D:
            n = strip_vectors((D - c) // W)
            for i in range(0, R, ROWS):
                lo, hi = seen_by_some(t, i, i + ROWS)
                end = (hi - tile.start + PER - 1) // PER
                for k in range((lo - tile.start) // PER, end, most):
                    a, b, sums = cells + 4 * (k * ld + i), keys + 4 * (k * D + c), to + 4 * (i * D + c)
                    depth = min(most, end - k)
                    if n == 1:
                        columns_1(a, ld, b, D, sums, D, depth)
                    elif n == 2:
                        columns_2(a, ld, b, D, sums, D, depth)
                    else:
                        columns_3(a, ld, b, D, sums, D, depth)
            c += n * W

    return multiply, dot_rows, add_to_keys, add_to_rows
