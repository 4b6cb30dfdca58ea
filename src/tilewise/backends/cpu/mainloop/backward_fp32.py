"""The fp32 policy of the backward pass: all operands are converted to float32."""

# mypy: ignore-errors
from __future__ import annotations

from ..codegen import dtypes
from ..codegen.load_store import clear, get_f32, put_f32, transpose
from ..codegen.numba_ops import INF, ONE, ZERO, F, jit, row_to_f32, up
from ..codegen.vector import W
from ..gemm.backward import gemm_columns, gemm_rows
from ..gemm.fp32 import KEYS, PANEL, WHOLE_ROWS
from ..kv_access import key_source, list_rows, query_row, rows_to_f32, sequence, value_source
from .backward_cells import dot_minus, zero_nonfinite
from .backward_products import Policy, blocked_products
from .dropout import has_dropout
from .prefill_fp32 import SHORT_DOT_LENGTH, SHORT_KEYS, SHORT_ROWS
from .scores import scale_in_softmax, softmax_scale

_, dot_rows, add_to_keys, add_to_rows = blocked_products("fp32", gemm_rows, gemm_columns, 1)


@jit
def load_keys(p, t, at, start, count):
    """Loads K and V of a block as float32, with zeros up to whole blocks. Returns K without non-finite values."""
    D, Dv = up(p.head_dim, W), up(p.value_dim, W)
    v, k = value_source(p), key_source(p)
    list_rows(p, v, at, t.table, start, count, ONE)
    rows_to_f32(p, v, at, t.table, t.values, start, count, ONE)
    list_rows(p, k, at, t.table, start, count, ONE)
    bad = rows_to_f32(p, k, at, t.table, t.keys, start, count, ONE)
    padded = up(count, KEYS)
    clear(t.values + 4 * count * Dv, (padded - count) * Dv)
    clear(t.keys + 4 * count * D, (padded - count) * D)
    if bad == F(0):
        return t.keys
    zero_nonfinite(t.finite_keys, t.keys, padded * D)
    return t.finite_keys


@jit
def dout_at(p, g, tile, q_start, h, i):
    """The address of dO of query i of a tile's rows, for head h of the group."""
    head, b = tile.head * (p.heads // p.kv_heads) + h, ZERO if p.cu_q else tile.b
    return g.dout + b * g.dout_b + head * g.dout_h + (q_start + tile.row + i) * g.dout_l


@jit
def load_rows(p, g, t, tile, R):
    """Loads Q and dO of a tile as float32, as rows and as transposed panels. Rows that see nothing are zeros."""
    D, Dv = up(p.head_dim, W), up(p.value_dim, W)
    q_start = sequence(p, tile.b)[0]
    n = tile.rows
    bad = F(0)
    for r in range(up(R, WHOLE_ROWS)):
        q_row, dout_row = t.q_rows + 4 * r * D, t.dout_rows + 4 * r * Dv
        if r >= R or abs(get_f32(t.m + 4 * r)) == INF:
            clear(q_row, D)
            clear(dout_row, Dv)
            continue
        at = query_row(p, tile, q_start, r // n, r % n)
        bad += row_to_f32(q_row, at, p.q_dtype, p.head_dim, D, ZERO, ZERO, ONE)
        at = dout_at(p, g, tile, q_start, r // n, r % n)
        row_to_f32(dout_row, at, p.q_dtype, p.value_dim, Dv, ZERO, ZERO, ONE)
    transpose_rows(t.q, t.q_rows, R, D)
    transpose_rows(t.dout, t.dout_rows, R, Dv)
    if bad != F(0):  # replaced by 0: such a row has lse NaN
        zero_nonfinite(t.q_rows, t.q_rows, up(R, WHOLE_ROWS) * D)


@jit
def transpose_rows(to, rows, R, width):
    """Rows [R, width] to panels [width, PANEL]."""
    for first in range(0, up(R, WHOLE_ROWS), W):
        panel = to + 4 * (first // PANEL * PANEL * width + first % PANEL)
        for d in range(0, width, W):
            transpose(panel + 4 * d * PANEL, PANEL, rows + 4 * (first * width + d), width)


@jit
def needs_short_sums(p, tile):
    """Whether sums must be short: over few keys, and for few float32 rows, torch sums in lanes and rounds less."""
    _, q_len, _, kv_len, _ = sequence(p, tile.b)
    return kv_len <= SHORT_KEYS or (q_len <= SHORT_ROWS and p.q_dtype == dtypes.F32)


@jit
def dot_cells(keys, rows, to, ld, count, width, R, factor, minus):
    """`dot_rows` cell by cell, in float64: times `factor`, minus a number of each row, which is then set to 0."""
    for r in range(R):
        for k in range(count):
            x = dot_minus(keys + 4 * k * width, rows + 4 * r * width, width, factor, get_f32(minus + 4 * r))
            put_f32(to + 4 * (k * ld + r), x)
        put_f32(minus + 4 * r, F(0))


@jit
def cells(p, t, tile, R, ld, count):
    """Not fused: P and dS are computed from s and dP in memory."""
    return False


@jit
def dots(p, t, tile, R, ld, count):
    """Computes s and dP, [count, R]. Returns the factor that scores still need (`softmax_scale`)."""
    D, Dv, factor = up(p.head_dim, W), up(p.value_dim, W), softmax_scale(p)
    if not needs_short_sums(p, tile):
        dot_rows(t, t.keys, t.q, t.s, ld, count, D, p.head_dim)
        dot_rows(t, t.values, t.dout, t.ds, ld, count, Dv, p.value_dim)
        return factor
    if scale_in_softmax(p):
        dot_cells(t.keys, t.q_rows, t.s, ld, count, D, R, factor, t.m)
        factor = F(1)
    else:
        clear(t.distances, up(R, WHOLE_ROWS))
        dot_cells(t.keys, t.q_rows, t.s, ld, count, D, R, F(1), t.distances)
    if has_dropout(p):  # which needs delta
        clear(t.distances, up(R, WHOLE_ROWS))
        dot_cells(t.values, t.dout_rows, t.ds, ld, count, Dv, R, F(1), t.distances)
    else:
        dot_cells(t.values, t.dout_rows, t.ds, ld, count, Dv, R, F(1), t.l)
    return factor


@jit
def pack_cells(t, ld, count):
    """Nothing to pack."""


@jit
def add_values(p, t, ld, count):
    """dV [count, Dv] += P dO."""
    add_to_keys(t, t.s, ld, t.dout_rows, t.dv, count, up(p.value_dim, W))


@jit
def add_keys(p, t, ld, count):
    """dK [count, D] += dS Q."""
    add_to_keys(t, t.ds, ld, t.q_rows, t.dk, count, up(p.head_dim, W))


@jit
def add_queries(p, t, tile, ld, finite_keys, sums, R):
    """dQ [R, D] += dS^T K."""
    most = SHORT_DOT_LENGTH if needs_short_sums(p, tile) else p.tile_keys
    add_to_rows(t, tile, t.ds, ld, finite_keys, sums, R, up(p.head_dim, W), most)


FP32 = Policy("fp32", load_keys, load_rows, cells, dots, pack_cells, add_values, add_keys, add_queries)
