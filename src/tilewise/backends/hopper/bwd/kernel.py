"""Backward on Hopper in one kernel: dK and dV of 128 keys stay in registers, dQ is added up in global memory.

    for each query block i that sees the key block (last first):
        S^T = K Q^T, dP^T = V dO^T         [64, BM] a consumer, in registers
        P^T = exp2(S^T c - lse), dS^T = P^T (dP^T - delta)
        dV += P^T dO, dK += dS^T Q         left operands from registers
        dQ_i = dS K                        dS through shared memory, columns or rows split over the consumers
        the reducer adds dQ_i to global memory by TMA; deterministic: in the order of key blocks

Partitions: two consumer warpgroups of 64 keys, a producer warp (TMA loads), a reducer warp (TMA reduce-add).
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as core
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from ..arguments import held

LOG2E = gl.constexpr(1.4426950408889634)
# Hardware barriers; warp_specialize takes those below 8.
DS_READY = gl.constexpr(8)  # both consumers have stored dS
Q_EMPTY = gl.constexpr(9)  # and 10: by stage
DO_EMPTY = gl.constexpr(11)  # and 12
DQ_FULL = gl.constexpr(13)  # and 14


@core.builtin
def tma_add(desc, coord, src, _semantic=None):
    """Adds a float32 tile in shared memory to global memory, as part of the current bulk group."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@gluon.constexpr_function
def barrier_text(op, threads):
    return f"{op} $1, {threads}; mov.b32 $0, 0;"


@gluon.jit
def named_barrier(OP: gl.constexpr, number, THREADS: gl.constexpr):
    """`bar.sync` or `bar.arrive` by every thread of the partition; control flow must be uniform."""
    TEXT: gl.constexpr = barrier_text(OP, THREADS)
    gl.inline_asm_elementwise(TEXT, "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bulk_writes_done():
    """Waits until this warp's bulk reductions are complete in global memory (`tma.store_wait` waits for reads only)."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; bar.warp.sync 0xffffffff; mov.b32 $0, 0;",
        "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_release(pointer):
    """Adds 1, after all that this warp has written."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; "
        "@p red.release.gpu.global.add.s32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_acquire(pointer):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1
    )


@aggregate
class BackwardArguments:
    q: object  # descriptors: q and do [1, 1, BM, D], k, v, dk, dv [1, 1, 64, D]
    k: object
    v: object
    do: object
    dk: object
    dv: object
    dq: object  # float32 [64, DQC] of [B * H * q_blocks * BM, D]
    stats: object  # float32 [1, 2 * BM] of [B * H * q_blocks, 2 * BM]: -lse * log2(e), delta
    SEMAPHORES: object  # int32 [B * H * q_blocks]
    COUNTER: object
    heads: object
    group: object
    q_len: object
    kv_len: object
    q_blocks: object
    k_blocks: object
    q_offset: object
    scale: object
    S: object

    @gluon.constexpr_function
    def __init__(self, *values):
        for name, value in zip(NAMES, values, strict=True):
            setattr(self, name, held(value))


NAMES = (
    "q k v do dk dv dq stats SEMAPHORES COUNTER heads group q_len kv_len q_blocks k_blocks q_offset scale S"
).split()


