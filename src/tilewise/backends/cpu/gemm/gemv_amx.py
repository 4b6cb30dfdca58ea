"""Decode by AMX tiles, bf16: 32 keys at a time for up to 16 query rows.

A tile register holds 16 rows of 64 bytes. Q K^T reads K in place, [16 keys, 32 elements] a tile, and Q^T in pairs of
elements, packed once for each work item. P V reads the weights, [rows, 32 keys], and V in pairs of keys, interleaved on
load.

    s [keys, rows] = K Q^T          acc [rows, Dv] += p V
"""

from __future__ import annotations

import torch

from ....core.problem import Problem
from ....core.storage import PLAIN
from ..codegen.prefetch import prefetch_line
from ..codegen.vector import I16, I64, Emit, Value, W, microkernel
from . import amx
from .amx import TILE, _at, _tile, release

ROWS = 16  # most query rows
BLOCK = 32  # keys, and elements of K and V
# Tile registers: scores, K, queries; sums of P V, pairs of V, weights
SUMS, KEYS, QUERIES, ACC, VALUES, WEIGHTS = (0, 1), (2, 3), 4, 5, 6, 7


def serves(p: Problem) -> bool:
    """Whether all is bf16, in rows of whole tiles."""
    tiles = p.head_dim % BLOCK == 0 and p.value_dim % BLOCK == 0
    return tiles and PLAIN[torch.bfloat16] == PLAIN[p.q_dtype] == p.k_format == p.v_format and amx.usable()


@microkernel("ii")
def set_tiles(e: Emit, at: Value, rows: Value) -> None:
    """Configures the tiles: `rows` rows of weights and of their sums, 16 of the others. `at` is scratch memory."""
    b = e.builder
    sixteen = sum(16 << 8 * tile for tile in range(8) if tile not in (ACC, WEIGHTS))
    lines = b.or_(e.i64(sixteen), b.mul(rows, e.i64(sum(1 << 8 * tile for tile in (ACC, WEIGHTS)))))
    widths = 0x0040004000400040  # of four tiles
    for i, number in enumerate((1, 0, widths, widths, 0, 0, lines, 0)):
        b.store(e.i64(number) if isinstance(number, int) else number, e.pointer(at, i, I64, I64))
    _tile(e, "ldtilecfg", _at(e, at))


