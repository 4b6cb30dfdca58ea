"""Prefill in float8: the producer and the pipeline of fwd/, consumers that multiply e4m3.

    S = Q K'                       e4m3 x e4m3
    p = 256 exp(s - m)             to e4m3; the sum l is of p as it was before
    O = alpha O + (P V)            P V of one tile of keys alone in the tensor cores, then added in float32 (`promote`)
    out = O v_scale / l

Tensor cores add float8 products with 13 bits of mantissa, whatever the accumulator's type; sums longer than a tile are
therefore added up here, which costs nothing: the multiplication by alpha becomes a multiply-add.

They read both operands along the dim that is summed, so V comes transposed, [DV, keys]. Within each 16 keys it is also
permuted: a thread has P of keys 2 t, 2 t + 1, 8 + 2 t, 8 + 2 t + 1 after the softmax, and is asked for four that follow
one another. In the order that `transpose` writes they do, and P stays in its registers.
"""

from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

import triton

from ...gpu.mask_rules import key_span, query_position
from ..fwd.arguments import Arguments as Arguments16
from ..fwd.consumer import own_tiles, pass_over
from ..fwd.pipeline import new_queries, new_ring, partition
from ..fwd.softmax import Rows, hide, own_sums
from ..fwd.tile_scheduler import new_scheduler, numbers_of, tile_count, work_tile_at
from ..fwd.tiles import tile_list
from ..signature import Size, gluon_kernel, struct

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
SHIFT = gl.constexpr(8.0)  # p is 2^8 at the most: float8 ends at 448, and at 2^-9 below
# Four numbers to one register; the compiler's own conversion takes each byte apart and packs it again.
TO_FP8 = gl.constexpr(
    "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; "
    "mov.b32 $0, {l, h}; }"
)


class Given:
    """Those of fwd/, v transposed, and scales: of each row of q, of each head of k and v."""

    __annotations__ = {name: Size if name in Arguments16.SIZES else object for name in Arguments16.NAMES[:-1]}
    __annotations__ |= {
        "Q_SCALES": object, "K_SCALES": object, "V_SCALES": object, "qs_b": Size, "qs_h": Size, "qs_l": Size,
        "ks_b": Size, "ks_h": Size, "vs_b": Size, "vs_h": Size, "S": object,
    }  # fmt: skip


Arguments: Any = struct(Given)


@gluon.constexpr_function
def score_layout(S):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BN, 32])


@gluon.constexpr_function
def out_layout(S):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.DV, 32])


@gluon.jit
def as_operand(a, p):
    """P [64, BN] as the left operand of P V, keys in the order of V's: the same registers."""
    GROUPS: gl.constexpr = a.S.BN // 16
    BN: gl.constexpr = a.S.BN
    p = gl.permute(gl.reshape(p, [64, GROUPS, 2, 4, 2]), (0, 1, 3, 2, 4))
    p = gl.convert_layout(gl.reshape(p, [64, BN]), gl.DotOperandLayout(0, out_layout(a.S), 4), assert_trivial=True)
    return gl.inline_asm_elementwise(TO_FP8, "=r,f,f,f,f", [p], dtype=a.q.dtype, is_pure=True, pack=4)


@gluon.jit
def start_scores(a, queries, keys, i, n, C: gl.constexpr):
    BN: gl.constexpr = a.S.BN
    s = gl.zeros([64, BN], gl.float32, score_layout(a.S))
    return warpgroup_mma(queries.chunk(i, C, 0), keys.tile(n).permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def start_output(a, values, n, p, o):
    """P V of tile n on its own; or, without `promote`, added to O."""
    DV: gl.constexpr = a.S.DV
    values.wait_full(n)
    v = values.tile(n).permute((1, 0))
    if a.S.promote:
        x = gl.zeros([64, DV], gl.float32, out_layout(a.S))
        x = warpgroup_mma(p, v, x, use_acc=False, is_async=True)
    else:
        x = warpgroup_mma(p, v, o, is_async=True)
    return x


@gluon.jit
def added(a, o, alpha, x):
    """O with what a tile gives; `alpha` [64] is that tile's."""
    if a.S.promote:
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, out_layout(a.S)), assert_trivial=True)
        o = gl.fma(o, factor[:, None] + gl.zeros_like(o), x)
    else:
        o = x
    return o


@gluon.jit
def rescaled(a, o, alpha):
    """O before a tile is added, without `promote`."""
    if not a.S.promote:
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, out_layout(a.S)), assert_trivial=True)[:, None]
    return o


