"""Prefill: many query rows over a tile of keys, by blocked products.

Query rows stand in panels, transposed once: Q^T [D, PANEL]. For each tile of keys and each panel:

    s [keys, PANEL] = K Q^T         K read row by row in place (16-bit and quantised rows are widened first)
    s -> p                          PANEL / W columns of rows at once; maximum and sum run down the keys
    acc [ROWS, Dv] += p^T V         V copied once for each tile into panels of columns

A panel's scores stay in the L1 or L2 cache between the three steps; where it sees all keys of the tile,
the first two are fused (`max_free.py`). Panels and row-blocks are left out where none of their rows sees a key.
"""

# mypy: ignore-errors
from __future__ import annotations

from ..codegen import dtypes
from ..codegen.load_store import clear, transpose
from ..codegen.numba_ops import ONE, ZERO, F, item_at, jit, params_at, up, widen_row
from ..codegen.vector import W
from ..gemm.fp32 import (
    KEYS,
    PANEL,
    ROWS,
    gemm_keys_1,
    gemm_keys_2,
    gemm_keys_3,
    gemm_keys_all,
    gemm_values_1,
    gemm_values_2,
    gemm_values_3,
    pack_1,
    pack_2,
    pack_3,
)
from ..kv_access import key_source, list_rows, place, query_row, sequence, value_source, widen_rows
from ..scratch import PAD, PANEL_, partition
from .mask import read_states
from .max_free import commit_row_sums, exp2_rest, gemm_keys_exp2, is_max_free
from .nonfinite import DOWNSCALE, add_nonfinite, extract_nonfinite, is_downscaled
from .prefetch_tile import list_next_tile, prefetch_share
from .rows import list_spans, seen_by_all, seen_by_some, sees_all, set_up
from .score_mod import scale_cells
from .scores import max_free_bound, shape_scores, unit
from .softmax import LOG2E, online_softmax_columns

DOT_LENGTH = 128  # elements of a dot product that are summed in one go: longer sums round more
# Over up to 11 keys torch sums in lanes and rounds half as much as one run of FMAs (cpu/short-dots in
# benchmarks/cpu/LOG.md). So few keys cost little, and are summed as exactly.
SHORT_KEYS, SHORT_DOT_LENGTH = 12, 16
# So it does for up to 3 rows of a head, over any keys; here the rows of a group are multiplied together. Over more keys
# the sums of values round more, and in wide heads runs are a small part of a dot product: neither needs runs so short.
SHORT_ROWS = 3


@jit
def dot_length_of(p, q_len, kv_len):
    """Elements of a dot product that are summed in one go, of float32 as exactly as torch does it."""
    if kv_len <= SHORT_KEYS:
        return SHORT_DOT_LENGTH
    if q_len <= SHORT_ROWS and p.q_dtype == dtypes.F32 and p.head_dim <= 2 * DOT_LENGTH:
        return DOT_LENGTH // 4 if kv_len <= 512 else DOT_LENGTH // 2
    return DOT_LENGTH


