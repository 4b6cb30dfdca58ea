"""A consumer: one warpgroup with 64 keys, whose dK and dV stay in its registers."""

from ...gpu.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    opaque,
    thread_barrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .arguments import dq_layout, dq_split, ds_place, grad_layout, row_layout, score_layout, tile
from .mask import load_mask, masked, own_cells, release_mask
from .products import start_products, stat_factors, take_turn, wait_for_dq
from .softcap import LOG2E, capped
from .sync import DO_EMPTY, DQ_FULL, DS_EMPTY, DS_READY, Q_EMPTY, named_barrier
from .tile_scheduler import get_index, next_block, work_of


@gluon.jit
def pack_dq(dq):
    """Packs dQ [64, 64] as [128, 32] in the register order of a warpgroup: each thread stores 16 contiguous bytes,
    without bank conflicts. `postprocess` and `converter.unpack` undo it.
    """
    warp_lane_pairs = dq.reshape([4, 2, 8, 8, 4, 2])  # warp, row half, lane // 4, column // 8, lane % 4, column % 2
    return warp_lane_pairs.permute([0, 3, 2, 4, 1, 5]).reshape([128, 32])


RIGHT = gl.constexpr(1)  # some rows of the query block are before the first one that sees a key
LEFT = gl.constexpr(2)  # or after the last one


@gluon.jit
def select_visible(p, i, lo, hi, SCORES: gl.constexpr, EDGES: gl.constexpr):
    """P^T [64, BM] of query block i with 0 in hidden cells: key j is seen by rows lo[j] .. hi[j] - 1.

    A thread's columns are 8 m + j, with few j, known at run time, and many m, known at compile time: each cell costs
    one comparison with a constant.
    """
    BM: gl.constexpr = p.shape[1]
    column = gl.arange(0, BM, gl.SliceLayout(0, SCORES))
    m8 = (column & -8)[None, :]
    j = (column & 7)[None, :]
    if EDGES & RIGHT:
        p = gl.where(m8 >= (lo - i * BM)[:, None] - j, p, 0.0)
    if EDGES & LEFT:
        p = gl.where(m8 < (hi - i * BM)[:, None] - j, p, 0.0)
    return p


@gluon.jit
def start_dq(a, buf, u, dq, C: gl.constexpr, h: gl.constexpr, ADDS: gl.constexpr):
    """Starts this consumer's part of dQ over the 64 keys of consumer h; ADDS: accumulated into `dq`."""
    WIDTH: gl.constexpr = dq_split(a.S)[1]
    half = ds_place(a, buf, u, h)  # [64, BM]
    if a.S.dmask_tiles:
        half = half.reshape([a.S.BM, 64]).permute((1, 0))
    k = buf.k.index(h + (opaque(u) >> 30)).reshape([64, a.S.D])
    if a.S.BM == 128:
        dq = warpgroup_mma(half.slice(C * 64, 64, 1).permute((1, 0)), k, dq, use_acc=ADDS, is_async=True)
    else:
        dq = warpgroup_mma(half.permute((1, 0)), k.slice(C * WIDTH, WIDTH, 1), dq, use_acc=ADDS, is_async=True)
    return dq


@gluon.jit
def store_dq(a, buf, u, dq, C: gl.constexpr):
    """Stores dQ to shared memory, for the reducers."""
    z = u % a.S.dq_stages
    if a.S.mask:  # dQ overwrites dS
        if a.S.dmask_tiles:
            tma_store_wait(0)
        named_barrier("bar.sync", DS_EMPTY, 256)
    else:
        wait_for_dq(a, buf, u)
    buf.dq.index(z * 2 + C).store(pack_dq(dq))
    fence_async_shared()
    named_barrier("bar.arrive", DQ_FULL + z, 288)


