"""The gradient of a mask that batch rows or heads share: the sum of dS over all (batch row, head) pairs that do.

    for each pair, in order:
        S^T = K Q^T, dP^T = V dO^T         [64, 64] at a time, in registers
        sum += exp(S^T scale + mask - lse) (dP^T - delta)

A program owns BM queries x 128 keys of the mask, half of the keys a consumer, and writes each cell once: the same bits
each time, and no cell is kept for each pair. What is hidden is hidden for all pairs: cells are selected once, at the
end, and whatever is not finite there does not matter.

Partitions: two consumer warpgroups, a producer warp (Q and dO of two pairs and three halves of K and V are on the way).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..signature import Size, gluon_kernel, struct
from .arguments import CallArguments, MaskArguments, barriers
from .mask import cells_of, masked
from .softcap import capped
from .sync import named_barrier

# Hardware barriers; warp_specialize takes those below 6.
Q_EMPTY = gl.constexpr(9)  # and 10: by stage
KV_EMPTY = gl.constexpr(11)  # to 13: by slot


@struct
class SumArguments(MaskArguments, CallArguments):
    q: object  # descriptors: q and do [1, 1, BM, D], k and v [1, 1, 64, D]
    k: object
    v: object
    do: object
    rows: object  # float32 [1, 64] of [query blocks, 2 BM]: -lse, then -delta
    tiles_k: Size  # of a plane of the mask
    planes_h: Size  # heads of the mask
    count_h: Size  # heads that share one of its planes
    pairs: Size  # that share one
    shift: Size  # of a query's position from its row


@struct
class Buffers:
    k: gl.shared_memory_descriptor  # [3, 1, 1, 64, D]: a consumer's half a slot
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor  # [2, 1, 1, BM, D]
    do: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor  # [2 * 2 BM / 64, 1, 64]
    mask: object  # [2, 1, 1, BM, 64]
    mask_full: object
    q_full: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor  # 6: a consumer that waits at one every time knows its phase


@struct
class Tile:
    b: gl.tensor  # the first pair, and the mask's plane
    head: gl.tensor
    i: gl.tensor  # the query block
    key: gl.tensor  # the first
    pairs: gl.tensor  # none, if no cell is visible by position


@gluon.constexpr_function
def chunk_layout():
    """S^T and dP^T [64, 64] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])


