"""The reducers: two warps that add dQ to global memory by TMA reduce-add."""

from ...gpu.gluon import gl, gluon, mbarrier, tma_add, tma_store, tma_store_wait
from .sync import DQ_FULL, add_release, bulk_writes_done, named_barrier, wait_for
from .tile_scheduler import get_index, next_block, work_of


@gluon.jit
def reduce_block(a, buf, index, base, R: gl.constexpr):
    """Adds dQ of every second query block to global memory, after the earlier key blocks.

    A reduce-add and its release take longer than a step, so two warps alternate, each with its own buffer.
    """
    gl.static_assert(a.S.dq_stages == 2)
    w = work_of(a, index)
    count = w.steps(a)
    skipped = (base + R) & 1
    i = w.top(a)
    g = w.n * 0
    if skipped == 1:
        i, g = next_block(a, i, g)
    for _ in range(base + skipped, base + count, 2):
        block = w.block(a, w.kv_head * a.group + g, i)
        named_barrier("bar.sync", DQ_FULL + R, 288)
        at = a.SEMAPHORES + block
        turn = w.turn(a, i)
        wait_for(at, turn, False)
        for c in gl.static_range(2):
            row = block * 256 + c * 128
            if turn == 0:
                tma_store(a.dq, [row, 0], buf.dq.index(R * 2 + c))
            else:
                tma_add(a.dq, [row, 0], buf.dq.index(R * 2 + c))
        tma_store_wait(0)
        mbarrier.arrive(buf.dq_empty.index(R), count=1)
        bulk_writes_done()
        add_release(at)
        i, g = next_block(a, i, g)
        i, g = next_block(a, i, g)
    return base + count


@gluon.jit
def reduce(a, buf, index, R: gl.constexpr):
    if a.S.persistent:
        n = gl.to_tensor(0)
        base = gl.to_tensor(0)
        index = get_index(a, buf, n)
        while index < a.planes * a.blocks:
            base = reduce_block(a, buf, index, base, R)
            n += 1
            index = get_index(a, buf, n)
    else:
        reduce_block(a, buf, index, 0, R)