@gluon.jit
def store_ds(a, buf, u, ds16, C: gl.constexpr):
    """Stores dS^T to shared memory, for dQ; or dS, which TMA also stores from there as the mask's gradient."""
    if not a.S.mask:
        named_barrier("bar.sync", DS_EMPTY + C, 256)
    ds = ds_place(a, buf, u, C)
    if a.S.dmask_tiles:
        ds = ds.reshape([a.S.BM, 64]).permute((1, 0))
    ds.store(ds16)


@gluon.jit
def step(a, buf, w, u, i, g, dk, dv, lo, hi, factors, C: gl.constexpr, EDGES: gl.constexpr):
    """Processes query block i, use u of the rings: adds to this consumer's dK and dV, and stores its part of dQ.

    Tiles are transposed, keys by queries. `u >> 30` is 0, unknown to the compiler, which would else keep registers for
    every address in K and V.
    """
    BM: gl.constexpr = a.S.BM
    D: gl.constexpr = a.S.D
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, grad_layout(a.S), 2)
    WIDTH: gl.constexpr = dq_split(a.S)[1]
    x, dp, huge = start_products(a, buf, w, u, i, g, factors, C)  # S^T - lse, dP^T - delta [64, BM]
    do = tile(buf.do, u, a.S.do_stages, BM, D)  # [BM, D]
    if a.S.softcap:
        bias = None
        if a.S.mask:
            bias = load_mask(a, buf, w, u, i, g, C)
        minus_lse = buf.lse.index(u % a.S.q_stages).load(score_layout(a.S))  # [1, BM]
        p, slope = capped(a, x, minus_lse, bias)
    else:
        if a.S.mask:
            if huge:
                minus_lse = buf.lse.index(u % a.S.q_stages).load(score_layout(a.S))  # [1, BM]
                x = masked(x, a.scale, load_mask(a, buf, w, u, i, g, C), minus_lse) * (1.0 / (a.scale * LOG2E))
                release_mask(a)
        p = gl.exp2(x * (a.scale * LOG2E))  # P^T [64, BM]
    p = select_visible(p, i, lo, hi, score_layout(a.S), EDGES)
    p16 = gl.convert_layout(p.to(a.q.dtype), OPERAND)
    if a.S.softcap and a.S.mask:
        release_mask(a)
    if a.S.softcap and not a.S.dmask:
        p *= slope
    dp, p16 = warpgroup_mma_wait(0, deps=(dp, p16))
    ds = p * dp  # dS^T [64, BM]
    if a.S.dmask and not a.S.dmask_tiles:
        at, there = own_cells(a, a.DMASK, (a.dmask_b, a.dmask_h, a.dmask_q, a.dmask_k), w, u, i, g, C)
        gl.store(at, ds.to(a.DMASK.dtype.element_ty), mask=there)
    if a.S.softcap and a.S.dmask:
        ds *= slope
    ds16 = ds.to(a.q.dtype)
    store_ds(a, buf, u, ds16, C)
    ds16 = gl.convert_layout(ds16, OPERAND)
    dv = warpgroup_mma(p16, do, dv, is_async=True)  # [64, D]
    fence_async_shared()
    named_barrier("bar.sync", DS_READY, 256)
    if a.S.dmask_tiles:
        at = [w.b, w.kv_head * a.group + g, i * BM, w.n * 128 + C * 64]
        tma_store(a.dmask, at, ds_place(a, buf, u, C))
    # Over both consumers' keys: rows C * 64 .. + 63 of dQ or, with BM = 64, columns C * WIDTH .. + WIDTH - 1.
    dq = gl.zeros([64, WIDTH], gl.float32, dq_layout(a.S))
    dq = start_dq(a, buf, u, dq, C, 0, False)
    dq = start_dq(a, buf, u, dq, C, 1, True)
    q = tile(buf.q, u, a.S.q_stages, BM, D)
    dk = warpgroup_mma(ds16, q, dk, is_async=True)  # [64, D]
    dv, dq, p16 = warpgroup_mma_wait(1, deps=(dv, dq, p16))
    if not a.S.mask:
        named_barrier("bar.arrive", DS_EMPTY + 1 - C, 256)
    named_barrier("bar.arrive", DO_EMPTY + u % a.S.do_stages, 288)
    store_dq(a, buf, u, dq, C)
    dk, ds16 = warpgroup_mma_wait(0, deps=(dk, ds16))
    named_barrier("bar.arrive", Q_EMPTY + u % a.S.q_stages, 288)
    return dk, dv


