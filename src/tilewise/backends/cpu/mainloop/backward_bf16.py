"""The bf16 policy of the backward pass, for AVX-512 BF16: P and dS are rounded to bf16, sums are float32.

Operands hold pairs of bf16 numbers, adjacent in depth, in 32 bits:

    K, V   [keys, D]           as stored                      Q^T, dO^T   [D / 2, PANEL] pairs in panels
    P, dS  [keys, rows]        rounded in place               Q, dO       [rows / 2, D] pairs of rows
    dS     [keys / 2, rows]    pairs of keys, behind P        K           [keys / 2, D] pairs of keys
"""

# mypy: ignore-errors
from __future__ import annotations

from ..codegen import dtypes
from ..codegen.load_store import clear, get_f32, get_i64, get_one, put_one
from ..codegen.numba_ops import INF, ONE, ZERO, F, jit, up
from ..codegen.vector import W
from ..gemm.backward import gemm_columns_bf16, gemm_rows_bf16
from ..gemm.fp32 import KEYS, PANEL
from ..kv_access import key_source, list_rows, query_row, sequence, value_source
from .backward_cells import (
    copy_16,
    ds_of_dots,
    pair_cells,
    pair_rows,
    pair_rows_finite,
    probs_full,
    probs_masked,
    probs_of_dots,
    round_cells,
)
from .backward_fp32 import dout_at, transpose_rows
from .backward_products import Policy, blocked_products
from .backward_selected import has_several_lists
from .dropout import has_dropout
from .mods import mods_apply
from .prefill_fp32 import DOT_LENGTH
from .rows import sees_all
from .scores import bias_scores, scale_in_softmax, softmax_scale

multiply, dot_rows, add_to_keys, add_to_rows = blocked_products("bf16", gemm_rows_bf16, gemm_columns_bf16, 2)


@jit
def units(width):
    """Pairs of a row, in whole vectors."""
    return up(width, 2 * W) // 2


@jit
def copy_row(to, source, width):
    """Copies a bf16 row, with zeros up to whole vectors of pairs."""
    whole = width // W * W
    copy_16(to, source, whole)
    for i in range(whole, 2 * units(width)):
        put_one(to, dtypes.BF16, i, get_one(source, dtypes.BF16, i) if i < width else F(0))


@jit
def copy_keys(p, t, x, at, to, start, count):
    """Copies rows of K or V, with zeros up to a whole block."""
    list_rows(p, x, at, t.table, start, count, ONE)
    for j in range(count):
        copy_row(to + 4 * j * units(x.width), get_i64(t.table + 8 * j), x.width)
    clear(to + 4 * count * units(x.width), (up(count, KEYS) - count) * units(x.width))


