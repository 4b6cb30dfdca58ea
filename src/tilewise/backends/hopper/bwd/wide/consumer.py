"""The consumers: two warpgroups whose gradients of 64 outer rows stay in their registers."""

from ....gpu.gluon import gl, gluon, mbarrier, opaque, warpgroup_mma, warpgroup_mma_wait
from ..arguments import tile
from ..consumer import capped, select_visible
from ..products import part_factors, stat_factors
from ..sync import named_barrier
from .arguments import grad_layout, score_layout
from .epilogue import store_all
from .sync import P_READY, U_EMPTY, W_EMPTY
from .tile_scheduler import next_block, spans, work_of

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def start_scores(a, buf, u, factors, C: gl.constexpr):
    """Starts S = X U' [64, BI]; for dK and dV without a softcap, minus lse / scale.

    `u >> 30` is 0, unknown to the compiler, which would else keep registers for every address in X and Y.
    """
    BI: gl.constexpr = a.S.BI
    stage = u % a.S.u_stages
    mbarrier.wait(buf.u_full.index(stage), (u // a.S.u_stages) & 1)
    s = gl.zeros([64, BI], gl.float32, score_layout(a.S))
    x = buf.x.index(C + (opaque(u) >> 30)).reshape([64, a.S.D])
    s = warpgroup_mma(x, tile(buf.u, u, a.S.u_stages, BI, a.S.D).permute((1, 0)), s, use_acc=False, is_async=True)
    if a.S.tail > 0:
        x1 = buf.x1.index(C + (opaque(u) >> 30)).reshape([64, a.S.tail])
        s = warpgroup_mma(x1, tile(buf.u1, u, a.S.u_stages, BI, a.S.tail).permute((1, 0)), s, is_async=True)
    if not a.S.of_queries and not a.S.softcap:
        lse = buf.stats.index(stage).slice(0, 16, 1)  # [BI, 16]
        s = warpgroup_mma(factors, lse.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def start_dp(a, buf, u, factors, C: gl.constexpr):
    """Starts dP = Y W' [64, BI]; for dK and dV minus delta, by a second product."""
    BI: gl.constexpr = a.S.BI
    mbarrier.wait(buf.w_full.index(u % a.S.w_stages), (u // a.S.w_stages) & 1)
    dp = gl.zeros([64, BI], gl.float32, score_layout(a.S))
    y = buf.y.index(C + (opaque(u) >> 30)).reshape([64, a.S.DV])
    w = tile(buf.w, u, a.S.w_stages, BI, a.S.DV)
    dp = warpgroup_mma(y, w.permute((1, 0)), dp, use_acc=False, is_async=True)
    if not a.S.of_queries:
        delta = buf.stats.index(u % a.S.u_stages).slice(16, 16, 1)  # [BI, 16]
        dp = warpgroup_mma(factors, delta.permute((1, 0)), dp, is_async=True)
    return dp


@gluon.jit
def weights(a, buf, stage, s, i, rows, EDGES: gl.constexpr):
    """P [64, BI] of inner block i, and the factor of dP in dS: P, with a softcap times its derivative.

    `rows` is the result of `outer_rows`.
    """
    lo, hi, minus_lse, _ = rows
    if a.S.softcap:
        if a.S.of_queries:
            p, slope = capped(a, s, gl.zeros_like(s) + minus_lse[:, None])
        else:
            p, slope = capped(a, s, buf.lse.index(stage).load(score_layout(a.S)))  # [1, BI]
        p = select_visible(p, i, lo, hi, score_layout(a.S), EDGES)
        q = p * slope
    else:
        if a.S.of_queries:
            p = gl.exp2(gl.fma(s, gl.full_like(s, a.scale * LOG2E), gl.zeros_like(s) + minus_lse[:, None]))
        else:
            p = gl.exp2(s * (a.scale * LOG2E))
        p = select_visible(p, i, lo, hi, score_layout(a.S), EDGES)
        q = p
    return p, q


@gluon.jit
def operand(x, COLUMNS: gl.constexpr):
    """x as the left operand of a product with COLUMNS columns."""
    return gl.convert_layout(x, gl.DotOperandLayout(0, grad_layout(COLUMNS), 2))


@gluon.jit
def start_dx(a, buf, u, ds, grads):
    """Starts dX += dS U in grads[0], and its tail in grads[1]; returns the accumulators and their left operands."""
    TAIL: gl.constexpr = a.S.tail
    left = operand(ds, a.S.D)
    dx = warpgroup_mma(left, tile(buf.u, u, a.S.u_stages, a.S.BI, a.S.D), grads[0], is_async=True)
    if TAIL > 0:
        left1 = operand(ds, TAIL)
        dx1 = warpgroup_mma(left1, tile(buf.u1, u, a.S.u_stages, a.S.BI, TAIL), grads[1], is_async=True)
        started = (dx, dx1, left, left1)
    else:
        started = (dx, left)
    return started


@gluon.jit
def finish_dx(a, u, started):
    """Waits for all products and releases U."""
    done = warpgroup_mma_wait(0, deps=started)
    named_barrier("bar.arrive", U_EMPTY + u % a.S.u_stages, 288)
    if a.S.tail > 0:
        grads = (done[0], done[1])
    else:
        grads = (done[0],)
    return grads


@gluon.jit
def step_dq(a, buf, u, i, grads, rows, C: gl.constexpr, EDGES: gl.constexpr):
    """Inner block i, use u of the rings, for dQ of this consumer's 64 rows."""
    s = start_scores(a, buf, u, None, C)
    dp = start_dp(a, buf, u, None, C)
    s = warpgroup_mma_wait(1, deps=(s,))
    _, q = weights(a, buf, 0, s, i, rows, EDGES)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    named_barrier("bar.arrive", W_EMPTY + u % a.S.w_stages, 288)
    ds = (q * (dp + rows[3][:, None])).to(a.x.dtype)
    return finish_dx(a, u, start_dx(a, buf, u, ds, grads))


@gluon.jit
def step_dkdv(a, buf, u, i, grads, rows, factors, C: gl.constexpr, EDGES: gl.constexpr):
    """Inner block i for dK and dV of this consumer's 64 keys; dV comes last in `grads`.

    P is kept in shared memory until dP is ready, for lack of registers.
    """
    DV: gl.constexpr = a.S.DV
    TAILS: gl.constexpr = 1 if a.S.tail > 0 else 0
    s = warpgroup_mma_wait(0, deps=(start_scores(a, buf, u, factors, C),))
    p, q = weights(a, buf, u % a.S.u_stages, s, i, rows, EDGES)
    buf.p.index(C + (u >> 30)).store(q.to(a.x.dtype))
    left = operand(p.to(a.x.dtype), DV)
    dp = start_dp(a, buf, u, factors, C)
    dv = warpgroup_mma(left, tile(buf.w, u, a.S.w_stages, a.S.BI, DV), grads[1 + TAILS], is_async=True)
    dp, left = warpgroup_mma_wait(1, deps=(dp, left))
    ds = (buf.p.index(C + (u >> 30)).load(score_layout(a.S)).to(gl.float32) * dp).to(a.x.dtype)
    started = start_dx(a, buf, u, ds, grads)
    dv, left = warpgroup_mma_wait(1 + TAILS, deps=(dv, left))
    named_barrier("bar.arrive", W_EMPTY + u % a.S.w_stages, 288)
    return finish_dx(a, u, started) + (dv,)


@gluon.jit
def step_dv(a, buf, u, i, grads, rows, factors, EDGES: gl.constexpr):
    """Inner block i for dV, by the first consumer, which passes P to the second.

    The buffer of P is free: the second consumer read it before it released Q of the block before the last.
    """
    gl.static_assert(a.S.u_stages == 2)
    DV: gl.constexpr = a.S.DV
    s = warpgroup_mma_wait(0, deps=(start_scores(a, buf, u, factors, 0),))
    if not a.S.softcap:
        named_barrier("bar.arrive", U_EMPTY + u % a.S.u_stages, 288)
    p, q = weights(a, buf, u % a.S.u_stages, s, i, rows, EDGES)
    if a.S.softcap:  # the lse has been read
        named_barrier("bar.arrive", U_EMPTY + u % a.S.u_stages, 288)
    left = operand(p.to(a.x.dtype), DV)
    mbarrier.wait(buf.w_full.index(u % a.S.w_stages), (u // a.S.w_stages) & 1)
    dv = warpgroup_mma(left, tile(buf.w, u, a.S.w_stages, a.S.BI, DV), grads[0], is_async=True)
    buf.p.index(u & 1).store(q.to(a.x.dtype))
    named_barrier("bar.arrive", P_READY + (u & 1), 256)
    dv, left = warpgroup_mma_wait(0, deps=(dv, left))
    named_barrier("bar.arrive", W_EMPTY + u % a.S.w_stages, 288)
    return (dv,)


@gluon.jit
def step_dk(a, buf, u, i, grads, rows, factors, EDGES: gl.constexpr):
    """An inner block for dK, by the second consumer."""
    mbarrier.wait(buf.u_full.index(u % a.S.u_stages), (u // a.S.u_stages) & 1)
    dp = start_dp(a, buf, u, factors, 0)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    named_barrier("bar.arrive", W_EMPTY + u % a.S.w_stages, 288)
    named_barrier("bar.sync", P_READY + (u & 1), 256)
    p = buf.p.index(u & 1).load(score_layout(a.S))
    ds = (p.to(gl.float32) * dp).to(a.x.dtype)
    return finish_dx(a, u, start_dx(a, buf, u, ds, grads))


@gluon.jit
def step(a, buf, u, i, grads, rows, factors, C: gl.constexpr, EDGES: gl.constexpr):
    if a.S.of_queries:
        grads = step_dq(a, buf, u, i, grads, rows, C, EDGES)
    elif not a.S.roles:
        grads = step_dkdv(a, buf, u, i, grads, rows, factors, C, EDGES)
    elif C == 0:
        grads = step_dv(a, buf, u, i, grads, rows, factors, EDGES)
    else:
        grads = step_dk(a, buf, u, i, grads, rows, factors, EDGES)
    return grads


@gluon.jit
def steps(a, buf, begin, end, i, g, grads, rows, factors, STEP: gl.constexpr, C: gl.constexpr, EDGES: gl.constexpr):
    for u in range(begin, end):
        grads = STEP(a, buf, u, i, grads, rows, factors, C, EDGES)
        i, g = next_block(a, i, g)
    return i, g, grads


@gluon.jit
def mainloop(a, buf, w, grads, rows, factors, STEP: gl.constexpr, C: gl.constexpr):
    """All inner blocks, the last first; those in the middle need no masking."""
    total = w.steps(a)
    heads = total // gl.maximum(w.last - w.first, 1)
    i = w.last - 1
    g = w.last * 0
    begin = (w.last - w.outer) * heads
    end = (w.last - w.inner) * heads
    if a.S.high_edges > 0:
        i, g, grads = steps(a, buf, begin * 0, begin, i, g, grads, rows, factors, STEP, C, a.S.high_edges)
    i, g, grads = steps(a, buf, begin, end, i, g, grads, rows, factors, STEP, C, 0)
    if a.S.low_edges > 0:
        i, g, grads = steps(a, buf, end, total, i, g, grads, rows, factors, STEP, C, a.S.low_edges)
    return grads


@gluon.jit
def row_stat(a, w, row, FIRST: gl.constexpr):
    """-lse / scale (FIRST = 0) or -delta (16) of query rows, summed from their parts."""
    PARTS: gl.constexpr = part_factors()
    place = (w.stats + w.head * a.q_blocks).to(gl.int64) * a.S.stats_block
    total = row * 0.0
    for n in gl.static_range(4):
        part = gl.load(a.STATS + (place + row) * 32 + (FIRST + n), mask=row < w.end, other=0.0).to(gl.float32)
        total += part if a.x.dtype == gl.bfloat16 else part * PARTS[n]
    return total


@gluon.jit
def outer_rows(a, w, row):
    """Of each outer row: the inner rows lo .. hi - 1 that it sees and, for queries, -lse (base 2) and -delta."""
    lo, hi = spans(a, w, row)
    minus_lse = row
    minus_delta = row
    if a.S.of_queries:
        minus_lse = gl.where(row < w.end, row_stat(a, w, row, 0) * (a.scale * LOG2E), float("-inf"))
        minus_delta = row_stat(a, w, row, 16)
    return lo, hi, minus_lse, minus_delta


@gluon.jit
def no_grads(a, C: gl.constexpr):
    D: gl.constexpr = a.S.D
    DV: gl.constexpr = a.S.DV
    TAIL: gl.constexpr = a.S.tail
    if a.S.roles:
        COLUMNS: gl.constexpr = DV if C == 0 else D
        grads = (gl.zeros([64, COLUMNS], gl.float32, grad_layout(COLUMNS)),)
    else:
        grads = (gl.zeros([64, D], gl.float32, grad_layout(D)),)
        if TAIL > 0:
            grads = grads + (gl.zeros([64, TAIL], gl.float32, grad_layout(TAIL)),)
        if not a.S.of_queries:
            grads = grads + (gl.zeros([64, DV], gl.float32, grad_layout(DV)),)
    return grads


@gluon.jit
def consume(a, buf, index, C: gl.constexpr):
    w = work_of(a, index)
    top = w.top + (0 if a.S.roles else C * 64)
    rows = outer_rows(a, w, top + gl.arange(0, 64, gl.SliceLayout(1, score_layout(a.S))))
    factors = None
    if not a.S.of_queries:
        factors = stat_factors(a.x.dtype, score_layout(a.S))
    grads = no_grads(a, C)
    if w.last > w.first:
        mbarrier.wait(buf.x_full.index(0), 0)
        mbarrier.wait(buf.y_full.index(0), 0)
    grads = mainloop(a, buf, w, grads, rows, factors, step, C)
    if top < w.end:
        store_all(a, buf, w, grads, top, C)