@aggregate
class Buffers:
    k: gl.shared_memory_descriptor  # [2, 1, 1, 64, D]
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor  # [q_stages, 1, 1, BM, D]
    do: gl.shared_memory_descriptor  # [do_stages, 1, 1, BM, D]
    stats: gl.shared_memory_descriptor  # [q_stages, 1, 2 * BM]
    ds: gl.shared_memory_descriptor  # [2 * ds_stages, 64, BM]
    dq: gl.shared_memory_descriptor  # [2 * dq_stages, 64, DQC]
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, do, stats, ds, dq, k_full, v_full, q_full, do_full, dq_empty
    ):  # fmt: skip
        self.k = k
        self.v = v
        self.q = q
        self.do = do
        self.stats = stats
        self.ds = ds
        self.dq = dq
        self.k_full = k_full
        self.v_full = v_full
        self.q_full = q_full
        self.do_full = do_full
        self.dq_empty = dq_empty


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.constexpr_function
def dq_split(S):
    """(rows, columns) of the part of dQ [BM, D] that one consumer computes."""
    return (64, S.D // 2) if S.BM == 64 else (64, S.D)


@gluon.jit
def new_buffers(a):
    D: gl.constexpr = a.S.D
    BM: gl.constexpr = a.S.BM
    DTYPE: gl.constexpr = a.q.dtype
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BM], DTYPE)
    k = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], a.k.layout)
    v = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], a.v.layout)
    q = gl.allocate_shared_memory(DTYPE, [a.S.q_stages, 1, 1, BM, D], a.q.layout)
    do = gl.allocate_shared_memory(DTYPE, [a.S.do_stages, 1, 1, BM, D], a.do.layout)
    stats = gl.allocate_shared_memory(gl.float32, [a.S.q_stages, 1, 2 * BM], a.stats.layout)
    ds = gl.allocate_shared_memory(DTYPE, [2 * a.S.ds_stages, 64, BM], DS_LAYOUT)
    dq = gl.allocate_shared_memory(gl.float32, [2 * a.S.dq_stages, 64, dq_split(a.S)[1]], a.dq.layout)
    return Buffers(
        k, v, q, do, stats, ds, dq, barriers(1, 1), barriers(1, 1), barriers(a.S.q_stages, 1),
        barriers(a.S.do_stages, 1), barriers(a.S.dq_stages, 1),
    )  # fmt: skip


# ---- which query blocks see a key block


@aggregate
class Work:
    b: gl.tensor
    kv_head: gl.tensor
    n: gl.tensor
    first: gl.tensor  # query blocks first .. last - 1
    last: gl.tensor
    inner: gl.tensor  # of those, inner .. last - 1 are seen whole

    @gluon.constexpr_function
    def __init__(self, b, kv_head, n, first, last, inner):
        self.b = b
        self.kv_head = kv_head
        self.n = n
        self.first = first
        self.last = last
        self.inner = inner


