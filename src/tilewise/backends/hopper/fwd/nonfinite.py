"""Non-finite fix-up: recomputes flagged tiles, so that neither hidden values nor overflow make an output non-finite.

P V also multiplies values under hidden cells, by zero: if such a value is NaN or infinite, so is the output. Max-free
tiles may also overflow: their weights, or these times large values. The consumers flag all such tiles
(`flag_nonfinite`), and here they are recomputed:

1. with the same arithmetic in the same order, but with zeros for all non-finite values, and with row maxima in max-free
   tiles, which replace m only where it was too small. What non-finite values add to the rows that see them is counted
   by a separate product. Rows that were right before get the same bits.
2. if a row is still not finite: with its running max in every tile, so that none of its weights is over 1.

One warpgroup does it all, step by step, in pieces of the output's columns where they are many: this is rare.
"""

from ...gpu.gluon import fence_async_shared, gl, gluon, mbarrier, tma_load, warpgroup_mma
from .consumer import own_tiles, rows_of
from .epilogue import nonfinite_rows, store_lse, store_rows
from .layouts import out_layout, score_layout, wide_layout
from .mma import left_operand
from .softmax import GROWTH, LATE, finalise, logits, no_sums, select_visible, weights
from .tile_scheduler import locate, tile_count, work_tile_at
from .tiles import tile_list


@gluon.jit
def load_and_wait(desc, at, tile, full, turn):
    """Loads a tile to shared memory by TMA and waits for it; returns how often `full` has been used."""
    mbarrier.expect(full, desc.block_type.nbytes)
    tma_load(desc, at, full, tile)
    mbarrier.wait(full, turn & 1)
    return turn + 1


@gluon.jit
def nonfinite_codes(value):
    """1 for +inf, 256 for -inf, both for NaN, 0 for finite numbers."""
    code = gl.where(value > 0, 1.0, gl.where(value < 0, 256.0, 257.0))
    return gl.where(value - value == 0, 0.0, code)


@gluon.jit
def is_nonfinite(v):
    """Whether any element of a tile is NaN or infinite."""
    value = v.to(gl.float32)
    return gl.max(gl.max((value - value != 0).to(gl.int32), 1), 0) != 0