@jit
def load_queries(p, t, item, q_start, R, D):
    """Q^T in panels. W float32 rows of one head are transposed where they lie, others are copied to `acc` before."""
    n = item.rows
    in_place = p.q_dtype == dtypes.F32 and p.head_dim == D and p.q_l % 4 == 0
    for first in range(0, up(R, W), W):
        rows, width = t.acc, D
        i = first % n
        if in_place and i + W <= n:
            rows, width = query_row(p, item, q_start, first // n, i), p.q_l // 4
        else:
            for r in range(first, first + W):
                row = t.acc + 4 * (r - first) * D
                if r < R:
                    at = query_row(p, item, q_start, r // n, r % n)
                    widen_row(row, at, p.q_dtype, p.head_dim, D, ZERO, ZERO, ONE)
                else:
                    clear(row, D)
        panel = t.q + 4 * (first // PANEL * PANEL * D + first % PANEL)
        for d in range(0, D, W):
            transpose(panel + 4 * d * PANEL, PANEL, rows + 4 * d, width)


@jit
def vector_span(t, first, tile, end):
    """The first and last key that some of the W rows from `first` on sees, counted from the tile's first on."""
    lo, hi = seen_by_some(t, first // ROWS * ROWS, up(first + W, ROWS))
    return max(lo, tile) - tile, min(hi, end) - tile


@jit
def scores(p, t, panel, panels, coming, vectors, D, dot_length, tile, end, k0, k1):
    """s[k0..k1] of one panel, without vectors of rows at its edges that see none of a block's keys."""
    q = t.q + 4 * panel * PANEL * D
    passes = (p.head_dim + dot_length - 1) // dot_length
    for n in range(passes):  # outside: this much of the panel stays in the L1 cache
        d = n * dot_length
        depth = min(dot_length, p.head_dim - d)
        for key in range(k0, k1, KEYS):
            prefetch_share(p, t, key, coming, panel * passes + n, panels * passes)
            v0, v1 = 0, vectors
            while v0 < v1 and not overlaps(vector_span(t, panel * PANEL + v0 * W, tile, end), key):
                v0 += 1
            while v0 < v1 and not overlaps(vector_span(t, panel * PANEL + (v1 - 1) * W, tile, end), key):
                v1 -= 1
            a, rows, s = q + 4 * (d * PANEL + v0 * W), t.k_table + 8 * key, t.s + 4 * (key * PANEL + v0 * W)
            if v1 - v0 == 1:
                gemm_keys_1(rows, 4 * d, a, s, depth)
            elif v1 - v0 == 2:
                gemm_keys_2(rows, 4 * d, a, s, depth)
            elif v1 - v0 == 3:
                gemm_keys_3(rows, 4 * d, a, s, depth)
            elif v1 - v0 == 4:
                gemm_keys_all(rows, 4 * d, a, s, depth)


@jit
def overlaps(span, key):
    return span[0] < key + KEYS and span[1] > key


@jit
def online_softmax(p, t, item, s, first, R, key, count, bound):
    """Scores of W query rows from `first` on over `count` keys from `key` on become weights."""
    shape_scores(p, t, item, s, PANEL_, first, R, key, count)
    m, l, alpha = t.m + 4 * first, t.l + 4 * first, t.alpha + 4 * first
    online_softmax_columns(s, PANEL, count, m, l, alpha, unit(p) * F(LOG2E), bound)
    if is_downscaled(t):
        scale_cells(s, PANEL_, count, DOWNSCALE)


@jit
def max_free_softmax(p, t, panel, panels, coming, D, dot_length, count):
    """s [count, PANEL] of a panel that sees all keys of a tile becomes weights, max-free. False if out of bound."""
    row = panel * PANEL
    if not is_max_free(t.m + 4 * row):
        return False
    q, blocks, factor = t.q + 4 * row * D, count // KEYS * KEYS, unit(p) * F(LOG2E)
    clear(t.row_sums, PANEL)
    passes = (p.head_dim + dot_length - 1) // dot_length
    for n in range(passes):
        d = n * dot_length
        depth = min(dot_length, p.head_dim - d)
        for key in range(0, count, KEYS):
            prefetch_share(p, t, key, coming, panel * passes + n, panels * passes)
            a, rows, s = q + 4 * d * PANEL, t.k_table + 8 * key, t.s + 4 * key * PANEL
            if n == passes - 1 and key < blocks:
                gemm_keys_exp2(rows, 4 * d, a, s, depth, factor, t.row_sums)
            else:
                gemm_keys_all(rows, 4 * d, a, s, depth)
    exp2_rest(t.s + 4 * blocks * PANEL, count - blocks, factor, t.row_sums)
    return commit_row_sums(t.row_sums, t.m + 4 * row, t.l + 4 * row, t.alpha + 4 * row) != 0


@jit
def piece(vectors):
    """How many of the vectors that are left go into one product: as many as keep the rest from being one alone."""
    return 3 if vectors == 3 or vectors > 4 else min(2, vectors)


@jit
def pack_columns(t, count, Dv, BK):
    """Listed float32 rows of V into panels of columns, [count, columns] each. Returns NaN if a value is not finite."""
    bad = F(0)
    c = 0
    while c < Dv:
        n = piece((Dv - c) // W)
        to = t.packed + 4 * c * BK
        if n == 1:
            bad += pack_1(to, t.v_table, c, count)
        elif n == 2:
            bad += pack_2(to, t.v_table, c, count)
        else:
            bad += pack_3(to, t.v_table, c, count)
        c += n * W
    return bad


@jit
def pack_values(p, t, x, at, first, count, Dv, BK, whole):
    """A tile of V into panels. Values that are not finite are taken out if a row may not see them; were there any?"""
    list_rows(p, x, at, t.v_table, first, count, ONE)
    if x.dtype != dtypes.F32 or x.width % W:
        widen_rows(p, x, at, t.v_table, t.values, first, count, ONE)
    bad = pack_columns(t, count, Dv, BK)
    if bad == F(0) or whole:
        return False
    list_rows(p, x, at, t.v_table, first, count, ONE)  # once more, from a copy without them
    widen_rows(p, x, at, t.v_table, t.values, first, count, ONE)
    extract_nonfinite(t, count, Dv)
    pack_columns(t, count, Dv, BK)
    return True


@jit
def add_values(t, first_row, tile, k0, k1, Dv, BK):
    """acc of one panel = alpha * acc + p v, by blocks of ROWS rows, over the keys that one of them sees.

    A panel of V's columns is used by all row-blocks before the next one is: it stays in the L1 cache.
    """
    c = 0
    while c < Dv:
        n = piece((Dv - c) // W)
        for i in range(0, PANEL, ROWS):
            lo, hi = seen_by_some(t, first_row + i, first_row + i + ROWS)
            start, depth = max(lo - tile, k0), min(hi - tile, k1) - max(lo - tile, k0)
            if depth <= 0:
                continue
            weights, acc = t.s + 4 * (start * PANEL + i), t.acc + 4 * ((first_row + i) * Dv + c)
            v, alphas = t.packed + 4 * (c * BK + start * n * W), t.alpha + 4 * (first_row + i)
            if n == 1:
                gemm_values_1(weights, v, acc, Dv, alphas, depth)
            elif n == 2:
                gemm_values_2(weights, v, acc, Dv, alphas, depth)
            else:
                gemm_values_3(weights, v, acc, Dv, alphas, depth)
        c += n * W


def prefill(params, scratch, address):
    """All keys of the item at `address`; m, l and acc hold the result."""
    p, item = params_at(params), item_at(address)
    t = partition(p, scratch)
    q_start, q_len, kv_start, kv_len, _ = sequence(p, item.b)
    R = p.heads // p.kv_heads * item.rows
    D, Dv, BK = up(p.head_dim, W), up(p.value_dim, W), p.tile_keys
    dot_length = dot_length_of(p, q_len, kv_len)
    k, v, at = key_source(p), value_source(p), place(p, item, kv_start)
    load_queries(p, t, item, q_start, R, D)
    first, last = set_up(p, t, item, up(R, PANEL), Dv)
    list_spans(t, up(R, PANEL))
    all_lo, all_hi = seen_by_all(t, R)
    bound = max_free_bound(p, t, kv_len)
    tile = item.start + max(0, first - item.start) // BK * BK
    while tile < last:
        end = min(tile + BK, last)
        count = end - tile
        unmasked, nothing = read_states(p, item, t.states, tile, min(tile + BK, kv_len))
        if nothing:
            tile += BK
            continue
        whole = unmasked and all_lo <= tile and all_hi >= end
        max_free = unmasked and bound > F(0)
        list_rows(p, k, at, t.k_table, tile, count, PAD)
        if k.dtype != dtypes.F32:
            widen_rows(p, k, at, t.k_table, t.keys, tile, count, PAD)
        nonfinite = pack_values(p, t, v, at, tile, count, Dv, BK, whole)
        panels = (R + PANEL - 1) // PANEL
        coming = list_next_tile(p, t, k, v, at, end, min(BK, last - end))
        for panel in range(panels):
            row = panel * PANEL
            lo, hi = seen_by_some(t, row, row + PANEL)
            k0, k1 = (max(lo, tile) - tile) // KEYS * KEYS, min(hi, end) - tile  # a block of keys is listed whole
            if k0 >= k1:
                continue
            full = max_free and row + PANEL <= R and sees_all(t, row, row + PANEL, tile, end)
            if not (full and max_free_softmax(p, t, panel, panels, coming, D, dot_length, count)):
                vectors = min(PANEL, up(R - row, W)) // W
                scores(p, t, panel, panels, coming, vectors, D, dot_length, tile, end, k0, k1)
                for c in range(vectors):
                    lo, hi = vector_span(t, row + c * W, tile, end)
                    if lo < hi:
                        online_softmax(
                            p, t, item, t.s + 4 * (lo * PANEL + c * W), row + c * W, R, tile + lo, hi - lo, bound
                        )
            add_values(t, row, tile, k0, k1, Dv, BK)
            if nonfinite:
                add_nonfinite(p, t, item, row, min(PANEL, R - row), count, Dv, tile, PANEL_, ONE)
        tile += BK