@gluon.jit
def softmax(a, s, m, l, factor, rows, tile, n_keys, MASKED: gl.constexpr):
    """P as an operand, the new m (of scores as they are) and l, and alpha."""
    BN: gl.constexpr = a.S.BN
    if MASKED:
        columns = tile * BN + gl.arange(0, BN, gl.SliceLayout(0, score_layout(a.S)))
        s, _ = hide(a, s, rows, tile, columns, n_keys)
    m_new = gl.maximum(m, gl.max(s, 1))
    base = m_new
    if MASKED:
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(gl.fma(s, factor[:, None] + gl.zeros_like(s), gl.zeros_like(s) + (SHIFT - base * factor)[:, None]))
    alpha = gl.exp2((m - base) * factor)
    each = own_sums(a, p)
    l = l * gl.convert_layout(alpha[:, None], each.type.layout, assert_trivial=True) + each
    return as_operand(a, p), m_new, l, alpha


@gluon.jit
def step(a, queries, keys, values, i, n, tile, n_keys, s, o, m, l, factor, rows, C: gl.constexpr,
         MASKED: gl.constexpr, MORE: gl.constexpr):  # fmt: skip
    """Tile n of the keys, whose scores are complete, into the sums, and the scores of the next one if there are MORE.

    These stand behind P V in the tensor cores, and P V is added to O meanwhile. No product is under way from one step
    to the next: the assembler would then wait for each.
    """
    p, m, l, alpha = softmax(a, s, m, l, factor, rows, tile, n_keys, MASKED)
    x = start_output(a, values, n, p, rescaled(a, o, alpha))
    if MORE:
        keys.wait_full(n + 1)
        s = start_scores(a, queries, keys, i, n + 1, C)
        x = warpgroup_mma_wait(1, deps=(x,))
    else:
        x = warpgroup_mma_wait(0, deps=(x,))
    values.release(n)
    o = added(a, o, alpha, x)
    if MORE:
        s = warpgroup_mma_wait(0, deps=(s,))
        keys.release(n + 1)
    return s, o, m, l