@gluon.jit
def new_buffers(a):
    D: gl.constexpr = a.S.D
    BM: gl.constexpr = a.S.BM
    k = gl.allocate_shared_memory(a.k.dtype, [3, 1, 1, 64, D], a.k.layout)
    v = gl.allocate_shared_memory(a.v.dtype, [3, 1, 1, 64, D], a.v.layout)
    q = gl.allocate_shared_memory(a.q.dtype, [2, 1, 1, BM, D], a.q.layout)
    do = gl.allocate_shared_memory(a.do.dtype, [2, 1, 1, BM, D], a.do.layout)
    rows = gl.allocate_shared_memory(gl.float32, [4 * (BM // 64), 1, 64], a.rows.layout)
    mask = None
    mask_full = None
    if a.S.mask_tiles:
        mask = gl.allocate_shared_memory(a.mask.dtype, [2, 1, 1, BM, 64], a.mask.layout)
        mask_full = barriers(1, 1)
    return Buffers(k, v, q, do, rows, mask, mask_full, barriers(2, 1), barriers(6, 1))


@gluon.jit
def tile_of(a):
    """This program's tile, and how many pairs it goes through."""
    pid = gl.program_id(0)
    key = pid % a.tiles_k * 128
    rest = pid // a.tiles_k
    i = rest % a.q_blocks
    plane = rest // a.q_blocks
    pairs = a.pairs + pid * 0
    if a.S.hides_right:
        pairs = gl.where(key > i * a.S.BM + a.S.BM - 1 + a.shift + a.right, 0, pairs)
    if a.S.hides_left:
        pairs = gl.where(key + 127 < i * a.S.BM + a.shift - a.left, 0, pairs)
    return Tile(plane // a.planes_h, plane % a.planes_h, i, key, pairs)


@gluon.jit
def produce(a, buf):
    BM: gl.constexpr = a.S.BM
    ROWS: gl.constexpr = 2 * (BM // 64)
    t = tile_of(a)
    if a.S.mask_tiles:
        full = buf.mask_full.index(0)
        mbarrier.expect(full, 2 * a.mask.block_type.nbytes)
        for n in gl.static_range(2):
            at = [t.b * a.mask_batch, t.head * a.mask_heads, t.i * BM, t.key + n * 64]
            tma.async_copy_global_to_shared(a.mask, at, full, buf.mask.index(n))
    for u in range(t.pairs):
        b = t.b + u // a.count_h
        head = t.head + u % a.count_h
        s = u & 1
        if u >= 2:
            named_barrier("bar.sync", Q_EMPTY + s, 288)
        full = buf.q_full.index(s)
        mbarrier.expect(full, 2 * a.q.block_type.nbytes + ROWS * 256)
        tma.async_copy_global_to_shared(a.q, [b, head, t.i * BM, 0], full, buf.q.index(s))
        tma.async_copy_global_to_shared(a.do, [b, head, t.i * BM, 0], full, buf.do.index(s))
        block = (b * a.heads + head) * a.q_blocks + t.i
        for n in gl.static_range(ROWS):
            tma.async_copy_global_to_shared(a.rows, [block, n * 64], full, buf.rows.index(s * ROWS + n))
        for c in gl.static_range(2):
            use = 2 * u + c
            slot = use % 3
            if use >= 3:
                named_barrier("bar.sync", KV_EMPTY + slot, 160)
            full = buf.kv_full.index(use % 6)
            mbarrier.expect(full, 2 * a.k.block_type.nbytes)
            at = [b, head // a.group, t.key + c * 64, 0]
            tma.async_copy_global_to_shared(a.k, at, full, buf.k.index(slot))
            tma.async_copy_global_to_shared(a.v, at, full, buf.v.index(slot))


@gluon.jit
def chunk_cells(a, X, strides, t, u, C: gl.constexpr, n: gl.constexpr):
    """Pointers to the mask's cells of a chunk [64, 64], and which of them there are."""
    return cells_of(a, X, strides, t.b, t.head, t.i * a.S.BM + n * 64, t.key + C * 64, u, chunk_layout(), 64)


@gluon.jit
def bias_of(a, buf, t, u, C: gl.constexpr, n: gl.constexpr):
    """The mask's cells of a chunk [64, 64] in float32."""
    if a.S.mask_tiles:
        x = buf.mask.index(C).reshape([a.S.BM, 64]).slice(n * 64, 64, 0)
        x = x.permute((1, 0)).load(chunk_layout())
    else:
        at, there = chunk_cells(a, a.MASK, (a.mask_b, a.mask_h, a.mask_q, a.mask_k), t, u, C, n)
        x = gl.load(at, mask=there, other=0.0)
    return x.to(gl.float32)


@gluon.jit
def add_chunk(a, buf, t, u, total, C: gl.constexpr, n: gl.constexpr):
    """A pair's dS^T of 64 keys and 64 queries, added to `total`."""
    BM: gl.constexpr = a.S.BM
    D: gl.constexpr = a.S.D
    CHUNKS: gl.constexpr = BM // 64
    at = (2 * u + C) % 3
    zeros = gl.zeros([64, 64], gl.float32, chunk_layout())
    q = buf.q.index(u & 1).reshape([BM, D]).slice(n * 64, 64, 0)
    do = buf.do.index(u & 1).reshape([BM, D]).slice(n * 64, 64, 0)
    s = warpgroup_mma(buf.k.index(at).reshape([64, D]), q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(buf.v.index(at).reshape([64, D]), do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    bias = bias_of(a, buf, t, u, C, n)
    minus_lse = buf.rows.index((u & 1) * 2 * CHUNKS + n).load(chunk_layout())  # [1, 64]
    minus_delta = buf.rows.index((u & 1) * 2 * CHUNKS + CHUNKS + n).load(chunk_layout())
    x = warpgroup_mma_wait(1, deps=(s,))
    if a.S.softcap:
        p, _ = capped(a, x, minus_lse, bias)
    else:
        p = gl.exp2(masked(x, a.scale, bias, minus_lse))
    dp = warpgroup_mma_wait(0, deps=(dp,))
    return gl.fma(p, dp + minus_delta, total)


@gluon.jit
def consume(a, buf, C: gl.constexpr):
    CHUNKS: gl.constexpr = a.S.BM // 64
    t = tile_of(a)
    if a.S.mask_tiles:
        mbarrier.wait(buf.mask_full.index(0), 0)
    totals = ()
    for _ in gl.static_range(CHUNKS):
        totals += (gl.zeros([64, 64], gl.float32, chunk_layout()),)
    for u in range(t.pairs):
        use = 2 * u + C
        mbarrier.wait(buf.q_full.index(u & 1), (u >> 1) & 1)
        mbarrier.wait(buf.kv_full.index(use % 6), (use // 6) & 1)
        added = ()
        for n in gl.static_range(CHUNKS):
            added += (add_chunk(a, buf, t, u, totals[n], C, n),)
        totals = added
        named_barrier("bar.arrive", Q_EMPTY + (u & 1), 288)
        named_barrier("bar.arrive", KV_EMPTY + use % 3, 160)
    for n in gl.static_range(CHUNKS):
        key = t.key + C * 64 + gl.arange(0, 64, gl.SliceLayout(1, chunk_layout()))[:, None]
        row = t.i * a.S.BM + n * 64 + gl.arange(0, 64, gl.SliceLayout(0, chunk_layout()))[None, :]
        seen = bias_of(a, buf, t, 0, C, n) != float("-inf")
        if a.S.hides_right:
            seen = seen & (key <= row + a.shift + a.right)
        if a.S.hides_left:
            seen = seen & (key >= row + a.shift - a.left)
        at, there = chunk_cells(a, a.DMASK, (a.dmask_b, a.dmask_h, a.dmask_q, a.dmask_k), t, 0, C, n)
        gl.store(at, gl.where(seen, totals[n], 0.0), mask=there)


@gluon.jit
def consumer0(a, buf):
    consume(a, buf, 0)


@gluon.jit
def consumer1(a, buf):
    consume(a, buf, 1)


@gluon_kernel(SumArguments)
def mask_sums(a):
    buf = new_buffers(a)
    fence_async_shared()
    gl.warp_specialize(
        [(consumer0, (a, buf)), (consumer1, (a, buf)), (produce, (a, buf))],
        [4, 1],
        [a.S.consumer_regs, a.S.producer_regs],
    )