@gluon.jit
def work_of(a, ticket):
    """Works of one KV head follow each other, key blocks ascending: of a causal call the longest first."""
    BM: gl.constexpr = a.S.BM
    n = ticket % a.k_blocks
    plane = ticket // a.k_blocks
    kv_heads = a.heads // a.group
    if a.S.swizzle > 1:
        # Key blocks of `swizzle` planes are interleaved: a reduction's predecessors are further ahead.
        width = a.S.swizzle * a.k_blocks
        begin = ticket // width * a.S.swizzle
        count = gl.minimum(a.S.swizzle, gl.num_programs(0) // a.k_blocks - begin)
        rest = ticket % width
        n = rest // count
        plane = begin + rest % count
    b = plane // kv_heads
    kv_head = plane % kv_heads
    first = n * 0
    last = n * 0 + a.q_blocks
    inner = n * 0
    if a.S.causal:
        # Key j is seen by rows from j - q_offset on.
        # Keys that no row sees take the last block, hidden as a whole.
        first = gl.minimum(gl.maximum(n * 128 - a.q_offset, 0) // BM, last - 1)
        inner = gl.minimum(gl.maximum(gl.cdiv(n * 128 + 127 - a.q_offset, BM), 0), last)
    if n * 128 + 128 > a.kv_len:
        inner = last
    inner = gl.maximum(inner, first)
    return Work(b, kv_head, n, first, last, inner)


@gluon.jit
def next_block(a, i, g):
    """The order of query blocks: from the last one back, and of each all heads of the group.

    So programs with fewer blocks keep pace with those of more, which they wait for.
    """
    g += 1
    wraps = g == a.group
    return i - wraps.to(gl.int32), gl.where(wraps, 0, g)


# ---- partitions


@gluon.jit
def produce(a, buf, ticket):
    w = work_of(a, ticket)
    BM: gl.constexpr = a.S.BM
    mbarrier.expect(buf.k_full.index(0), 2 * a.k.block_type.nbytes)
    for c in gl.static_range(2):
        tma.async_copy_global_to_shared(
            a.k, [w.b, w.kv_head, w.n * 128 + c * 64, 0], buf.k_full.index(0), buf.k.index(c)
        )
    i = w.last - 1
    g = 0
    for u in range(0, (w.last - w.first) * a.group):
        head = w.kv_head * a.group + g
        plane = w.b * a.heads + head
        s = u % a.S.q_stages
        if u >= a.S.q_stages:
            named_barrier("bar.sync", Q_EMPTY + s, 288)
        full = buf.q_full.index(s)
        mbarrier.expect(full, a.q.block_type.nbytes + a.stats.block_type.nbytes)
        tma.async_copy_global_to_shared(a.q, [w.b, head, i * BM, 0], full, buf.q.index(s))
        tma.async_copy_global_to_shared(a.stats, [plane * a.q_blocks + i, 0], full, buf.stats.index(s))
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


@gluon.jit
def reduce(a, buf, ticket):
    """Adds dQ of each query block to global memory; deterministic: after the key blocks before this one."""
    w = work_of(a, ticket)
    BM: gl.constexpr = a.S.BM
    DQC: gl.constexpr = dq_split(a.S)[1]
    BY_ROWS: gl.constexpr = a.S.BM == 128
    i = w.last - 1
    g = 0
    for u in range(0, (w.last - w.first) * a.group):
        plane = w.b * a.heads + w.kv_head * a.group + g
        block = plane * a.q_blocks + i
        s = u % a.S.dq_stages
        named_barrier("bar.sync", DQ_FULL + s, 288)
        at = a.SEMAPHORES + block
        if a.S.deterministic:
            while load_acquire(at) < w.n:
                pass
        for c in gl.static_range(2):
            if BY_ROWS:
                tma_add(a.dq, [block * BM + c * 64, 0], buf.dq.index(s * 2 + c))
            else:
                tma_add(a.dq, [block * BM, c * DQC], buf.dq.index(s * 2 + c))
        tma.store_wait(0)
        mbarrier.arrive(buf.dq_empty.index(s), count=1)
        if a.S.deterministic:
            bulk_writes_done()
            add_release(at)
        i, g = next_block(a, i, g)


@gluon.constexpr_function
def score_layout(S):
    """S^T and dP^T [64, BM] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.BM, 16])


@gluon.constexpr_function
def grad_layout(S):
    """dK and dV [64, D] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, S.D, 16])


@gluon.constexpr_function
def dq_layout(S):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dq_split(S)[1], 16])


