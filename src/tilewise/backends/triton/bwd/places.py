"""The work of a backward program: its sequence, its head, its tile."""

import triton.language as tl

import triton

from ..mask import find_sequence


@triton.jit
def tile_of(pid, tiles, planes, swizzle):
    """The plane and tile of a program. Within an L2 swizzle group, the first tiles of all its planes come first."""
    first = pid // (swizzle * tiles) * swizzle
    width = tl.minimum(swizzle, planes - first)
    rank = pid % (swizzle * tiles)
    return first + rank % width, rank // width


@triton.jit
def packed_tile(pid, CU, heads, batch, total, B: tl.constexpr):
    """Packed sequences: a program's head, tile and sequence, the first row and number of rows there, and `owned`.

    Rows past the last sequence belong to none: their sequence is the last one, and `owned` is false.
    """
    tile = pid // heads
    b = find_sequence(CU, tile, batch, B)
    first = tl.load(CU + b)
    owned = b < batch
    rows = tl.where(owned, tl.load(CU + b + 1, mask=owned, other=0), total) - first
    return pid % heads, tile - (first // B + b), tl.minimum(b, batch - 1), first, rows, owned


@triton.jit
def sequence(b, CU_Q, CU_K, KV_LENGTHS, Q_OFFSET, q_len, kv_len, q_offset, S: tl.constexpr):
    """Of batch row `b`: first row in q, number of rows, first row in k, number of keys, first query position."""
    q_start = b * 0
    kv_start = b * 0
    n_keys = kv_len
    if S.varlen:
        q_start = tl.load(CU_Q + b)
        q_len = tl.load(CU_Q + b + 1) - q_start
        kv_start = tl.load(CU_K + b)
        n_keys = tl.load(CU_K + b + 1) - kv_start
    if S.rules.lengths:
        n_keys = tl.load(KV_LENGTHS + b)
    offset = q_offset
    if S.rules.offset == "rows":
        offset = tl.load(Q_OFFSET + b)
    if S.rules.offset == "end":
        offset = n_keys - q_len
    return tl.cast(q_start, tl.int64), q_len, tl.cast(kv_start, tl.int64), n_keys, offset


@triton.jit
def plane(X, b, head, start, x_b, x_h, x_l, S: tl.constexpr):
    """The first row of a sequence and head in a tensor [B, H, L, ...] or, packed, [1, H, T, ...]."""
    at = X + tl.cast(head, tl.int64) * x_h + start * x_l
    if not S.varlen:
        at += tl.cast(b, tl.int64) * x_b
    return at


@triton.jit
def wide_strides(b, h, l, S: tl.constexpr):
    """Strides of a tensor in elements; the product with `grain` shows Triton their alignment."""
    return b * S.grain, h * S.grain, l * S.grain


@triton.jit
def row_plane(X, b, head, start, heads, rows, S: tl.constexpr):
    """The same in a contiguous tensor [B, heads, rows]."""
    return plane(X, b, head, start, tl.cast(heads, tl.int64) * rows, rows, 1, S)


@triton.jit
def mask_plane(X, b, head, x_b, x_h, S: tl.constexpr):
    """The first cell of a batch row and head in a mask."""
    if S.mask_group > 1:
        head = head // S.mask_group
    return X + tl.cast(b, tl.int64) * x_b + tl.cast(head, tl.int64) * x_h


@triton.jit
def listed_tiles(LIST, RANK, b, head, tile, list_b, list_h, list_q, list_n, first_t, last_t, S: tl.constexpr):
    """Pointer to the block-sparsity list of `tile`, and the range of its entries for tiles `first_t .. last_t`."""
    if S.mask_group > 1:
        head = head // S.mask_group
    at = tl.cast(b, tl.int64) * list_b + tl.cast(head, tl.int64) * list_h + tl.cast(tile, tl.int64) * list_q
    ranks = RANK + at * (list_n + 1)
    return LIST + at * list_n, tl.load(ranks + first_t), tl.load(ranks + last_t)