@jit
def load_keys_bf16(p, t, at, start, count):
    """Loads K and V of a block. Returns K in pairs, with non-finite values replaced by 0."""
    D, n = up(p.head_dim, W), units(p.head_dim)
    copy_keys(p, t, value_source(p), at, t.values, start, count)
    copy_keys(p, t, key_source(p), at, t.keys, start, count)
    for j in range(0, up(count, KEYS), 2):
        pair_rows_finite(t.finite_keys + 4 * (j // 2) * D, t.keys + 4 * j * n, t.keys + 4 * (j + 1) * n, D)
    return t.finite_keys


@jit
def load_rows_bf16(p, g, t, tile, R):
    """Loads Q and dO of a tile, in panels and in pairs of rows. Rows that see nothing are zeros."""
    D, Dv, q_units, dout_units = up(p.head_dim, W), up(p.value_dim, W), units(p.head_dim), units(p.value_dim)
    q_start, n, rows = sequence(p, tile.b)[0], tile.rows, up(R, W)
    q_rows, dout_rows = t.q_rows + 2 * rows * D, t.dout_rows + 2 * rows * Dv
    for r in range(rows):
        q_row, dout_row = q_rows + 4 * r * q_units, dout_rows + 4 * r * dout_units
        if r >= R or abs(get_f32(t.m + 4 * r)) == INF:
            clear(q_row, q_units)
            clear(dout_row, dout_units)
        else:
            copy_row(q_row, query_row(p, tile, q_start, r // n, r % n), p.head_dim)
            copy_row(dout_row, dout_at(p, g, tile, q_start, r // n, r % n), p.value_dim)
    transpose_rows(t.q, q_rows, R, q_units)
    transpose_rows(t.dout, dout_rows, R, dout_units)
    for r in range(0, rows, 2):  # non-finite values in Q are replaced by 0: such a row has lse NaN
        x, y = q_rows + 4 * r * q_units, dout_rows + 4 * r * dout_units
        pair_rows_finite(t.q_rows + 2 * r * D, x, x + 4 * q_units, D)
        pair_rows(t.dout_rows + 2 * r * Dv, y, y + 4 * dout_units, Dv)


@jit
def dots_bf16(p, t, tile, R, ld, count):
    """Computes s and dP, [count, R]. Returns the factor that scores still need (`softmax_scale`)."""
    n = units(p.head_dim)
    dot_rows(t, t.keys, t.q, t.s, ld, count, n, n)
    n = units(p.value_dim)
    dot_rows(t, t.values, t.dout, t.ds, ld, count, n, n)
    return softmax_scale(p)


@jit
def ds_pairs(t, ld, count):
    """The address of dS in pairs of keys, behind P."""
    return t.s + 2 * up(count, KEYS) * ld


@jit
def pack_cells_bf16(t, ld, count):
    """Rounds P and dS in place, and packs dS in pairs of keys. Padding keys are 0."""
    round_cells(t.s, t.s, up(count, KEYS) * ld)
    for k in range(0, count, 2):
        x = t.ds + 4 * k * ld
        pair_cells(ds_pairs(t, ld, count) + 2 * k * ld, x, x + 4 * ld, ld)
    round_cells(t.ds, t.ds, up(count, KEYS) * ld)


@jit
def cells_bf16(p, t, tile, R, ld, count):
    """P and dS of scores that the softmax scales, KEYS keys and a panel of rows at a time, in the form of `pack_cells`;
    no float32 tile is stored. False for other scores.
    """
    D, Dv = units(p.head_dim), units(p.value_dim)
    if not scale_in_softmax(p) or p.mask != 0 or p.tree != 0 or max(D, Dv) > DOT_LENGTH:
        return False
    if mods_apply(p, get_i64(t.mod_state)) or has_several_lists(p, tile) or has_dropout(p):
        return False
    for panel in range(0, ld, PANEL):
        q, dout = t.q + 4 * panel * D, t.dout + 4 * panel * Dv
        for k in range(0, count, KEYS):
            key, at = tile.start + k, k * ld + panel
            probs, ds, pairs = t.s + 2 * at, t.ds + 2 * at, ds_pairs(t, ld, count) + 2 * k * ld + 4 * panel
            if k + KEYS <= count and sees_all(t, panel, panel + PANEL, key, key + KEYS):
                probs_of_dots(t.keys + 4 * k * D, D, q, D, t.m + 4 * panel, softmax_scale(p), t.dcap, probs, ld)
                ds_of_dots(t.values + 4 * k * Dv, Dv, dout, Dv, t.l + 4 * panel, t.dcap, ds, pairs, ld)
                continue
            first = max(panel, get_i64(t.first_row + 8 * (k // KEYS)) // W * W)
            last = min(panel + PANEL, get_i64(t.last_row + 8 * (k // KEYS)))
            if first >= last:
                continue
            n, from_panel = (last - first + W - 1) // W, first - panel
            s, dp = t.dcap + 4 * from_panel, t.dcap + 4 * (KEYS * PANEL + from_panel)  # [KEYS, PANEL]
            multiply(t.keys + 4 * k * D, D, q + 4 * from_panel, PANEL, s, PANEL, D, ZERO, n)
            multiply(t.values + 4 * k * Dv, Dv, dout + 4 * from_panel, PANEL, dp, PANEL, Dv, ZERO, n)
            for i in range(0, n * W, W):
                m, l, here = t.m + 4 * (first + i), t.l + 4 * (first + i), min(KEYS, count - k)
                if bias_scores(p, t, tile, s + 4 * i, PANEL, first + i, R, key, here):
                    probs_masked(s + 4 * i, dp + 4 * i, PANEL, here, m, l, softmax_scale(p))
                else:
                    probs_full(s + 4 * i, dp + 4 * i, PANEL, here, m, l, softmax_scale(p))
            for i in range(0, KEYS, 2):
                x, to = 4 * i * PANEL, i * ld + from_panel
                for j in range(2):
                    round_cells(probs + 2 * (to + j * ld), s + x + 4 * j * PANEL, n * W)
                    round_cells(ds + 2 * (to + j * ld), dp + x + 4 * j * PANEL, n * W)
                pair_cells(pairs + 2 * i * ld + 4 * from_panel, dp + x, dp + x + 4 * PANEL, n * W)
    return True


@jit
def add_values_bf16(p, t, ld, count):
    """dV [count, Dv] += P dO."""
    add_to_keys(t, t.s, ld, t.dout_rows, t.dv, count, up(p.value_dim, W))


@jit
def add_keys_bf16(p, t, ld, count):
    """dK [count, D] += dS Q."""
    add_to_keys(t, t.ds, ld, t.q_rows, t.dk, count, up(p.head_dim, W))


@jit
def add_queries_bf16(p, t, tile, ld, finite_keys, sums, R):
    """dQ [R, D] += dS^T K."""
    cells = ds_pairs(t, ld, tile.end - tile.start)
    add_to_rows(t, tile, cells, ld, finite_keys, sums, R, up(p.head_dim, W), p.tile_keys)


BF16 = Policy(
    "bf16",
    load_keys_bf16,
    load_rows_bf16,
    cells_bf16,
    dots_bf16,
    pack_cells_bf16,
    add_values_bf16,
    add_keys_bf16,
    add_queries_bf16,
)