@gluon.jit
def attend(a, w, rows, tiles, start, right, left, end, column, exact, q_s, k_s, v_s, code_s, full, turn):
    """O [64, DV] and lse [64] of key tiles start .. end; `exact`: rows whose m is always their running max."""
    BN: gl.constexpr = a.S.BN
    DV: gl.constexpr = a.S.DV
    CHUNKS: gl.constexpr = a.S.chunks
    WIDTH: gl.constexpr = a.S.chunk_d
    OUT: gl.constexpr = out_layout(a.S)
    m, l = no_sums(a)
    o = gl.zeros([64, DV], gl.float32, OUT)
    for n in range(start, end):
        tile = tiles.tile(n)
        row = w.kv_start + tile * BN
        s = gl.zeros([64, BN], gl.float32, score_layout(a.S))
        for i in gl.static_range(CHUNKS):
            column_at = (i + a.S.out_aliases_q_chunks) % CHUNKS * WIDTH  # in the order of `fill_keys`
            turn = load_and_wait(a.k, [w.kv_b, w.head // a.group, row, column_at], k_s, full, turn)
            k = k_s.reshape([BN, WIDTH]).permute((1, 0))
            s = warpgroup_mma(
                q_s.index((i + a.S.out_aliases_q_chunks) % CHUNKS).reshape([64, WIDTH]), k, s, use_acc=i > 0
            )
        turn = load_and_wait(a.v, [w.kv_b, w.head // a.group, row, column], v_s, full, turn)
        values = v_s.reshape([BN, DV])
        odd = is_nonfinite(values.load(wide_layout(DV)))
        if odd:  # not where only max-free tiles overflowed
            v = values.load(wide_layout(DV))
            value = v.to(gl.float32)
            values.store(gl.where(value - value == 0, v, gl.zeros_like(v)))
            code_s.store(nonfinite_codes(value).to(gl.float16))
            fence_async_shared()

        columns = tile * BN + gl.arange(0, BN, gl.SliceLayout(0, score_layout(a.S)))
        if not a.S.linear:
            s = logits(a, s, rows, columns)
        s, visible = select_visible(a, s, rows, tile)
        late = LATE
        if a.S.max_free:  # sums over 2^GROWTH were flagged: in rows that were right, m stays here too
            late = gl.where((n < right) | (n >= left), LATE, GROWTH)
        p, m, l, alpha = weights(a, s, m, l, gl.where(exact, 0.0, late), True)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
        o = warpgroup_mma(left_operand(a, p.to(a.q.dtype)), values, o)
        if odd:
            seen = gl.convert_layout(visible.to(gl.float16), gl.DotOperandLayout(0, OUT, 2))
            hits = warpgroup_mma(seen, code_s, gl.zeros([64, DV], gl.float32, OUT), use_acc=False).to(gl.int32)
            up = gl.where(hits % 256 > 0, float("inf"), 0.0)
            o = o + (up + gl.where(hits >= 256, float("-inf"), 0.0))
    lse, share = finalise(a, m, l, w.head, w.owned)
    o = o * gl.convert_layout(share, gl.SliceLayout(1, OUT))[:, None]
    return o, lse, turn


@gluon.jit
def recompute(a, index, c, piece, q_s, k_s, v_s, code_s, full, turn):
    """Recomputes one piece of the columns of consumer c's rows in a work tile."""
    DV: gl.constexpr = a.S.DV
    CHUNKS: gl.constexpr = a.S.chunks
    WIDTH: gl.constexpr = a.S.chunk_d
    w = work_tile_at(a, locate(a, index))
    column = (w.value_tile * (a.S.out_columns // DV) + piece) * DV
    rows = rows_of(a, w, c)
    tiles = tile_list(a, w)
    start, right, left, end = own_tiles(a, w, tiles, 0, c)
    for j in gl.static_range(CHUNKS):
        turn = load_and_wait(a.q, [w.row_b, w.head, w.q_start + w.top + c * 64, j * WIDTH], q_s.index(j), full, turn)
    exact = rows.row < 0  # none
    more = 1
    while more != 0:
        o, lse, turn = attend(
            a, w, rows, tiles, start, right, left, end, column, exact, q_s, k_s, v_s, code_s, full, turn
        )
        overflow = nonfinite_rows(o, rows) & (exact == 0)
        exact = exact | overflow
        more = gl.max(overflow.to(gl.int32), 0)
        if more == 0:
            store_rows(a, w, o.to(a.q.dtype), column, c, DV, out_layout(a.S))
            store_lse(a, w, lse, rows)
    return turn


@gluon.jit
def fixup(a):
    DV: gl.constexpr = a.S.DV
    q_s = gl.allocate_shared_memory(a.q.dtype, [a.S.chunks, 1, 1, 64, a.S.chunk_d], a.q.layout)
    k_s = gl.allocate_shared_memory(a.k.dtype, [1, 1, a.S.BN, a.S.chunk_d], a.k.layout)
    v_s = gl.allocate_shared_memory(a.v.dtype, [1, 1, a.S.BN, DV], a.v.layout)
    code_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([a.S.BN, DV], gl.float16)
    code_s = gl.allocate_shared_memory(gl.float16, [a.S.BN, DV], code_layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    if a.COUNTER is not None:
        if gl.program_id(0) == 0:
            gl.store(a.COUNTER, 0)  # for the next call
    # A program takes every n-th flag, so that all share a run of flagged tiles; it reads many flags at a time, since
    # usually none is set.
    RUN: gl.constexpr = 128
    units = tile_count(a) * a.S.consumers
    programs = gl.num_programs(0)
    turn = 0
    for first in range(gl.program_id(0), units, RUN * programs):
        at = first + programs * gl.arange(0, RUN, gl.BlockedLayout([1], [32], [4], [0]))
        if gl.max(gl.load(a.FLAGS + at, mask=at < units, other=0), 0) != 0:
            for unit in range(first, gl.minimum(first + RUN * programs, units), programs):
                if gl.load(a.FLAGS + unit) != 0:
                    for piece in range(a.S.out_columns // DV):
                        index = unit // a.S.consumers
                        turn = recompute(a, index, unit % a.S.consumers, piece, q_s, k_s, v_s, code_s, full, turn)
                    gl.store(a.FLAGS + unit, 0)  # for the next call
