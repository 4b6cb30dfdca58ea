"""The policy of prefill by tiles of bf16, by AMX or AVX-512 BF16: query rows in panels of 32, keys and columns of V in
blocks of 32.

    s [keys, 32] = K Q^T            K and Q^T packed in tiles, in parts if they are not bf16 (`amx.py`)
    s -> P                          16 rows in a vector; written as the tiles that P V reads. For max-free rows
                                    (`max_free.py`) block by block, overlapped with the next block's scores
    acc [Dv, 32] += V^T P           V transposed once for each tile of keys

A non-finite number has no parts, and in V it must not be multiplied by the weight of a row that does not see it: it is
extracted, and added where it is seen. Items with an infinity in q or k are left to the fp32 mainloop.
"""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np

from ..codegen import dtypes
from ..codegen.load_store import clear, get_f32, get_i32, get_i64, get_one, put_f32, transpose
from ..codegen.numba_ops import INF, ONE, ZERO, F, fill, jit, policy_jit, row_to_f32, up
from ..codegen.vector import W
from ..gemm import Gemm
from ..gemm.amx import BLOCK, TILE
from ..gemm.pack_tiles import STEP, W_, pack_functions
from ..kv_access import row_address
from ..scratch import partition_tiles
from .dropout import drop_tiles, has_dropout
from .max_free import commit_row_sums_2, is_max_free_2
from .nonfinite import is_visible
from .rows import seen_by_some
from .score_mod import hide_column
from .scores import apply_score_mods, softmax_scale
from .softmax import LOG2E
from .softmax_tiles import make_max_free_products, make_online_softmax, rescale_columns


