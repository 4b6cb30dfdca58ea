"""Head dims over 256: the consumers have the same 64 outer rows, each with half of a gradient's columns.

    the first:  S = X U' -> P                     the second: dP = Y W', with P of the first -> dS
    both:       dX += dS U, or dV += P W, each with its half of the columns of U or W

P and dS go through shared memory. Tiles are loaded and released in chunks of 128 columns, one by one, through rings.
"""

from ....gpu.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...fwd.pipeline import Ring, new_ring
from ...signature import struct
from ..arguments import barriers
from ..products import stat_factors
from ..sync import named_barrier
from .arguments import grad_layout, score_layout
from .consumer import mainloop, outer_rows, weights
from .epilogue import in_use, store
from .producer import load_stats, stats_bytes
from .sync import DS_READY, P_EMPTY, P_READY
from .tile_scheduler import inner_head, next_block, work_of


@struct
class ChunkBuffers:
    x: gl.shared_memory_descriptor  # [chunks, 1, 1, 64, D]
    y: object  # [chunks, 1, 1, 64, DV]; None for dV
    u: Ring
    w: Ring
    stats: object  # [BI, 32]; None for dQ
    lse: object  # [1, 1, BI]; with softcap
    p: gl.shared_memory_descriptor  # [1 or 2, 64, BI]
    ds: object  # [64, BI]
    x_full: gl.shared_memory_descriptor
    y_full: object
    stats_full: object
    stats_empty: object


@gluon.jit
def new_chunk_buffers(a):
    OF_V: gl.constexpr = a.S.only == "v"
    DTYPE: gl.constexpr = a.x.dtype
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, a.S.BI], DTYPE)
    x = gl.allocate_shared_memory(DTYPE, [a.S.chunks, 1, 1, 64, a.S.D], a.x.layout)
    p = gl.allocate_shared_memory(DTYPE, [2 if OF_V else 1, 64, a.S.BI], P_LAYOUT)
    y = None
    ds = None
    y_full = None
    if not OF_V:
        y = gl.allocate_shared_memory(DTYPE, [a.S.chunks, 1, 1, 64, a.S.DV], a.y.layout)
        ds = gl.allocate_shared_memory(DTYPE, [64, a.S.BI], P_LAYOUT)
        y_full = barriers(1, 1)
    stats = None
    lse = None
    stats_full = None
    stats_empty = None
    if not a.S.of_queries:
        if a.S.softcap:
            lse = gl.allocate_shared_memory(gl.float32, [1, 1, a.S.BI], a.lse.layout)
        stats = gl.allocate_shared_memory(DTYPE, [a.S.BI, 32], a.stats.layout)
        stats_full = barriers(1, 1)
        stats_empty = barriers(1, 1 if OF_V else 2)
    return ChunkBuffers(
        x, y, new_ring(a.u, a.S.u_stages, 1), new_ring(a.w, a.S.w_stages, 1), stats, lse, p, ds, barriers(1, 1), y_full,
        stats_full, stats_empty,
    )  # fmt: skip


@gluon.jit
def load_chunks(a, w, desc, full, buffer, COLUMNS: gl.constexpr):
    CHUNKS: gl.constexpr = a.S.chunks
    mbarrier.expect(full, CHUNKS * desc.block_type.nbytes)
    for j in gl.static_range(CHUNKS):
        tma_load(desc, [w.b, w.head, w.start + w.top, j * COLUMNS], full, buffer.index(j))


@gluon.jit
def produce_chunks(a, buf, index):
    CHUNKS: gl.constexpr = a.S.chunks
    STATS_BYTES: gl.constexpr = stats_bytes(a.S)
    w = work_of(a, index)
    i = w.last - 1
    g = w.last * 0
    for u in range(w.steps(a)):
        head = inner_head(a, w, g)
        row = w.inner_start + i * a.S.BI
        if u == 0:
            load_chunks(a, w, a.x, buf.x_full.index(0), buf.x, a.S.D)
        if u == 0 and a.S.only != "v":
            load_chunks(a, w, a.y, buf.y_full.index(0), buf.y, a.S.DV)
        for j in gl.static_range(CHUNKS):
            if a.S.only != "v":
                buf.w.fill(u * CHUNKS + j, a.w, [w.b, head, row, j * a.S.DV])
            if j == CHUNKS - 1 and not a.S.of_queries:
                # Statistics wait for S and dP of the previous block; chunks that wait for less come first.
                mbarrier.wait(buf.stats_empty.index(0), (u & 1) ^ 1)
                mbarrier.expect(buf.stats_full.index(0), STATS_BYTES)
                lse = buf.lse.index(0) if a.S.softcap else None
                load_stats(a, w, head, i, buf.stats_full.index(0), buf.stats, lse)
            buf.u.fill(u * CHUNKS + j, a.u, [w.b, head, row, j * a.S.D])
        if a.S.only == "v":  # its chunks are multiplied last
            for j in gl.static_range(CHUNKS):
                buf.w.fill(u * CHUNKS + j, a.w, [w.b, head, row, j * a.S.DV])
        i, g = next_block(a, i, g)


