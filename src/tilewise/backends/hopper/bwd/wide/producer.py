"""The producer: one warp that loads the outer rows, and then blocks of inner rows, by TMA."""

from ....gpu.gluon import gl, gluon, mbarrier, tma_load
from ..sync import named_barrier
from .sync import U_EMPTY, W_EMPTY
from .tile_scheduler import inner_head, next_block, work_of


@gluon.jit
def load_outer(a, w, desc, full, buffer, column):
    """Loads the program's outer rows. Rows past a sequence's end belong to another one, or read as 0."""
    TILES: gl.constexpr = a.S.BO // 64
    for c in gl.static_range(TILES):
        tma_load(desc, [w.b, w.head, w.start + w.top + c * 64, column], full, buffer.index(c))


@gluon.jit
def load_x(a, buf, w):
    TILES: gl.constexpr = a.S.BO // 64
    TAIL_BYTES: gl.constexpr = a.x1.block_type.nbytes if a.S.tail > 0 else 0
    full = buf.x_full.index(0)
    mbarrier.expect(full, TILES * (a.x.block_type.nbytes + TAIL_BYTES))
    load_outer(a, w, a.x, full, buf.x, 0)
    if a.S.tail > 0:
        load_outer(a, w, a.x1, full, buf.x1, a.S.D)


@gluon.constexpr_function
def stats_bytes(S):
    """Bytes of the statistics of a block of inner queries."""
    return 0 if S.of_queries else S.BI * (64 + 4 * S.softcap)


@gluon.jit
def load_stats(a, w, head, i, full, stats, lse):
    """Loads the statistics of inner block i; with a softcap the lse in float32 too."""
    BLOCK: gl.constexpr = a.S.stats_block
    block = w.stats + head * a.q_blocks
    tma_load(a.stats, [block * BLOCK + i * a.S.BI, 0], full, stats)
    if a.S.softcap:
        row = i * a.S.BI
        tma_load(a.lse, [block + row // BLOCK, row % BLOCK], full, lse)


@gluon.jit
def produce(a, buf, index):
    w = work_of(a, index)
    BI: gl.constexpr = a.S.BI
    TILES: gl.constexpr = a.S.BO // 64
    TAIL_BYTES: gl.constexpr = a.u1.block_type.nbytes if a.S.tail > 0 else 0
    STATS_BYTES: gl.constexpr = stats_bytes(a.S)
    i = w.last - 1
    g = w.last * 0
    for u in range(w.steps(a)):
        head = inner_head(a, w, g)
        row = w.inner_start + i * BI
        if u == 0:
            load_x(a, buf, w)
        s = u % a.S.u_stages
        if u >= a.S.u_stages:
            named_barrier("bar.sync", U_EMPTY + s, 288)
        full = buf.u_full.index(s)
        mbarrier.expect(full, a.u.block_type.nbytes + TAIL_BYTES + STATS_BYTES)
        tma_load(a.u, [w.b, head, row, 0], full, buf.u.index(s))
        if a.S.tail > 0:
            tma_load(a.u1, [w.b, head, row, a.S.D], full, buf.u1.index(s))
        if not a.S.of_queries:
            load_stats(a, w, head, i, full, buf.stats.index(s), buf.lse.index(s) if a.S.softcap else None)
        if u == 0:
            mbarrier.expect(buf.y_full.index(0), TILES * a.y.block_type.nbytes)
            load_outer(a, w, a.y, buf.y_full.index(0), buf.y, 0)
        t = u % a.S.w_stages
        if u >= a.S.w_stages:
            named_barrier("bar.sync", W_EMPTY + t, 288)
        full = buf.w_full.index(t)
        mbarrier.expect(full, a.w.block_type.nbytes)
        tma_load(a.w, [w.b, head, row, 0], full, buf.w.index(t))
        i, g = next_block(a, i, g)