@microkernel("iiiiiiiii")
def amx_qk_block(
    e: Emit, s: Value, lds: Value, many: Value, rows: Value, q: Value, steps: Value, copy: Value, sums: Value,
    distance: Value,
) -> None:  # fmt: skip
    """s[r, 32 keys] = q[r] . k over 32 * steps elements; 4 rows, or 16 if `many`. `q` is [steps, 16 pairs, 16 rows]."""
    b = e.builder
    with e.loop(e.i64(BLOCK)) as j:
        source, later = (e.load_scalar(rows, n, I64) for n in (j, b.add(j, distance)))
        to = b.add(copy, b.add(b.mul(b.lshr(j, e.i64(4)), e.i64(TILE)), b.mul(b.and_(j, e.i64(15)), e.i64(64))))
        with e.loop(steps) as d:
            prefetch_line(e, b.add(later, b.mul(d, e.i64(64))))
            e.store(e.load(source, b.mul(d, e.i64(W))), to, b.mul(d, e.i64(2 * TILE // 4)))
    for tile in SUMS:
        _tile(e, "tilezero", tile)
    with e.loop(steps) as d:
        _tile(e, "tileloadd64", QUERIES, _at(e, q, b.mul(d, e.i64(TILE))), e.i64(64))
        for half, (total, keys) in enumerate(zip(SUMS, KEYS, strict=True)):
            at = b.mul(b.add(b.mul(d, e.i64(2)), e.i64(half)), e.i64(TILE))
            _tile(e, "tileloadd64", keys, _at(e, copy, at), e.i64(64))
            _tile(e, "tdpbf16ps", total, keys, QUERIES)
    for half, total in enumerate(SUMS):
        _tile(e, "tilestored64", total, _at(e, sums, half * TILE), e.i64(64))
    for half in range(2):
        columns = e.transpose([e.load(sums, half * TILE // 4 + j * W) for j in range(W)])
        for r in range(4):
            e.store(columns[r], s, b.add(b.mul(lds, e.i64(r)), e.i64(half * W)))
        with b.if_then(b.icmp_signed("!=", many, e.i64(0))):
            for r in range(4, ROWS):
                e.store(columns[r], s, b.add(b.mul(lds, e.i64(r)), e.i64(half * W)))


@microkernel("iiiiiiiii")
def amx_pv_block(
    e: Emit, acc: Value, columns: Value, s: Value, lds: Value, count: Value, rows: Value, pairs: Value,
    weights: Value, distance: Value,
) -> None:  # fmt: skip
    """acc[r] += p[r, 32 keys] v for `count` rows of `columns` floats."""
    b = e.builder
    with e.loop(count) as r:
        for half in range(2):
            p = e.load(s, b.add(b.mul(r, lds), e.i64(half * W)))
            short = b.trunc(e.bf16_bits(p, e.i32s), e.vector(I16))
            at = b.add(b.mul(r, e.i64(BLOCK)), e.i64(half * W))
            b.store(short, e.pointer(weights, at, I16, short.type)).align = 2
    wide = e.vector(I16, 2 * W)
    with e.loop(e.i64(BLOCK // 2)) as i:
        numbers = [b.add(b.mul(i, e.i64(2)), e.i64(n)) for n in (0, 1)]
        sources = [e.load_scalar(rows, n, I64) for n in numbers]
        later = [e.load_scalar(rows, b.add(n, distance), I64) for n in numbers]
        with e.loop(columns, BLOCK) as c:
            for row in later:
                prefetch_line(e, b.add(row, b.mul(c, e.i64(2))))
            even, odd = (e._load(source, c, I16, 2 * W) for source in sources)
            for half in range(2):
                lanes = [lane for n in range(half * W, half * W + W) for lane in (n, n + 2 * W)]
                to = b.add(b.add(b.mul(c, e.i64(TILE // 2 // 16)), e.i64(half * TILE // 2)), b.mul(i, e.i64(BLOCK)))
                b.store(e.shuffle(even, odd, lanes), e.pointer(pairs, to, I16, wide)).align = 64
    _tile(e, "tileloadd64", WEIGHTS, _at(e, weights), e.i64(64))
    stride = b.mul(columns, e.i64(4))
    with e.loop(columns, W) as c:
        at = _at(e, acc, b.mul(c, e.i64(4)))
        _tile(e, "tileloadd64", ACC, at, stride)
        _tile(e, "tileloadd64", VALUES, _at(e, pairs, b.mul(c, e.i64(TILE // W))), e.i64(64))
        _tile(e, "tdpbf16ps", ACC, WEIGHTS, VALUES)
        _tile(e, "tilestored64", ACC, at, stride)


def amx_qk(s, lds, R, rows, count, q, steps, copy, sums, distance):  # type: ignore[no-untyped-def]
    """s [R, count] = q k^T; `count` is a multiple of 32."""
    set_tiles(sums, R)
    for j in range(0, count, BLOCK):
        amx_qk_block(s + 4 * j, lds, R > 4, rows + 8 * j, q, steps, copy, sums, distance)


def amx_pv(acc, columns, s, lds, R, rows, count, pairs, weights, distance):  # type: ignore[no-untyped-def]
    """acc [R, columns] += p v; `count` is a multiple of 32. Releases the tiles that `amx_qk` configured."""
    for j in range(0, count, BLOCK):
        amx_pv_block(acc, columns, s + 4 * j, lds, R, rows + 8 * j, pairs, weights, distance)
    release()
