"""The fp32 policy of prefill: K read in place row by row, Q^T and V in panels, products in vector registers.

16-bit and quantised rows are first converted to float32 in scratch memory. A panel's scores stay in L1 or L2 between
the steps; if it sees all keys of the tile, the softmax is fused into Q K^T (`max_free.py`). Blocks and vectors of rows
are skipped where none of them sees a key.
"""

# mypy: ignore-errors
from __future__ import annotations

from ..codegen import dtypes
from ..codegen.load_store import clear, get_i64, transpose
from ..codegen.numba_ops import ONE, ZERO, F, jit, row_to_f32, up
from ..codegen.prefetch import prefetch_column
from ..codegen.vector import W
from ..gemm import Gemm, fp32
from ..gemm.fp32 import KEYS, PANEL, ROWS
from ..kv_access import list_rows, query_row, repeat_last, rows_to_f32, sequence, value_source
from ..scratch import PAD, PANEL_
from .dropout import drop_columns, has_dropout
from .max_free import commit_row_sums, exp2_rest, gemm_keys_exp2, is_max_free
from .nonfinite import DOWNSCALE, add_nonfinite, extract_nonfinite, is_downscaled
from .prefetch_tile import list_next_tile, prefetch_share
from .rows import seen_by_some, sees_all
from .score_mod import scale_cells
from .scores import apply_score_mods, softmax_scale
from .softmax import LOG2E, online_softmax_columns

DOT_LENGTH = 128  # elements of a dot product that are summed at once: longer sums round more
# Over up to 11 keys torch sums in lanes and rounds half as much as one run of FMAs (cpu/short-dots in
# benchmarks/cpu/LOG.md). So few keys are cheap, and are summed as accurately.
SHORT_KEYS, SHORT_DOT_LENGTH = 12, 16
# torch does so too for up to 3 rows of a head, over any number of keys; here rows of a group are multiplied together.
# With more keys P V dominates the error, and in wide heads a run is a small part of a dot product: neither needs this.
SHORT_ROWS = 3


@jit
def dot_length_of(p, item):
    """Elements of a dot product that are summed at once; in float32 as accurate as torch."""
    _, q_len, _, kv_len, _ = sequence(p, item.b)
    if kv_len <= SHORT_KEYS:
        return SHORT_DOT_LENGTH
    if q_len <= SHORT_ROWS and p.q_dtype == dtypes.F32 and p.head_dim <= 2 * DOT_LENGTH:
        return DOT_LENGTH // 4 if kv_len <= 512 else DOT_LENGTH // 2
    return DOT_LENGTH


@jit
def whole_memory(p, t):
    """The policy has no scratch memory of its own."""
    return t


