"""The gradient of a mask that batch rows or heads share: the sum of dS over all (batch row, head) pairs that do.

    for each pair, in order:
        S^T = K Q^T, dP^T = V dO^T         [64, BM] per consumer, in registers
        sum += exp(S^T scale + mask - lse) (dP^T - delta)

A program owns BM queries x 128 keys of the mask, half of the keys per consumer, and writes each cell once: the result
is deterministic, and nothing is stored per pair. A hidden cell is hidden for all pairs: it is set to 0 once, at the
end, and non-finite values there have no effect.

Partitions: two consumer warpgroups, which start their products alternately, so that exponentials of one overlap with
products of the other; a producer warp (two or three pairs in flight).
"""

from ...gpu.gluon import fence_async_shared, gl, gluon, mbarrier, tma_load, warpgroup_mma, warpgroup_mma_wait
from ..signature import Size, gluon_kernel, struct
from .arguments import CallArguments, MaskArguments, barriers, score_layout
from .mask import LOG2E, cells_of, get_huge, masked, put_huge, wide
from .products import stat_factors
from .softcap import capped
from .sync import named_barrier

# Named barriers; warp_specialize uses those below 6.
TURN = gl.constexpr(6)  # and 7: by consumer
KQ_EMPTY = gl.constexpr(8)  # to 10: by stage
VO_EMPTY = gl.constexpr(11)  # to 13


@struct
class SumArguments(MaskArguments, CallArguments):
    q: object  # descriptors: q and do [1, 1, BM, D], k and v [1, 1, 64, D]
    k: object
    v: object
    do: object
    stats: object  # row statistics and -lse, as in `BackwardArguments`
    lse: object
    tiles_k: Size  # key tiles of a plane of the mask
    planes_h: Size  # heads of the mask
    count_h: Size  # heads that share one of its planes
    pairs: Size  # pairs that share one
    shift: Size  # a query's position minus its row


@struct
class Buffers:
    k: gl.shared_memory_descriptor  # [stages * 2, 1, 1, 64, D]: both consumers' halves of each stage
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor  # [stages, 1, 1, BM, D]
    do: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor  # [stages, BM, 32]
    lse: gl.shared_memory_descriptor  # [stages, 1, BM]
    huge: gl.shared_memory_descriptor  # [stages, 1]
    kq_full: gl.shared_memory_descriptor
    vo_full: gl.shared_memory_descriptor  # V, dO and all statistics


@struct
class Tile:
    b: gl.tensor  # the first pair, and the mask's plane
    head: gl.tensor
    i: gl.tensor  # the query block
    key: gl.tensor  # the first key
    pairs: gl.tensor  # 0 if position rules hide the whole tile


@gluon.constexpr_function
def stages(S):
    """As many as shared memory holds."""
    return 3 if S.D == 64 else 2


@gluon.jit
def new_buffers(a):
    D: gl.constexpr = a.S.D
    BM: gl.constexpr = a.S.BM
    STAGES: gl.constexpr = stages(a.S)
    k = gl.allocate_shared_memory(a.k.dtype, [2 * STAGES, 1, 1, 64, D], a.k.layout)
    v = gl.allocate_shared_memory(a.v.dtype, [2 * STAGES, 1, 1, 64, D], a.v.layout)
    q = gl.allocate_shared_memory(a.q.dtype, [STAGES, 1, 1, BM, D], a.q.layout)
    do = gl.allocate_shared_memory(a.do.dtype, [STAGES, 1, 1, BM, D], a.do.layout)
    stats = gl.allocate_shared_memory(a.q.dtype, [STAGES, BM, 32], a.stats.layout)
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], a.lse.layout)
    huge = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    return Buffers(k, v, q, do, stats, lse, huge, barriers(STAGES, 1), barriers(STAGES, 1))


@gluon.jit
def tile_of(a):
    """This program's tile, and its number of pairs."""
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
def load_halves(t, desc, b, kv_head, full, buffer, s):
    """Loads K or V of both consumers."""
    for c in gl.static_range(2):
        tma_load(desc, [b, kv_head, t.key + c * 64, 0], full, buffer.index(2 * s + c))


