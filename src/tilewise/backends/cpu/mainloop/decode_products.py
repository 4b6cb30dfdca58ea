"""Q K^T and P V of a decode tile, by the GEMV for their storage (fp32, AMX, AVX-512 BF16, VNNI, sdot)."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from ..codegen.calls import call_matrix, call_pv, call_qk
from ..codegen.load_store import clear, copy_checked, row_times, transpose
from ..codegen.numba_ops import ONE, ZERO, jit, up
from ..codegen.prefetch import prefetch_rows
from ..codegen.vector import W
from ..gemm.fixed_point import pack_weights
from ..gemm.gemv_bf16 import block_rows, pack_pairs
from ..kv_access import KEY_PAD, query_row
from ..scratch import CHUNK, SCORES

FOUR = np.int64(4)
MATRIX_ROWS, MATRIX_KEYS = np.int64(16), np.int64(32)  # of AMX: query rows; keys, and elements, of a block
HEAD_BYTES = np.int64(4096)  # of one head's keys at a time


@jit
def pack_queries(p, t, item, q_start, R):
    """Packs bf16 queries in pairs for AMX, [D / 32, 16 pairs, 16 rows], or for `gemv_bf16.py`."""
    words = p.head_dim // 2
    if p.bf16_dot:
        r = 0
        while r < R:
            n = block_rows(R - r)
            for i in range(r, r + n):
                row = query_row(p, item, q_start, i // item.rows, i % item.rows)
                pack_pairs(t.packed + 4 * r * words, row, i - r, n, words)
            r += n
        return
    clear(t.keys, MATRIX_ROWS * words)
    for r in range(R):
        copy_checked(t.keys + 4 * r * words, query_row(p, item, q_start, r // item.rows, r % item.rows), words)
    for d in range(0, words, W):
        transpose(t.packed + 4 * d * W, W, t.keys + 4 * d, words)


@jit
def multiply_keys(p, t, qk, q, ldq, R, count, pad, width, keys, distance, tiled):
    """s [R, count] = q k^T, the first `tiled` keys by `matrix_qk`; prefetches V's first rows."""
    prefetch_rows(t.v_table, min(p.prefetch_distance, count), p.v_row)
    if tiled:
        steps = p.head_dim // MATRIX_KEYS
        call_matrix(p.matrix_qk, t.s, SCORES, R, t.k_table, tiled, t.packed, steps, t.keys, t.nonfinite, distance)
    if tiled < count:
        n, rows, s, scales = up(count - tiled, pad), t.k_table + 8 * tiled, t.s + 4 * tiled, t.k_scales
        call_qk(qk, q, ldq, R, rows, n, width, s, SCORES, scales, keys, p.k_group, distance)


@jit
def value_distance(p):
    """Rows of V to prefetch ahead; 0 if V is in K."""
    return p.prefetch_distance if p.v_row else ZERO


@jit
def scale_weights(p, t, R, j, n, keys):
    """Weights of `n` keys from j on with V's scales folded in: [groups, R, CHUNK]."""
    groups = (p.value_dim + p.v_group - 1) // p.v_group
    vectors = up(n, W) // W
    for g in range(groups):
        for r in range(R):
            to, scales = t.weights + 4 * (g * R + r) * CHUNK, t.v_scales + 4 * (g * keys + j)
            row_times(to, t.s + 4 * (r * SCORES + j), scales, vectors)


@jit
def quantise_weights(p, t, R, count, keys):
    """Weights with V's scales folded in, as fixed-point limbs [groups, R, SCORES]; False if out of range."""
    for g in range((p.value_dim + p.v_group - 1) // p.v_group):
        for r in range(R):
            to, scales = t.weights + 4 * (g * R + r) * SCORES, t.v_scales + 4 * g * keys
            if not pack_weights(to, t.s + 4 * r * SCORES, scales, up(count, W), SCORES):
                return False
    return True


@jit
def add_values(p, t, pv, R, count, width, Dv, keys, scaled, distance, tiled):
    """acc [R, Dv] += p v, the first `tiled` keys by `matrix_pv`, others in chunks: short sums round less."""
    if tiled:
        call_matrix(p.matrix_pv, t.acc, Dv, t.s, SCORES, R, t.v_table, tiled, t.values, t.nonfinite, distance)
    if scaled and p.dot_pv and quantise_weights(p, t, R, count, keys):  # exact sums
        fours = up(count, FOUR)
        weights = t.weights
        call_pv(p.dot_pv, t.acc, Dv, R, t.v_table, fours, width, weights, SCORES, R * SCORES, p.v_group, distance)
        return
    step = keys_of_head(p) if p.table and not scaled else CHUNK  # as in `decode_head_batch`
    for j in range(tiled, count, step):
        n = min(step, count - j)
        if scaled:
            scale_weights(p, t, R, j, n, keys)
            call_pv(pv, t.acc, Dv, R, t.v_table + 8 * j, n, width, t.weights, CHUNK, R * CHUNK, p.v_group, distance)
        else:
            call_pv(pv, t.acc, Dv, R, t.v_table + 8 * j, n, width, t.s + 4 * j, SCORES, ZERO, ONE, distance)


@jit
def in_place_qk(p, t, D):
    """The function that multiplies keys in place, its queries, the length of their rows, and its width."""
    if p.qk_bf16_dot:
        return p.qk_bf16_dot, t.packed, D // 2, p.head_dim // 2
    return p.qk, t.q, D, p.head_dim


@jit
def keys_of_head(p):
    """Keys of a page that are multiplied for one head before the next head: as many as 4 KiB hold, 8 to 48."""
    return min(max(HEAD_BYTES // p.k_row // KEY_PAD * KEY_PAD, KEY_PAD), CHUNK)