@jit
def pack_queries(p, t, w, item, q_start, R):
    """Packs Q^T in panels, q [panels, D, PANEL].

    W float32 rows of one head are transposed from where they are, others are first copied to `acc`. Rows that are far
    apart are read a cache line at a time, while the next W rows are prefetched.
    """
    n, D = item.rows, up(p.head_dim, W)
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
                    row_to_f32(row, at, p.q_dtype, p.head_dim, D, ZERO, ZERO, ONE)
                else:
                    clear(row, D)
        panel = t.q + 4 * (first // PANEL * PANEL * D + first % PANEL)
        ahead, i = first + W, (first + W) % n
        next_rows = query_row(p, item, q_start, ahead // n, i) if in_place and ahead < R and i + W <= n else ZERO
        for d in range(0, D, W):
            if next_rows:
                prefetch_column(next_rows + 4 * d, p.q_l)
            transpose(panel + 4 * d * PANEL, PANEL, rows + 4 * d, width)
    return False


@jit
def pack_keys(p, t, w, item, x, at, tile, count, last):
    """Lists K's rows in `k_table` [keys], and the rows to prefetch.

    Unless they are float32 in one tensor, they are first converted to `keys` [keys, D].
    """
    list_rows(p, x, at, t.k_table, tile, count, PAD)
    if x.dtype != dtypes.F32 or x.shared:
        rows_to_f32(p, x, at, t.k_table, t.keys, tile, count, PAD)
    repeat_last(t.k_table, up(count, PAD), up(count, PAD) + KEYS)  # the keys of a panel need not begin at a block
    list_next_tile(p, t, x, value_source(p), at, tile + count, min(p.tile_keys, last - tile - count))
    return False


@jit
def vector_span(t, first, tile, end):
    """The first and last key that any of the W rows from `first` on sees, relative to the tile."""
    lo, hi = seen_by_some(t, first // ROWS * ROWS, up(first + W, ROWS))
    return max(lo, tile) - tile, min(hi, end) - tile


@jit
def scores(p, t, panel, panels, next_count, vectors, D, dot_length, tile, end, k0, k1):
    """s [k0..k1, PANEL] of one panel, skipping vectors of rows at its edges that see none of a block's keys."""
    q = t.q + 4 * panel * PANEL * D
    passes = (p.head_dim + dot_length - 1) // dot_length
    for n in range(passes):  # outer loop: this much of the panel stays in L1
        d = n * dot_length
        depth = min(dot_length, p.head_dim - d)
        for key in range(k0, k1, KEYS):
            prefetch_share(p, t, key, next_count, panel * passes + n, panels * passes)
            v0, v1 = 0, vectors
            while v0 < v1 and not overlaps(vector_span(t, panel * PANEL + v0 * W, tile, end), key):
                v0 += 1
            while v0 < v1 and not overlaps(vector_span(t, panel * PANEL + (v1 - 1) * W, tile, end), key):
                v1 -= 1
            a, rows, s = q + 4 * (d * PANEL + v0 * W), t.k_table + 8 * key, t.s + 4 * (key * PANEL + v0 * W)
            if v1 - v0 == 1:
                fp32.gemm_keys_1(rows, 4 * d, a, s, depth)
            elif v1 - v0 == 2:
                fp32.gemm_keys_2(rows, 4 * d, a, s, depth)
            elif v1 - v0 == 3:
                fp32.gemm_keys_3(rows, 4 * d, a, s, depth)
            elif v1 - v0 == 4:
                fp32.gemm_keys_all(rows, 4 * d, a, s, depth)


@jit
def overlaps(span, key):
    """Whether a span of keys overlaps the block of KEYS from `key` on."""
    return span[0] < key + KEYS and span[1] > key


@jit
def online_softmax(p, t, item, s, first, R, key, count, bound):
    """Turns scores s [count, PANEL] of W query rows from `first` on and keys from `key` on into weights."""
    apply_score_mods(p, t, item, s, PANEL_, first, R, key, count)
    m, l, alpha = t.m + 4 * first, t.l + 4 * first, t.alpha + 4 * first
    online_softmax_columns(s, PANEL, count, m, l, alpha, softmax_scale(p) * F(LOG2E), bound)
    if is_downscaled(t):
        scale_cells(s, PANEL_, count, DOWNSCALE)


@jit
def max_free_softmax(p, t, panel, panels, next_count, D, dot_length, start, count):
    """The weights [count, PANEL] of a panel that sees all keys of a tile from number `start` on, max-free. False if out
    of bounds.
    """
    row = panel * PANEL
    if not is_max_free(t.m + 4 * row):
        return False
    q, blocks, factor = t.q + 4 * row * D, start + count // KEYS * KEYS, softmax_scale(p) * F(LOG2E)
    clear(t.row_sums, PANEL)
    passes = (p.head_dim + dot_length - 1) // dot_length
    for n in range(passes):
        d = n * dot_length
        depth = min(dot_length, p.head_dim - d)
        for key in range(start, start + count, KEYS):
            prefetch_share(p, t, key, next_count, panel * passes + n, panels * passes)
            a, rows, s = q + 4 * d * PANEL, t.k_table + 8 * key, t.s + 4 * key * PANEL
            if n == passes - 1 and key < blocks:
                gemm_keys_exp2(rows, 4 * d, a, s, depth, factor, t.row_sums)
            else:
                fp32.gemm_keys_all(rows, 4 * d, a, s, depth)
    exp2_rest(t.s + 4 * blocks * PANEL, start + count - blocks, factor, t.row_sums)
    return commit_row_sums(t.row_sums, t.m + 4 * row, t.l + 4 * row, t.alpha + 4 * row) != 0


@jit
def strip_vectors(left):
    """Vectors of the next strip of columns, of `left` that are left: no single one is left over."""
    return 3 if left == 3 or left > 4 else min(2, left)


@jit
def pack_columns(t, count, Dv, BK):
    """Packs listed float32 rows of V in strips of columns, `packed` [strips, keys, strip]. NaN if one is not finite."""
    bad = F(0)
    c = 0
    while c < Dv:
        n = strip_vectors((Dv - c) // W)
        to = t.packed + 4 * c * BK
        if n == 1:
            bad += fp32.pack_1(to, t.v_table, c, count)
        elif n == 2:
            bad += fp32.pack_2(to, t.v_table, c, count)
        else:
            bad += fp32.pack_3(to, t.v_table, c, count)
        c += n * W
    return bad


@jit
def pack_values(p, t, w, x, at, first, count, full):
    """Packs a tile of V in strips. Extracts non-finite values if some row does not see them; returns whether it did."""
    Dv, BK = up(p.value_dim, W), p.tile_keys
    list_rows(p, x, at, t.v_table, first, count, ONE)
    if x.dtype != dtypes.F32 or x.width % W:
        rows_to_f32(p, x, at, t.v_table, t.values, first, count, ONE)
    bad = pack_columns(t, count, Dv, BK)
    if bad == F(0) or full:
        return False
    list_rows(p, x, at, t.v_table, first, count, ONE)  # again, from a copy without them
    rows_to_f32(p, x, at, t.v_table, t.values, first, count, ONE)
    extract_nonfinite(t, count, Dv)
    pack_columns(t, count, Dv, BK)
    return True


@jit
def keys_of(t, row, tile, end):
    """The keys of a tile that any row of a panel sees, in whole blocks of KEYS."""
    lo, hi = seen_by_some(t, row, row + PANEL)
    return (max(lo, tile) - tile) // KEYS * KEYS, min(hi, end) - tile


@jit
def weights(p, t, w, item, row, R, tile, end, unmasked, bound):
    """s [keys, PANEL] = softmax of one panel: max-free if it sees all keys and they are bounded, else online."""
    k0, k1 = keys_of(t, row, tile, end)
    if k0 >= k1:
        return
    dot_length = dot_length_of(p, item)
    D, panel, panels = up(p.head_dim, W), row // PANEL, (R + PANEL - 1) // PANEL
    next_count = get_i64(t.next_count)
    lo, hi = seen_by_some(t, row, row + PANEL)
    lo, hi = max(lo, tile), min(hi, end)
    full = unmasked and bound > F(0) and row + PANEL <= R and sees_all(t, row, row + PANEL, lo, hi)
    vectors = min(PANEL, up(R - row, W)) // W
    if full and max_free_softmax(p, t, panel, panels, next_count, D, dot_length, lo - tile, hi - lo):
        if has_dropout(p):
            drop_weights(p, t, item, row, vectors, tile, end)
        return
    scores(p, t, panel, panels, next_count, vectors, D, dot_length, tile, end, k0, k1)
    for c in range(vectors):
        lo, hi = vector_span(t, row + c * W, tile, end)
        if lo < hi:
            s = t.s + 4 * (lo * PANEL + c * W)
            online_softmax(p, t, item, s, row + c * W, R, tile + lo, hi - lo, bound)
    if has_dropout(p):
        drop_weights(p, t, item, row, vectors, tile, end)


@jit
def drop_weights(p, t, item, row, vectors, tile, end):
    """Dropout of the weights of one panel."""
    for c in range(vectors):
        lo, hi = vector_span(t, row + c * W, tile, end)
        if lo < hi:
            drop_columns(p, t, item, t.s + 4 * (lo * PANEL + c * W), PANEL_, row + c * W, tile + lo, hi - lo)


@jit
def add_values(p, t, w, item, x, at, row, R, tile, end, nonfinite):
    """acc [PANEL, Dv] of one panel = alpha * acc + p^T v, by blocks of ROWS rows, over the keys that one of them sees.

    All blocks of rows use a strip of V's columns before the next strip, so it stays in L1.
    """
    Dv, BK = up(p.value_dim, W), p.tile_keys
    k0, k1 = keys_of(t, row, tile, end)
    if k0 >= k1:
        return
    c = 0
    while c < Dv:
        n = strip_vectors((Dv - c) // W)
        for i in range(0, PANEL, ROWS):
            lo, hi = seen_by_some(t, row + i, row + i + ROWS)
            start, depth = max(lo - tile, k0), min(hi - tile, k1) - max(lo - tile, k0)
            if depth <= 0:
                continue
            s, acc = t.s + 4 * (start * PANEL + i), t.acc + 4 * ((row + i) * Dv + c)
            v, alphas = t.packed + 4 * (c * BK + start * n * W), t.alpha + 4 * (row + i)
            if n == 1:
                fp32.gemm_values_1(s, v, acc, Dv, alphas, depth)
            elif n == 2:
                fp32.gemm_values_2(s, v, acc, Dv, alphas, depth)
            else:
                fp32.gemm_values_3(s, v, acc, Dv, alphas, depth)
        c += n * W
    if nonfinite:
        add_nonfinite(p, t, item, row, min(PANEL, R - row), end - tile, Dv, tile, PANEL_, ONE)


@jit
def epilogue(p, t, w, R):
    """acc is in rows already."""


FP32 = Gemm(PANEL_, PANEL_, whole_memory, pack_queries, pack_keys, pack_values, weights, add_values, epilogue)