@gluon.jit
def produce(a, buf):
    BM: gl.constexpr = a.S.BM
    STAGES: gl.constexpr = stages(a.S)
    STATS: gl.constexpr = a.stats.block_type.nbytes + 4 * BM
    t = tile_of(a)
    for u in range(t.pairs):
        b = t.b + u // a.count_h
        head = t.head + u % a.count_h
        s = u % STAGES
        block = (b * a.heads + head) * a.q_blocks + t.i
        huge = gl.load(a.HUGE + block)  # in flight while the producer waits
        if u >= STAGES:
            named_barrier("bar.sync", KQ_EMPTY + s, 288)
        full = buf.kq_full.index(s)
        mbarrier.expect(full, a.q.block_type.nbytes + 2 * a.k.block_type.nbytes)
        tma_load(a.q, [b, head, t.i * BM, 0], full, buf.q.index(s))
        load_halves(t, a.k, b, head // a.group, full, buf.k, s)
        if u >= STAGES:
            named_barrier("bar.sync", VO_EMPTY + s, 288)
        put_huge(buf.huge, s, huge)
        full = buf.vo_full.index(s)
        mbarrier.expect(full, a.do.block_type.nbytes + 2 * a.v.block_type.nbytes + STATS)
        tma_load(a.stats, [block * BM, 0], full, buf.stats.index(s))
        tma_load(a.lse, [block, 0], full, buf.lse.index(s))
        tma_load(a.do, [b, head, t.i * BM, 0], full, buf.do.index(s))
        load_halves(t, a.v, b, head // a.group, full, buf.v, s)


@gluon.jit
def own_cells(a, X, strides, t, C: gl.constexpr):
    """Pointers to a consumer's cells of the mask, and which of them exist."""
    return cells_of(a, X, strides, t.b, t.head, t.i * a.S.BM, t.key + C * 64, 0)


@gluon.jit
def add_pair(a, buf, u, total, cells, factors, C: gl.constexpr):
    """Adds a pair's dS^T to `total`."""
    BM: gl.constexpr = a.S.BM
    D: gl.constexpr = a.S.D
    STAGES: gl.constexpr = stages(a.S)
    zeros = gl.zeros([64, BM], gl.float32, score_layout(a.S))
    n = u % STAGES
    mbarrier.wait(buf.kq_full.index(n), (u // STAGES) & 1)
    mbarrier.wait(buf.vo_full.index(n), (u // STAGES) & 1)
    named_barrier("bar.sync", TURN + C, 256)
    q = buf.q.index(n).reshape([BM, D])
    k = buf.k.index(2 * n + C).reshape([64, D])
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if not a.S.softcap:
        lse = buf.stats.index(n).slice(0, 16, 1)  # [BM, 16]
        s = warpgroup_mma(factors, lse.permute((1, 0)), s, is_async=True)
    do = buf.do.index(n).reshape([BM, D])
    v = buf.v.index(2 * n + C).reshape([64, D])
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    delta = buf.stats.index(n).slice(16, 16, 1)  # [BM, 16]
    dp = warpgroup_mma(factors, delta.permute((1, 0)), dp, is_async=True)
    named_barrier("bar.arrive", TURN + 1 - C, 256)
    x = warpgroup_mma_wait(2, deps=(s,))  # q k - lse / scale; with softcap, or if the lse is huge, q k
    named_barrier("bar.arrive", KQ_EMPTY + n, 288)
    if a.S.softcap:
        p, _ = capped(a, x, buf.lse.index(n).load(score_layout(a.S)), wide(a, cells))
    else:
        factor = u * 0.0 + LOG2E
        if get_huge(buf.huge, n):
            x = masked(x, a.scale, wide(a, cells), buf.lse.index(n).load(score_layout(a.S)))
            x *= 1.0 / (a.scale * LOG2E)
            factor *= 0.0
        p = gl.exp2(gl.fma(x, a.scale * LOG2E, wide(a, cells) * factor))
    dp = warpgroup_mma_wait(0, deps=(dp,))
    total = gl.fma(p, dp, total)
    named_barrier("bar.arrive", VO_EMPTY + n, 288)
    return total


@gluon.jit
def consume(a, buf, C: gl.constexpr):
    BM: gl.constexpr = a.S.BM
    LAYOUT: gl.constexpr = score_layout(a.S)
    t = tile_of(a)
    factors = stat_factors(a.q.dtype, LAYOUT)
    # The mask's cells [64, BM], in its dtype, stay in registers for all pairs.
    at, there = own_cells(a, a.MASK, (a.mask_b, a.mask_h, a.mask_q, a.mask_k), t, C)
    cells = gl.load(at, mask=there, other=0.0)
    total = gl.zeros([64, BM], gl.float32, LAYOUT)
    if C == 1:
        named_barrier("bar.arrive", TURN, 256)
    for u in range(t.pairs):
        total = add_pair(a, buf, u, total, cells, factors, C)
    key = t.key + C * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    row = t.i * BM + gl.arange(0, BM, gl.SliceLayout(0, LAYOUT))[None, :]
    seen = wide(a, cells) != float("-inf")
    if a.S.hides_right:
        seen = seen & (key <= row + a.shift + a.right)
    if a.S.hides_left:
        seen = seen & (key >= row + a.shift - a.left)
    at, there = own_cells(a, a.DMASK, (a.dmask_b, a.dmask_h, a.dmask_q, a.dmask_k), t, C)
    gl.store(at, gl.where(seen, total, 0.0), mask=there)


@gluon_kernel(SumArguments)
def mask_sums(a):
    buf = new_buffers(a)
    fence_async_shared()
    gl.warp_specialize(
        [(consume, (a, buf, 0)), (consume, (a, buf, 1)), (produce, (a, buf))],
        [4, 1],
        [a.S.consumer_regs, a.S.producer_regs],
    )
