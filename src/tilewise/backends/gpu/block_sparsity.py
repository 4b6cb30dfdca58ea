"""Block sparsity: lists the key tiles that a dense mask leaves to each tile of query rows, in one small launch.

`classify` reads every cell and gives a tile the state 0 (skip) if no cell is visible, 2 (full) if every cell is visible
and, in a float mask, exactly 0, else 1 (mixed); cells past the edges count as neither. For each plane and tile of query
rows it writes the list of tiles to visit, `LIST[i] = 2 * tile + mixed`, and `RANK[t]`, the number of them before tile
t, so that a kernel finds the entries of any range of tiles. `compact` does so with states from a `TileMap`, or with all
tiles mixed; `list_blocks` with block indices.
"""

import triton.language as tl

import triton

# For each cell type, as 32-bit words: a word of hidden cells only, and the bits that are 0 in a word of zeros.
HIDDEN = {"bool": 0, "f16": 0xFC00FC00, "bf16": 0xFF80FF80, "f32": 0xFF800000}
NONZERO = {"f16": 0x7FFF7FFF, "bf16": 0x7FFF7FFF, "f32": 0x7FFFFFFF}


@triton.constexpr_function
def signed(word):
    """The int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word


@triton.constexpr_function
def hidden_of(kind):
    return HIDDEN[kind]


@triton.constexpr_function
def nonzero_of(kind):
    return NONZERO[kind]


@triton.jit
def append(state, t, count, LIST, RANK, n):
    """Appends tiles `t` with their states to a list of `count` entries; returns the new count."""
    seen = ((state != 0) & (t < n)).to(tl.int32)
    rank = count + tl.cumsum(seen, 0) - seen
    tl.store(RANK + t, rank, mask=t < n)
    tl.store(LIST + rank, t * 2 + (state == 1).to(tl.int32), mask=seen != 0)
    return count + tl.sum(seen, 0)


@triton.jit
def count_units(rows, row_ok, first, columns, mask_k, WIDE: tl.constexpr, KIND: tl.constexpr, TAIL: tl.constexpr):
    """For each column of units [WIDE], over a tile's rows: the number of units with a visible cell, plus 2**16 for each
    unit with a cell that is hidden or, in a float mask, not 0.

    Only a TAIL may reach past the last column; elsewhere the check would prevent loads of 16 bytes.
    """
    col = first + tl.arange(0, WIDE)
    inside = row_ok[:, None]
    if TAIL:
        inside = inside & (col < columns)[None, :]  # [BQ, WIDE]
    cell = tl.load(rows[:, None] + (col.to(tl.int64) * mask_k)[None, :], mask=inside, other=0)
    if KIND == "cells":
        value = cell.to(tl.float32)
        seen = value != float("-inf")
        partial = value != 0
    elif KIND == "flags":
        seen = cell != 0
        partial = cell == 0
    elif KIND == "bool":
        seen = cell != 0
        partial = ((cell - 0x01010101) & ~cell & signed(0x80808080)) != 0  # some byte is 0
    else:
        seen = cell != signed(hidden_of(KIND))
        partial = (cell & nonzero_of(KIND)) != 0
    return tl.sum((seen & inside).to(tl.int32) + ((partial & inside).to(tl.int32) << 16), 0)


@triton.jit(do_not_specialize=["q_len", "kv_len", "heads", "tiles", "n"])
def classify(
    MASK, LIST, RANK, mask_b, mask_h, mask_q, mask_k, q_len, kv_len, heads, tiles, n,
    BQ: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr, EACH: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One program for each row of tiles, RUN of them at a time. `MASK` and its strides are in units of EACH cells:
    either a word of 32 bits holds 1, 2 or 4 cells, or MASK has the mask's own type.
    """
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % tiles
    head = pid // tiles % heads
    b = pid // tiles // heads
    row = tile * BQ + tl.arange(0, BQ)
    rows = MASK + b * mask_b + head * mask_h + row * mask_q  # [BQ]
    EACH_TILE: tl.constexpr = BK // EACH
    count = 0
    for first in range(0, n, RUN):
        if (first + RUN) * BK <= kv_len:
            counts = count_units(
                rows, row < q_len, first * EACH_TILE, kv_len // EACH, mask_k, RUN * EACH_TILE, KIND, False
            )
        else:
            counts = count_units(
                rows, row < q_len, first * EACH_TILE, kv_len // EACH, mask_k, RUN * EACH_TILE, KIND, True
            )
        counts = tl.sum(tl.reshape(counts, [RUN, EACH_TILE]), 1)  # [RUN]
        state = tl.where((counts & 0xFFFF) == 0, 0, tl.where((counts >> 16) == 0, 2, 1))
        count = append(state, first + tl.arange(0, RUN), count, LIST + pid * n, RANK + pid * (n + 1), n)
    tl.store(RANK + pid * (n + 1) + n, count)


@triton.jit(do_not_specialize=["heads", "group", "tiles", "n", "count"])
def list_blocks(
    INDICES, LIST, RANK, indices_b, indices_h, indices_l, heads, group, tiles, n, count,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program for each row of tiles lists the tiles of the blocks in `count` indices. A block has QUERIES tiles of
    queries and KEYS tiles of keys.
    """
    pid = tl.program_id(0).to(tl.int64)
    tile = pid % tiles
    head = pid // tiles % heads
    line = INDICES + pid // tiles // heads * indices_b + head // group * indices_h + tile // QUERIES * indices_l
    listed = 0
    for first in range(0, n, RUN):
        t = first + tl.arange(0, RUN)
        state = t * 0
        for i in range(0, count, CHUNK):
            at = i + tl.arange(0, CHUNK)
            index = tl.load(line + at, mask=at < count, other=-1)
            state = tl.maximum(state, tl.max((index[None, :] == (t // KEYS)[:, None]).to(tl.int32), 1))
        listed = append(state * 2, t, listed, LIST + pid * n, RANK + pid * (n + 1), n)
    tl.store(RANK + pid * (n + 1) + n, listed)


@triton.jit(do_not_specialize=["n"])
def compact(STATES, LIST, RANK, n, ALL: tl.constexpr, RUN: tl.constexpr):
    """One program for each row of tiles of STATES [rows, n]."""
    pid = tl.program_id(0).to(tl.int64)
    count = 0
    for first in range(0, n, RUN):
        t = first + tl.arange(0, RUN)
        if ALL:
            state = (t < n).to(tl.int32)
        else:
            state = tl.load(STATES + pid * n + t, mask=t < n, other=0).to(tl.int32)
        count = append(state, t, count, LIST + pid * n, RANK + pid * (n + 1), n)
    tl.store(RANK + pid * (n + 1) + n, count)