@gluon.jit
def hidden_step(a, buf, u, C: gl.constexpr):
    """A step without a visible cell for this consumer: only its part of dQ, from the other consumer's dS."""
    BM: gl.constexpr = a.S.BM
    WIDTH: gl.constexpr = dq_split(a.S)[1]
    mbarrier.wait(buf.q_full.index(u % a.S.q_stages), (u // a.S.q_stages) & 1)
    mbarrier.wait(buf.do_full.index(u % a.S.do_stages), (u // a.S.do_stages) & 1)
    if a.S.mask_tiles:
        mbarrier.wait(buf.mask_full.index(0), u & 1)
        release_mask(a)
    take_turn(a, C)
    if a.S.mask:
        wait_for_dq(a, buf, u)
    store_ds(a, buf, u, gl.zeros([64, BM], a.q.dtype, score_layout(a.S)), C)
    fence_async_shared()
    named_barrier("bar.sync", DS_READY, 256)
    zeros = gl.zeros([64, WIDTH], gl.float32, dq_layout(a.S))
    dq = warpgroup_mma_wait(0, deps=(start_dq(a, buf, u, zeros, C, 1 - C, False),))
    if not a.S.mask:
        named_barrier("bar.arrive", DS_EMPTY + 1 - C, 256)
    named_barrier("bar.arrive", DO_EMPTY + u % a.S.do_stages, 288)
    named_barrier("bar.arrive", Q_EMPTY + u % a.S.q_stages, 288)
    store_dq(a, buf, u, dq, C)


@gluon.jit
def steps(a, buf, w, begin, end, i, g, dk, dv, lo, hi, factors, C: gl.constexpr, EDGES: gl.constexpr):
    for u in range(begin, end):
        if EDGES > 0 and a.S.BM == 64:  # a tile of 64 x 64 at an edge may have no visible cell
            if w.any_visible(a, i, C):
                dk, dv = step(a, buf, w, u, i, g, dk, dv, lo, hi, factors, C, EDGES)
            else:
                hidden_step(a, buf, u, C)
        else:
            dk, dv = step(a, buf, w, u, i, g, dk, dv, lo, hi, factors, C, EDGES)
        i, g = next_block(a, i, g)
    return i, g, dk, dv


@gluon.jit
def store(a, w, x, desc, POINTER, batch_stride, head_stride, row_stride, buffer, C: gl.constexpr):
    """Stores dK or dV [64, D]: by TMA, through this consumer's half of the buffer of K or V, or from registers."""
    D: gl.constexpr = a.S.D
    row = w.n * 128 + C * 64
    if a.S.direct or (a.S.packed and row + 64 > w.kv_end):
        # In float32 the eight columns that four threads hold are whole sectors already.
        LAYOUT: gl.constexpr = row_layout(a.S) if a.S.direct and not a.S.split else grad_layout(a.S)
        head = w.kv_head
        if a.S.split:
            head = head * a.splits + w.split
        x = gl.convert_layout(x, LAYOUT)
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
        columns = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
        plane = POINTER + w.b.to(gl.int64) * batch_stride + head.to(gl.int64) * head_stride
        at = plane + (w.kv_start + rows).to(gl.int64) * row_stride + columns
        gl.store(at, x, mask=(rows < w.kv_end) & (columns // 8 < desc.shape[3] // 8))
    else:
        buffer.reshape([64, D]).store(x)
        fence_async_shared()
        tma_store(desc, [w.b, w.kv_head, w.kv_start + row, 0], buffer)


@gluon.jit
def consume_block(a, buf, index, n, base, C: gl.constexpr):
    """Processes key block number n of the program (split: of those with steps), whose steps are ring uses `base ..`."""
    w = work_of(a, index)
    D: gl.constexpr = a.S.D
    ROW: gl.constexpr = gl.SliceLayout(1, score_layout(a.S))
    key = w.n * 128 + C * 64 + gl.arange(0, 64, ROW)
    # The query rows that see each key.
    lo = key * 0
    hi = key * 0
    if a.S.hides_right:
        lo = key - w.shift - a.right
    if a.S.hides_left:
        hi = key - w.shift + a.left + 1
    lo = gl.where(key < w.kv_len, lo, 0x7FFFFFF)
    dk = gl.zeros([64, D], gl.float32, grad_layout(a.S))
    dv = gl.zeros([64, D], gl.float32, grad_layout(a.S))
    i = w.top(a)
    g = 0
    if (a.S.persistent and not a.S.split) or w.last > w.first:
        mbarrier.wait(buf.k_full.index(0), n & 1)
        mbarrier.wait(buf.v_full.index(0), n & 1)
    factors = stat_factors(a.q.dtype, score_layout(a.S))
    begin = base
    if a.S.hides_left:
        begin = base + (w.last - w.outer) * a.group
        i, g, dk, dv = steps(a, buf, w, base, begin, i, g, dk, dv, lo, hi, factors, C, a.S.left_edges)
    end = base + (w.last - w.inner) * a.group
    last = base + w.steps(a)
    i, g, dk, dv = steps(a, buf, w, begin, end, i, g, dk, dv, lo, hi, factors, C, 0)
    if a.S.right_edges > 0:
        i, g, dk, dv = steps(a, buf, w, end, last, i, g, dk, dv, lo, hi, factors, C, a.S.right_edges)
    if a.S.guarded:
        nothing = dk * 0.0 + dv * 0.0  # NaN where a gradient is not finite
        gl.store(a.FLAG + gl.zeros([64, D], gl.int32, grad_layout(a.S)), 1, mask=nothing != 0.0)
    if not a.S.direct:
        named_barrier("bar.sync", DS_READY, 256)  # until the other consumer has read K for the last time
    elif a.S.persistent and not a.S.split:
        thread_barrier()
        mbarrier.arrive(buf.kv_empty.index(0), count=1)
    if w.n * 128 + C * 64 < w.kv_end:
        GRAD: gl.constexpr = gl.float32 if a.S.split else a.q.dtype
        store(a, w, dv.to(GRAD), a.dv, a.DV, a.dv_b, a.dv_h, a.dv_l, buf.v.index(C), C)
        store(a, w, (dk * a.scale).to(GRAD), a.dk, a.DK, a.dk_b, a.dk_h, a.dk_l, buf.k.index(C), C)
        tma_store_wait(0)
    if a.S.dmask_tiles:
        tma_store_wait(0)
    if a.S.persistent and not a.S.direct:
        thread_barrier()
        mbarrier.arrive(buf.kv_empty.index(0), count=1)
    return last


@gluon.jit
def consume(a, buf, index, C: gl.constexpr):
    if not a.S.mask:
        named_barrier("bar.arrive", DS_EMPTY + 1 - C, 256)  # dS is empty at first
    if a.S.persistent:
        n = gl.to_tensor(0)
        base = gl.to_tensor(0)
        loaded = gl.to_tensor(0)  # key blocks with steps
        index = get_index(a, buf, n)
        while index < a.planes * a.blocks:
            end = consume_block(a, buf, index, loaded if a.S.split else n, base, C)
            loaded += (end > base).to(gl.int32)
            base = end
            n += 1
            index = get_index(a, buf, n)
    else:
        consume_block(a, buf, index, 0, 0, C)