@jit
def panel_span(t, row, R, tile, end):
    """The blocks of keys of a tile that any row of a panel sees, as a range of the tile's keys; (0, 0) if none."""
    if row >= R:
        return 0, 0
    lo, hi = seen_by_some(t, row, row + BLOCK)
    lo, hi = max(lo, tile) - tile, min(hi, end) - tile
    return (lo // BLOCK * BLOCK, up(hi, BLOCK)) if lo < hi else (0, 0)


@jit
def unpack_acc(t, w, R, Dv, padded):
    """Unpacks the policy's acc [panels, 2 halves, Dv, 16] to acc [R, Dv]."""
    for row in range(0, up(R, BLOCK), W):
        for d in range(0, Dv, W):
            transpose(t.acc + 4 * (row * Dv + d), Dv, w.acc + 4 * (row * padded + d * W), W_)


@jit
def may_be_max_free(t, first, tile, end):
    """Whether a panel's rows are max-free so far (`max_free.py`), and all see a key of the tile."""
    for half in range(2):
        v = 4 * (first // W + half)
        if get_i32(t.all_lo + v) >= end or get_i32(t.all_hi + v) <= tile:
            return False
    return is_max_free_2(t.m + 4 * first) != 0


@jit
def commit_panel(t, row, u):
    """`commit_row_sums` of panel u of the two from `row` on."""
    first = row + u * BLOCK
    return commit_row_sums_2(t.row_sums + 4 * u * BLOCK, t.m + 4 * first, t.l + 4 * first, t.alpha + 4 * first) != 0


@jit
def hide_block(t, s, first, key):
    """Writes -inf to hidden scores [2 halves, 32 keys, 16] of a panel."""
    for half in range(2):
        v = first + half * W
        if get_i32(t.all_lo + 4 * (v // W)) > key or get_i32(t.all_hi + 4 * (v // W)) < key + BLOCK:
            hide_column(s + 2 * TILE * half, W, BLOCK, t.lo + 4 * v, t.hi + 4 * v, key)


def tiles_gemm(tiles):
    """The policy by these `Tiles`."""
    parts, release = tiles.parts, tiles.release
    multiply_keys, multiply_values = tiles.keys, tiles.values
    softmax_to_tiles = make_online_softmax(parts)
    gemm_keys_overlapped, exp2_last = make_max_free_products(parts, tiles.make_scores)
    pack_queries, pack_keys, pack_values = pack_functions(tiles)
    PARTS_, jit_parts = np.int64(parts), policy_jit(parts)

    @jit_parts
    def memory(p, t):
        """`TileScratch`."""
        return partition_tiles(p, t, PARTS_)

    @jit_parts
    def add_nonfinite(p, t, w, item, x, at, row, u, R, tile, k0, k1, Dv, BK):
        """acc += weight * value for non-finite values, in the rows of panel u that see them."""
        row += u * BLOCK
        for j in range(k0, k1):
            if get_i64(t.v_table + 8 * j) == 0:
                continue
            row_to_f32(
                w.rows, row_address(p, x.base, x.b, x.h, x.l, at, tile + j), x.dtype, x.width, Dv, ZERO, ZERO, ONE
            )
            pair = w.p + 2 * u * BK * BLOCK + j // BLOCK * STEP + j % BLOCK // 2 * 64 + j % 2 * 2
            for r in range(min(BLOCK, R - row)):
                if not is_visible(p, t, item, row + r, tile + j):
                    continue
                weight = F(0)
                for n in range(parts):
                    weight += get_one(pair + 4 * n * BK * BLOCK + r // W * TILE + r % W * 4, dtypes.BF16, ZERO)
                if p.mod_columns and weight == F(0):  # a function hides it
                    continue
                for d in range(x.width):
                    value = get_f32(w.rows + 4 * d)
                    if value - value != F(0):
                        cell = w.acc + 4 * (row * Dv + r // W * W * Dv + d * W + r % W)
                        put_f32(cell, get_f32(cell) + weight * value)

    @jit_parts
    def online_softmax(p, t, w, item, row, u, R, tile, k0, k1, count, Dv, BK, bound):
        """The online softmax of panel u: s [2 halves, keys, 16] to weights as tiles; rescales the accumulator."""
        if k0 >= k1:
            return
        valid_keys = min(k1, count) - k0
        for half in range(BLOCK // W):
            first, s = row + u * BLOCK + half * W, w.s + 4 * W * ((2 * u + half) * BK + k0)
            fill(s, valid_keys * W, (k1 - k0) * W, -INF)
            apply_score_mods(p, t, item, s, W_, first, R, tile + k0, valid_keys)
            pairs = w.p + 2 * u * BK * BLOCK + k0 // BLOCK * STEP + half * TILE
            m, l, alpha = t.m + 4 * first, t.l + 4 * first, t.alpha + 4 * first
            factor = softmax_scale(p) * F(LOG2E)
            if softmax_to_tiles(s, k1 - k0, m, l, alpha, factor, pairs, 4 * BK * BLOCK, bound) != F(0):
                rescale_columns(w.acc + 4 * first * Dv, Dv, alpha)

    @jit_parts
    def drop_weights(p, t, w, item, row, u, k0, k1, tile, BK):
        """Dropout of the weights of panel u."""
        for half in range(BLOCK // W if k0 < k1 else 0):
            pairs = w.p + 2 * u * BK * BLOCK + k0 // BLOCK * STEP + half * TILE
            first, blocks = row + u * BLOCK + half * W, (k1 - k0) // BLOCK
            drop_tiles(p, t, item, pairs, 4 * BK * BLOCK, PARTS_, first, tile + k0, blocks)

    @jit_parts
    def max_free_softmax(p, t, w, row, a0, a1, b0, b1, tile, end, D, BK, q_part):
        """Weights of two panels over their keys of a tile. Returns for each whether it was max-free (`max_free.py`)."""
        a = a0 < a1 and may_be_max_free(t, row, tile, end)
        b = b0 < b1 and may_be_max_free(t, row + BLOCK, tile, end)
        clear(t.row_sums, 2 * BLOCK)
        factor, part, k_part = softmax_scale(p) * F(LOG2E), 4 * BK * BLOCK, 2 * BK * D
        before, pairs, row_sums = ZERO, ZERO, ZERO
        for j in range(0, end - tile, BLOCK):
            for u in range(2):
                if not (b and b0 <= j < b1 if u else a and a0 <= j < a1):
                    continue
                first, keys = row + u * BLOCK, w.k + j // BLOCK * (D // BLOCK) * STEP
                s = w.s if before != w.s else w.s + 4 * TILE
                gemm_keys_overlapped(
                    keys, k_part, w.q + 2 * first * D, q_part, s, D // BLOCK, before, factor, pairs, part, row_sums
                )
                hide_block(t, s, first, tile + j)
                before, pairs, row_sums = s, w.p + 2 * u * BK * BLOCK + j // BLOCK * STEP, t.row_sums + 4 * u * BLOCK
        if before:
            exp2_last(before, factor, pairs, part, row_sums)
        return a and commit_panel(t, row, 0), b and commit_panel(t, row, 1)

    @jit_parts
    def weights(p, t, w, item, row, R, tile, end, unmasked, bound):
        """The weights of two panels at a time, which share a block of K in registers."""
        D, Dv, BK = up(p.head_dim, BLOCK), up(p.value_dim, BLOCK), p.tile_keys
        q_part = 2 * up(R, BLOCK) * D
        a0, a1 = panel_span(t, row, R, tile, end)
        b0, b1 = panel_span(t, row + BLOCK, R, tile, end)
        a_done = b_done = False
        if unmasked and bound > F(0):
            a_done, b_done = max_free_softmax(p, t, w, row, a0, a1, b0, b1, tile, end, D, BK, q_part)
        for j in range(min(a0, b0), max(a1, b1), BLOCK):
            keys = w.k + j // BLOCK * (D // BLOCK) * STEP
            for u in range(2):
                if not (b_done if u else a_done) and (b0 if u else a0) <= j < (b1 if u else a1):
                    q, s = w.q + 2 * (row + u * BLOCK) * D, w.s + 4 * (u * BK * BLOCK + j * W)
                    multiply_keys(keys, 2 * BK * D, q, q_part, s, 4 * W * BK, D // BLOCK)
        for u in range(2):
            if not (b_done if u else a_done):
                k0, k1 = b0 if u else a0, b1 if u else a1
                online_softmax(p, t, w, item, row, u, R, tile, k0, k1, end - tile, Dv, BK, bound)
        if has_dropout(p):
            drop_weights(p, t, w, item, row, 0, a0, a1, tile, BK)
            drop_weights(p, t, w, item, row, 1, b0, b1, tile, BK)

    @jit_parts
    def add_values(p, t, w, item, x, at, row, R, tile, end, nonfinite):
        """acc [2 panels, 2 halves, Dv, 16] += V^T P."""
        Dv, BK = up(p.value_dim, BLOCK), p.tile_keys
        v_part, p_panel = 2 * Dv * BK, 2 * BK * BLOCK
        for c in range(0, Dv, BLOCK):
            for u in range(2):
                k0, k1 = panel_span(t, row + u * BLOCK, R, tile, end)
                if k0 < k1:
                    along, steps = k0 // BLOCK * STEP, (k1 - k0) // BLOCK
                    values, pairs = w.v + 2 * c * BK + along, w.p + u * p_panel + along
                    acc = w.acc + 4 * ((row + u * BLOCK) * Dv + c * W)
                    multiply_values(values, v_part, pairs, 2 * p_panel, acc, 4 * W * Dv, steps, w.sums)
        if nonfinite:
            for u in range(2):
                k0, k1 = panel_span(t, row + u * BLOCK, R, tile, end)
                add_nonfinite(p, t, w, item, x, at, row, u, R, tile, k0, min(k1, end - tile), Dv, BK)

    @jit_parts
    def epilogue(p, t, w, R):
        """Releases the tiles and unpacks the sums."""
        release()
        unpack_acc(t, w, R, up(p.value_dim, W), up(p.value_dim, BLOCK))

    block = np.int64(BLOCK)
    return Gemm(block, 2 * block, memory, pack_queries, pack_keys, pack_values, weights, add_values, epilogue)
