"""The producer: one warp that loads K, V, and then Q, dO and their row statistics, by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .sync import DO_EMPTY, Q_EMPTY, named_barrier
from .tile_scheduler import next_block, work_of


@gluon.jit
def produce(a, buf, tile_index):
    w = work_of(a, tile_index)
    BM: gl.constexpr = a.S.BM
    mbarrier.expect(buf.k_full.index(0), 2 * a.k.block_type.nbytes)
    for c in gl.static_range(2):
        tma.async_copy_global_to_shared(
            a.k, [w.b, w.kv_head, w.n * 128 + c * 64, 0], buf.k_full.index(0), buf.k.index(c)
        )
    i = w.last - 1
    g = 0
    for u in range((w.last - w.first) * a.group):
        head = w.kv_head * a.group + g
        plane = w.b * a.heads + head
        s = u % a.S.q_stages
        if u >= a.S.q_stages:
            named_barrier("bar.sync", Q_EMPTY + s, 288)
        full = buf.q_full.index(s)
        mbarrier.expect(full, a.q.block_type.nbytes + a.stats.block_type.nbytes)
        tma.async_copy_global_to_shared(a.q, [w.b, head, i * BM, 0], full, buf.q.index(s))
        tma.async_copy_global_to_shared(a.stats, [(plane * a.q_blocks + i) * BM, 0], full, buf.stats.index(s))
        if u == 0:
            mbarrier.expect(buf.v_full.index(0), 2 * a.v.block_type.nbytes)
            for c in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    a.v, [w.b, w.kv_head, w.n * 128 + c * 64, 0], buf.v_full.index(0), buf.v.index(c)
                )
        t = u % a.S.do_stages
        if u >= a.S.do_stages:
            named_barrier("bar.sync", DO_EMPTY + t, 288)
        full = buf.do_full.index(t)
        mbarrier.expect(full, a.do.block_type.nbytes)
        tma.async_copy_global_to_shared(a.do, [w.b, head, i * BM, 0], full, buf.do.index(t))
        i, g = next_block(a, i, g)