@gluon.jit
def product(a, buf, left, ring, u, factors, FIRST: gl.constexpr, RELEASES: gl.constexpr):
    """S or dP [64, BI]: all chunks of `left` times those of a ring; for keys plus the statistic at column FIRST."""
    CHUNKS: gl.constexpr = a.S.chunks
    BI: gl.constexpr = a.S.BI
    x = gl.zeros([64, BI], gl.float32, score_layout(a.S))
    for j in gl.static_range(CHUNKS):
        n = u * CHUNKS + j
        ring.wait_full(n)
        chunk = left.index(j + (u >> 30)).reshape([64, ring.COLUMNS])
        x = warpgroup_mma(chunk, ring.tile(n).permute((1, 0)), x, use_acc=j > 0, is_async=True)
        if RELEASES and j > 0:
            x = warpgroup_mma_wait(1, deps=(x,))
            ring.release(n - 1)
    if not a.S.of_queries:
        mbarrier.wait(buf.stats_full.index(0), u & 1)
        if FIRST > 0 or not a.S.softcap:
            x = warpgroup_mma(factors, buf.stats.slice(FIRST, 16, 1).permute((1, 0)), x, is_async=True)
    x = warpgroup_mma_wait(0, deps=(x,))
    if RELEASES:
        ring.release(u * CHUNKS + CHUNKS - 1)
    if not a.S.of_queries:
        if FIRST > 0 or not a.S.softcap:
            mbarrier.arrive(buf.stats_empty.index(0), count=1)
    return x


@gluon.jit
def add_half(a, left, ring, u, grads, WAITS: gl.constexpr, C: gl.constexpr):
    """Adds to this consumer's half of the gradient's columns: two chunks, which only it releases."""
    n = u * a.S.chunks + 2 * C
    if WAITS:
        ring.wait_full(n)
    g0 = warpgroup_mma(left, ring.tile(n), grads[0], is_async=True)
    if WAITS:
        ring.wait_full(n + 1)
    g1 = warpgroup_mma(left, ring.tile(n + 1), grads[1], is_async=True)
    g0 = warpgroup_mma_wait(1, deps=(g0,))
    ring.release(n)
    g1 = warpgroup_mma_wait(0, deps=(g1,))
    ring.release(n + 1)
    return g0, g1


@gluon.jit
def step_split(a, buf, u, i, grads, rows, factors, C: gl.constexpr, EDGES: gl.constexpr):
    """Inner block i: use u of the statistics, and uses `u * chunks ..` of the rings."""
    OF_V: gl.constexpr = a.S.only == "v"
    z = u & 1 if OF_V else u >> 30
    if C == 0:
        s = product(a, buf, buf.x, buf.u, u, factors, 0, OF_V)
        p, q = weights(a, buf, u >> 30, s, i, rows, EDGES)
        if a.S.softcap and not a.S.of_queries:
            mbarrier.arrive(buf.stats_empty.index(0), count=1)
        if OF_V:
            if u > 1:
                named_barrier("bar.sync", P_EMPTY + z, 256)
            q = p
        buf.p.index(z).store(q.to(a.x.dtype))
        fence_async_shared()
        named_barrier("bar.arrive", P_READY + z, 256)
    elif not OF_V:
        dp = product(a, buf, buf.y, buf.w, u, factors, 16, True)
        named_barrier("bar.sync", P_READY + z, 256)
        p = buf.p.index(z).load(score_layout(a.S)).to(gl.float32)
        if a.S.of_queries:
            dp += rows[3][:, None]
        buf.ds.store((p * dp).to(a.x.dtype))
        fence_async_shared()
        named_barrier("bar.arrive", DS_READY, 256)
    if OF_V:
        if C == 1:
            named_barrier("bar.sync", P_READY + z, 256)
        grads = add_half(a, buf.p.index(z), buf.w, u, grads, True, C)
        if C == 1:
            named_barrier("bar.arrive", P_EMPTY + z, 256)
    else:
        if C == 0:
            named_barrier("bar.sync", DS_READY, 256)
        grads = add_half(a, buf.ds, buf.u, u, grads, False, C)
    return grads


@gluon.jit
def consume_split(a, buf, index, C: gl.constexpr):
    D: gl.constexpr = a.S.D
    w = work_of(a, index)
    rows = outer_rows(a, w, w.top + gl.arange(0, 64, gl.SliceLayout(1, score_layout(a.S))))
    factors = None
    if not a.S.of_queries:
        factors = stat_factors(a.x.dtype, score_layout(a.S))
    grads = (gl.zeros([64, D], gl.float32, grad_layout(D)), gl.zeros([64, D], gl.float32, grad_layout(D)))
    if w.last > w.first:
        mbarrier.wait(buf.x_full.index(0), 0)
        if a.S.only != "v":
            mbarrier.wait(buf.y_full.index(0), 0)
    grads = mainloop(a, buf, w, grads, rows, factors, step_split, C)
    if w.top < w.end:
        for k in gl.static_range(2):
            x = in_use(a, w, grads[k], w.top, D)
            if a.S.only != "v":
                x *= a.scale
            store(a, w, x, a.dx, a.DX, a.dx_h, a.dx_l, buf.x.index(2 * C + k), w.top, (2 * C + k) * D, D)
        tma_store_wait(0)