@gluon.jit
def tile(buffer, n, STAGES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    return buffer.index(n % STAGES).reshape([ROWS, COLUMNS])


@gluon.jit
def start_scores(a, buf, u, s, C: gl.constexpr):
    """Starts S^T = K Q^T in the registers of `s`, whose values do not count."""
    BM: gl.constexpr = a.S.BM
    D: gl.constexpr = a.S.D
    q = tile(buf.q, u, a.S.q_stages, BM, D)
    mbarrier.wait(buf.q_full.index(u % a.S.q_stages), (u // a.S.q_stages) & 1)
    return warpgroup_mma(buf.k.index(C).reshape([64, D]), q.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def hide(a, p, i, lo):
    """P^T [64, BM] of query block i, 0 where a row does not see a key: key j is seen by rows from lo[j] on.

    A thread's columns are 8 m + j with few j, which the compiler does not know, and many m, which it does: each cell
    costs one comparison with a constant.
    """
    BM: gl.constexpr = a.S.BM
    column = gl.arange(0, BM, gl.SliceLayout(0, score_layout(a.S)))
    m8 = column & -8
    j = column & 7
    return gl.where(m8[None, :] >= (lo - i * BM)[:, None] - j[None, :], p, 0.0)


@gluon.jit
def step(a, buf, u, i, inner, dk, dv, last_ds, dead0, dead1, lo, C: gl.constexpr, FIRST: gl.constexpr):
    """Query block i, use u of the rings. With `late_dk` dK of the block before is under way until S is there.

    Products that start from nothing get registers of values that are no longer needed: zeros would have to be written
    while other products are under way, and the assembler would then wait for those.
    """
    BM: gl.constexpr = a.S.BM
    D: gl.constexpr = a.S.D
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, grad_layout(a.S), 2)
    DQC: gl.constexpr = dq_split(a.S)[1]
    BY_ROWS: gl.constexpr = a.S.BM == 128
    DS_STAGES: gl.constexpr = a.S.ds_stages
    s = start_scores(a, buf, u, dead0, C)
    do = tile(buf.do, u, a.S.do_stages, BM, D)
    mbarrier.wait(buf.do_full.index(u % a.S.do_stages), (u // a.S.do_stages) & 1)
    dp = warpgroup_mma(buf.v.index(C).reshape([64, D]), do.permute((1, 0)), dead1, use_acc=False, is_async=True)
    stats = buf.stats.index(u % a.S.q_stages)  # [1, 2 * BM]
    if a.S.late_dk and not FIRST:
        if a.S.ds_regs:
            x, dk, last_ds = warpgroup_mma_wait(1, deps=(s, dk, last_ds))
        else:
            x, dk = warpgroup_mma_wait(1, deps=(s, dk))
        named_barrier("bar.arrive", Q_EMPTY + (u - 1) % a.S.q_stages, 288)
    else:
        x = warpgroup_mma_wait(1, deps=(s,))
    minus_lse = stats.slice(0, BM, 1).load(score_layout(a.S))  # [1, BM]
    c = a.scale * LOG2E
    p = gl.exp2(gl.fma(x, gl.full_like(x, c), gl.zeros_like(x) + minus_lse))
    if a.S.masked:
        if i < inner:
            p = hide(a, p, i, lo)
    p16 = gl.convert_layout(p.to(a.q.dtype), OPERAND)
    if a.S.early_dv:
        dv = warpgroup_mma(p16, do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
    else:
        dp = warpgroup_mma_wait(0, deps=(dp,))
    delta = stats.slice(BM, BM, 1).load(score_layout(a.S))
    ds = p * (dp - delta)
    ds16 = ds.to(a.q.dtype)
    buf.ds.index(u % DS_STAGES * 2 + C).store(ds16)
    if a.S.ds_regs:
        last_ds = gl.convert_layout(ds16, OPERAND)
    if not a.S.early_dv:
        dv = warpgroup_mma(p16, do, dv, is_async=True)
    fence_async_shared()
    named_barrier("bar.sync", DS_READY, 256)
    if DQC == BM:
        dq = p
    else:
        dq = gl.zeros([64, DQC], gl.float32, dq_layout(a.S))
    for h in gl.static_range(2):
        half = buf.ds.index(u % DS_STAGES * 2 + h)  # [64, BM]
        k = buf.k.index(h).reshape([64, D])
        if BY_ROWS:
            dq = warpgroup_mma(half.slice(C * 64, 64, 1).permute((1, 0)), k, dq, use_acc=h > 0, is_async=True)
        else:
            dq = warpgroup_mma(half.permute((1, 0)), k.slice(C * DQC, DQC, 1), dq, use_acc=h > 0, is_async=True)
    q = tile(buf.q, u, a.S.q_stages, BM, D)
    if a.S.ds_regs:
        dk = warpgroup_mma(last_ds, q, dk, is_async=True)
    else:
        dk = warpgroup_mma(buf.ds.index(u % DS_STAGES * 2 + C), q, dk, is_async=True)
    dv, dq, p16 = warpgroup_mma_wait(1, deps=(dv, dq, p16))
    named_barrier("bar.arrive", DO_EMPTY + u % a.S.do_stages, 288)
    z = u % a.S.dq_stages
    mbarrier.wait(buf.dq_empty.index(z), ((u // a.S.dq_stages) & 1) ^ 1)
    buf.dq.index(z * 2 + C).store(dq)
    fence_async_shared()
    named_barrier("bar.arrive", DQ_FULL + z, 288)
    if not a.S.late_dk:
        dk, last_ds = warpgroup_mma_wait(0, deps=(dk, last_ds))
        named_barrier("bar.arrive", Q_EMPTY + u % a.S.q_stages, 288)
    if DQC == BM:
        dead0 = dq
    else:
        dead0 = p
    return dk, dv, last_ds, dead0, ds


@gluon.jit
def consume(a, buf, ticket, C: gl.constexpr):
    w = work_of(a, ticket)
    D: gl.constexpr = a.S.D
    BM: gl.constexpr = a.S.BM
    ROW: gl.constexpr = gl.SliceLayout(1, score_layout(a.S))
    key = w.n * 128 + C * 64 + gl.arange(0, 64, ROW)
    # The rows that see each key.
    lo = key * 0
    if a.S.causal:
        lo = key - a.q_offset
    lo = gl.where(key < a.kv_len, lo, 0x7FFFFFF)
    dk = gl.zeros([64, D], gl.float32, grad_layout(a.S))
    dv = gl.zeros([64, D], gl.float32, grad_layout(a.S))
    ds = gl.zeros([64, BM], a.q.dtype, gl.DotOperandLayout(0, grad_layout(a.S), 2))
    dead0 = gl.zeros([64, BM], gl.float32, score_layout(a.S))
    dead1 = gl.zeros([64, BM], gl.float32, score_layout(a.S))
    mbarrier.wait(buf.k_full.index(0), 0)
    mbarrier.wait(buf.v_full.index(0), 0)
    begin = 0
    i = w.last - 1
    g = 0
    if a.S.late_dk:
        dk, dv, ds, dead0, dead1 = step(a, buf, 0, i, w.inner, dk, dv, ds, dead0, dead1, lo, C, True)
        i, g = next_block(a, i, g)
        begin = 1
    for u in range(begin, (w.last - w.first) * a.group):
        dk, dv, ds, dead0, dead1 = step(a, buf, u, i, w.inner, dk, dv, ds, dead0, dead1, lo, C, False)
        i, g = next_block(a, i, g)
    if a.S.late_dk:
        dk, ds = warpgroup_mma_wait(0, deps=(dk, ds))
    # V is this consumer's alone by rows; both gradients leave through it.
    out = buf.v.index(C)
    flat = out.reshape([64, D])
    flat.store(dv.to(a.q.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(a.dv, [w.b, w.kv_head, w.n * 128 + C * 64, 0], out)
    tma.store_wait(0)
    gl.thread_barrier()
    flat.store((dk * a.scale).to(a.q.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(a.dk, [w.b, w.kv_head, w.n * 128 + C * 64, 0], out)
    tma.store_wait(0)


@gluon.jit
def consumer0(a, buf, ticket):
    consume(a, buf, ticket, 0)


@gluon.jit
def consumer1(a, buf, ticket):
    consume(a, buf, ticket, 1)


@gluon.jit(do_not_specialize=["heads", "group", "q_len", "kv_len", "q_blocks", "k_blocks", "q_offset"])
def backward(
    q, k, v, do, dk, dv, dq, stats, SEMAPHORES, COUNTER, heads, group, q_len, kv_len, q_blocks, k_blocks, q_offset,
    scale, S: gl.constexpr,
):  # fmt: skip
    a = BackwardArguments(
        q, k, v, do, dk, dv, dq, stats, SEMAPHORES, COUNTER, heads, group, q_len, kv_len, q_blocks, k_blocks, q_offset,
        scale, S,
    )  # fmt: skip
    ticket = gl.program_id(0)
    if S.deterministic:
        # Programs that wait for others must have started after them.
        ticket = gl.atomic_add(COUNTER, 1, sem="relaxed")
    buf = new_buffers(a)
    fence_async_shared()
    gl.warp_specialize(
        [(consumer0, (a, buf, ticket)), (consumer1, (a, buf, ticket)), (produce, (a, buf, ticket)),
         (reduce, (a, buf, ticket))],
        [4, 1, 1],
        [S.consumer_regs, S.producer_regs, S.producer_regs],
    )  # fmt: skip