@gluon.jit
def rows_of(a, w, C):
    """This consumer's rows, and what their scores are multiplied by, for powers of 2."""
    row = w.top + C * 64 + gl.arange(0, 64, gl.SliceLayout(1, score_layout(a.S)))
    numbers = numbers_of(a, w)
    qpos = query_position(w.offset, row, numbers, a.S)
    lo, hi = key_span(qpos, w.n_keys, numbers, a.S)
    at = w.row_b.to(gl.int64) * a.qs_b + w.head.to(gl.int64) * a.qs_h
    k_scale = gl.load(a.K_SCALES + w.kv_b.to(gl.int64) * a.ks_b + (w.head // a.group).to(gl.int64) * a.ks_h)
    ok = row < w.q_len
    factor = gl.load(a.Q_SCALES + at + row.to(gl.int64) * a.qs_l, mask=ok, other=1.0) * (k_scale * (a.scale * LOG2E))
    return Rows(row, ok, lo, hi, qpos, None, None, None), factor


@gluon.jit
def store(a, w, o, m, l, factor, rows, outs, C: gl.constexpr):
    DV: gl.constexpr = a.S.DV
    total = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    total = gl.where(total == 0, 1.0, total)
    v_scale = gl.load(a.V_SCALES + w.kv_b.to(gl.int64) * a.vs_b + (w.head // a.group).to(gl.int64) * a.vs_h)
    share = gl.convert_layout(v_scale / total, gl.SliceLayout(1, out_layout(a.S)), assert_trivial=True)
    tile = outs.index(C)
    tma.store_wait(0)  # what was there before has left
    gl.thread_barrier()
    tile.reshape([64, DV]).store((o * share[:, None]).to(a.o.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(a.o, [w.row_b, w.head, w.top + C * 64, 0], tile)
    if a.S.lse:
        lse = gl.where(m == float("-inf"), m, (m * factor - SHIFT) * LN2 + gl.log(total))
        at = a.LSE + w.row_b.to(gl.int64) * a.lse_b + w.head.to(gl.int64) * a.lse_h
        gl.store(at + rows.row.to(gl.int64) * a.lse_l, lse, mask=rows.ok)


@gluon.jit
def consume(a, scheduler, queries, keys, values, outs, C: gl.constexpr):
    BN: gl.constexpr = a.S.BN
    DV: gl.constexpr = a.S.DV
    ROW: gl.constexpr = gl.SliceLayout(1, score_layout(a.S))
    MASKED: gl.constexpr = a.S.masked
    total = tile_count(a)
    i = 0  # work tiles so far
    begin = 0  # tiles of keys so far
    coord = scheduler.receive(a, 0)
    more = True
    while more:
        w = work_tile_at(a, coord)
        rows, factor = rows_of(a, w, C)
        tiles = tile_list(a, w)
        start, right, _, end = own_tiles(a, w, tiles, begin, C)
        pass_over(a, keys, values, begin, start)
        queries.wait_full(i, C, 0)
        keys.wait_full(start)
        s = start_scores(a, queries, keys, i, start, C)
        s = warpgroup_mma_wait(0, deps=(s,))
        keys.release(start)
        o = gl.zeros([64, DV], gl.float32, out_layout(a.S))
        m = gl.full([64], float("-inf"), gl.float32, ROW)
        l = own_sums(a, gl.zeros([64, BN], gl.float32, score_layout(a.S)))
        last = end - 1
        if MASKED:
            for n in range(start, gl.minimum(right, last)):
                s, o, m, l = step(
                    a, queries, keys, values, i, n, tiles.tile(n - begin), w.n_keys, s, o, m, l, factor, rows, C, True,
                    True,
                )  # fmt: skip
            start = right
        for n in range(start, last):
            s, o, m, l = step(
                a, queries, keys, values, i, n, tiles.tile(n - begin), w.n_keys, s, o, m, l, factor, rows, C, False,
                True,
            )  # fmt: skip
        queries.release(i, C, 0)
        _, o, m, l = step(
            a, queries, keys, values, i, last, tiles.tile(last - begin), w.n_keys, s, o, m, l, factor, rows, C, MASKED,
            False,
        )  # fmt: skip
        store(a, w, o, m, l, factor, rows, outs, C)
        pass_over(a, keys, values, end, begin + tiles.count)
        begin += tiles.count
        i += 1
        coord = scheduler.receive(a, i)
        more = coord.index < total
    tma.store_wait(0)


@gluon.jit
def produce(a, scheduler, queries, keys, values):
    CONSUMERS: gl.constexpr = a.S.consumers
    BN: gl.constexpr = a.S.BN
    total = tile_count(a)
    n = 0
    i = 0
    coord = scheduler.fetch(a, 0)
    more = True
    while more:
        w = work_tile_at(a, coord)
        tiles = tile_list(a, w)
        kv_head = w.head // a.group
        for c in gl.static_range(CONSUMERS):
            queries.fill_part(i, c, 0, a.q, w.row_b, w.head, w.top + c * 64)
        for j in range(tiles.count):
            tile = tiles.tile(j)
            keys.fill(n + j, a.k, [w.kv_b, kv_head, tile * BN, 0])
            values.fill(n + j, a.v, [w.kv_b, kv_head, 0, tile * BN])
        n += tiles.count
        i += 1
        coord = scheduler.fetch(a, i)
        more = coord.index < total


@gluon_kernel(Arguments)
def fp8_kernel(a):
    CONSUMERS: gl.constexpr = a.S.consumers
    scheduler = new_scheduler(a.COUNTER, CONSUMERS)
    queries = new_queries(a.q, a.S.q_stages, CONSUMERS, 1, 0)
    keys = new_ring(a.k, a.S.k_stages, CONSUMERS)
    values = new_ring(a.v, a.S.v_stages, CONSUMERS)
    outs = gl.allocate_shared_memory(a.o.dtype, [CONSUMERS, 1, 1, 64, a.S.DV], a.o.layout)
    partition(a, consume, produce, scheduler, queries, keys, values, outs)


@triton.jit
def transpose(V, VT, v_b, v_h, v_l, t_b, t_h, t_d, heads, keys, width, D: tl.constexpr, KEYS: tl.constexpr):
    """V [B, H, keys, width], in bytes, to [B, H, D, keys in tiles of KEYS]: zeros past both ends, keys of each 16 in
    the order of P's registers.
    """
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    place = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    in16 = place % 16
    key = place - in16 + in16 // 2 % 2 * 8 + in16 // 4 * 2 + in16 % 2
    d = tl.arange(0, D)
    at = V + b.to(tl.int64) * v_b + h.to(tl.int64) * v_h
    x = tl.load(at + key.to(tl.int64)[:, None] * v_l + d[None, :], mask=(key < keys)[:, None] & (d < width)[None, :],
                other=0)  # fmt: skip
    to = VT + b.to(tl.int64) * t_b + h.to(tl.int64) * t_h
    tl.store(to + d.to(tl.int64)[:, None] * t_d + place[None, :], tl.trans(x))
