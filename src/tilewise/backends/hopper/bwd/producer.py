"""The producer: one warp that loads K, V, and then Q, dO and their row statistics, by TMA."""

from ...gpu.gluon import gl, gluon, mbarrier, tma_load
from .mask import put_huge
from .sync import DO_EMPTY, MASK_EMPTY, Q_EMPTY, named_barrier
from .tile_scheduler import next_block, put_index, work_of


@gluon.jit
def load_keys(a, w, desc, full, buffer):
    """Loads both halves of the key block. Rows past a sequence's end belong to another one, or read as 0."""
    mbarrier.expect(full, 2 * desc.block_type.nbytes)
    for c in gl.static_range(2):
        row = w.kv_start + w.n * 128 + c * 64
        tma_load(desc, [w.b, w.kv_head, row, 0], full, buffer.index(c))


@gluon.jit
def load_block(a, buf, w, n):
    """Loads K and V, once the previous key block has released their buffers."""
    if a.S.persistent and not a.S.split and n > 0:
        mbarrier.wait(buf.kv_empty.index(0), (n - 1) & 1)
    load_keys(a, w, a.k, buf.k_full.index(0), buf.k)
    load_keys(a, w, a.v, buf.v_full.index(0), buf.v)


@gluon.jit
def load_mask(a, buf, w, u, i, head):
    """Loads both halves of the mask's tile, once the previous one is in registers."""
    if u >= 1:
        named_barrier("bar.sync", MASK_EMPTY, 288)
    full = buf.mask_full.index(0)
    mbarrier.expect(full, 2 * a.mask.block_type.nbytes)
    for c in gl.static_range(2):
        at = [w.b * a.mask_batch, head * a.mask_heads, i * a.S.BM, w.n * 128 + c * 64]
        tma_load(a.mask, at, full, buf.mask.index(c))


@gluon.jit
def produce_block(a, buf, index, n, base, released):
    """Loads key block number n of this program, whose steps are ring uses `base ..`.

    Split blocks are short, and store nothing through the buffers of K and V: these are loaded again when the last step
    releases its dO, which it does after its last read of K and V. `released`: uses of dO that were waited for.
    """
    w = work_of(a, index)
    BM: gl.constexpr = a.S.BM
    LSE_BYTES: gl.constexpr = 4 * BM if a.S.row_lse else 0
    count = w.steps(a)
    i = w.top(a)
    g = 0
    for u in range(base, base + count):
        head = w.kv_head * a.group + g
        s = u % a.S.q_stages
        block = w.block(a, head, i)
        if a.S.mask_first:
            huge = gl.load(a.HUGE + block)  # in flight while the producer waits
        if u >= a.S.q_stages:
            named_barrier("bar.sync", Q_EMPTY + s, 288)
        row = w.q_start + i * BM
        if a.S.mask_first:
            put_huge(buf.huge, s, huge)
        full = buf.q_full.index(s)
        mbarrier.expect(full, a.q.block_type.nbytes + a.stats.block_type.nbytes + LSE_BYTES)
        tma_load(a.q, [w.b, head, row, 0], full, buf.q.index(s))
        tma_load(a.stats, [block * BM, 0], full, buf.stats.index(s))
        if a.S.row_lse:
            tma_load(a.lse, [block, 0], full, buf.lse.index(s))
        if not a.S.split and u == base:
            load_block(a, buf, w, n)
        if a.S.mask_tiles:
            load_mask(a, buf, w, u, i, head)
        t = u % a.S.do_stages
        if a.S.split:
            if released + a.S.do_stages <= u:
                named_barrier("bar.sync", DO_EMPTY + t, 288)
                released += 1
        elif u >= a.S.do_stages:
            named_barrier("bar.sync", DO_EMPTY + t, 288)
        full = buf.do_full.index(t)
        mbarrier.expect(full, a.do.block_type.nbytes)
        tma_load(a.do, [w.b, head, row, 0], full, buf.do.index(t))
        if a.S.split and u == base:
            if released < base:
                named_barrier("bar.sync", DO_EMPTY + (base - 1) % a.S.do_stages, 288)
                released += 1
            load_block(a, buf, w, n)
        i, g = next_block(a, i, g)
    if a.S.persistent and not a.S.split and count == 0:
        load_block(a, buf, w, n)
    return base + count, released


@gluon.jit
def next_index(a):
    """The index of a persistent program's next key block; past the end if none is left."""
    return gl.atomic_add(a.COUNTER, 1, sem="relaxed")


@gluon.jit
def produce(a, buf, index):
    if a.S.persistent:
        n = gl.to_tensor(0)
        base = gl.to_tensor(0)
        released = gl.to_tensor(0)
        index = next_index(a)
        while index < a.planes * a.blocks:
            put_index(a, buf, n, index)
            base, released = produce_block(a, buf, index, n, base, released)
            n += 1
            index = next_index(a)
        put_index(a, buf, n, index)
    else:
        produce_block(a, buf, index, 0, 0, 0)
