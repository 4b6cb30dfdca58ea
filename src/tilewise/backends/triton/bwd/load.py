"""Loads and stores of the backward kernels: tiles of rows in chunks of columns, and per-row values."""

import triton.language as tl

import triton

from ..epilogue import store_acc
from ..kv_load import load_chunk, work_type
from ..mask import load_cells


@triton.constexpr_function
def q_of(spec):
    return spec.q


@triton.constexpr_function
def k_of(spec):
    return spec.k


@triton.constexpr_function
def v_of(spec):
    return spec.v


@triton.constexpr_function
def dout_of(spec):
    return spec.dout


@triton.jit
def load_tile(base, start, stride, ok, OP: tl.constexpr, S: tl.constexpr, MASKED: tl.constexpr):
    """Loads rows `start ..` of a tensor, as many as `ok` has, as chunks [N, W]; rows that are not `ok` give 0.

    With `S.reload` it only returns their location: each product loads its chunks, one at a time.
    """
    N: tl.constexpr = ok.shape[0]
    rows = (tl.cast(start, tl.int64) * stride, tl.arange(0, N).to(tl.int64) * stride)
    if S.reload:
        tile = (base, rows, ok)
    else:
        tile = ()
        for i in tl.static_range(len(OP.widths)):
            tile = tile + (load_chunk(base, rows, ok, i, OP, MASKED, False),)
    return tile


@triton.jit
def store_tile(base, start, stride, ok, acc, scale, OP: tl.constexpr):
    """Stores chunks [N, W] times a scale to rows `start ..` that are `ok`, in the pointer's type."""
    at = base + (tl.cast(start, tl.int64) + tl.arange(0, ok.shape[0])) * stride  # [N]
    scaled = ()
    for i in tl.static_range(len(acc)):
        scaled = scaled + (acc[i] * scale,)
    store_acc(at, scaled, ok, OP, False)


@triton.jit
def load_columns(tile, column, W: tl.constexpr, OP: tl.constexpr):
    """Loads W columns of a tile that is not kept."""
    base, rows, ok = tile
    first, each = rows
    d = column + tl.arange(0, W)
    inside = ok[:, None] & (d < OP.columns)[None, :]
    return tl.load((base + first) + (each[:, None] + d[None, :]), mask=inside, other=0.0).to(work_type(OP))


@triton.jit
def load_bias(at, n, stride_k, ok, S: tl.constexpr):
    """Loads cells of a float mask, `n` keys from pointers `at`: one of them is a column. Nothing waits for them yet."""
    read = tl.full(ok.shape, 1, tl.int1)
    if S.tail or S.tail_q:
        read = ok
    return load_cells(at + n.to(tl.int64) * stride_k, read, S)


@triton.jit
def row_offsets(stride, S: tl.constexpr):
    """Offsets of BQ rows from the first."""
    each = tl.arange(0, S.BQ)
    if not S.near:
        each = each.to(tl.int64)
    return each * stride


@triton.jit
def load_rows(first, ok, LSE, lse_l, DELTA, S: tl.constexpr, MASKED: tl.constexpr):
    """lse and delta of BQ queries from row `first` on."""
    first = tl.cast(first, tl.int64)
    lse_at = (LSE + first * lse_l) + row_offsets(lse_l, S)
    delta_at = (DELTA + first) + tl.arange(0, S.BQ)
    if MASKED:
        lse = tl.load(lse_at, mask=ok, other=0.0)
        delta = tl.load(delta_at, mask=ok, other=0.0)
    else:
        lse = tl.load(lse_at)
        delta = tl.load(delta_at)
    if S.partial:
        lse = tl.where(lse == float("-inf"), 0.0, lse)  # fully masked: -inf - -inf would be NaN
    return lse, delta


@triton.jit
def load_numbers(X, row, stride, ok, MASKED: tl.constexpr):
    """Loads one number for each row."""
    at = X + row.to(tl.int64) * stride
    if MASKED:
        x = tl.load(at, mask=ok, other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def row_biases(X, row, stride, ok, S: tl.constexpr):
    """Biases of queries `row` [BQ]; 0 without `q_bias`."""
    x = tl.zeros(row.shape, tl.float32)
    if S.q_bias:
        x = load_numbers(X, row, stride, ok, True)
    return x


@triton.jit
def tree_rows(TREE, b, tree_b, row, stride, S: tl.constexpr):
    """Pointers to the rows of a tree mask; without one, row indices as a placeholder."""
    at = row
    if S.tree:
        at = TREE + tl.cast(b, tl.int64) * tree_b + row.to(tl.int64) * stride
    return at


@triton.jit
def mask_rows(MASK, first, stride_q, S: tl.constexpr):
    """Pointers to a mask's BQ rows from row `first` on; without a mask, row indices as a placeholder."""
    at = tl.arange(0, S.BQ)
    if S.mask != "":
        at = (MASK + tl.cast(first, tl.int64) * stride_q) + row_offsets(stride_q, S)
    return at
