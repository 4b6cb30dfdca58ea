"""Synchronisation that Gluon does not expose: named barriers, semaphores in global memory."""

from ...gpu.gluon import gl, gluon

# Named barriers; warp_specialize uses those below 6.
DS_READY = gl.constexpr(8)  # both consumers have stored dS
Q_EMPTY = gl.constexpr(9)  # and 10: by stage
DO_EMPTY = gl.constexpr(11)  # and 12
DQ_FULL = gl.constexpr(13)  # and 14
DS_EMPTY = gl.constexpr(6)  # and 7, by consumer: the other one has read its dS; with a mask 6 alone: both have
SCORES_STARTED = gl.constexpr(7)  # with a mask: by the first consumer
MASK_EMPTY = gl.constexpr(15)


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
    """Waits until this warp's bulk reductions are complete in global memory (`tma_store_wait` waits for reads only)."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.b32 $0, 0;",
        "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fence_async_global():
    """Makes writes of others that this warp has acquired visible to its TMA copies too."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def add_release(pointer):
    """Adds 1 with release semantics: after all writes of this warp."""
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


@gluon.jit
def load_relaxed(pointer):
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def nap():
    gl.inline_asm_elementwise(
        "nanosleep.u32 200; mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for(pointer, least, LONG: gl.constexpr):
    """Waits until a semaphore is at least `least`; LONG: sleeps between polls.

    An acquire load invalidates the L1 cache of its SM, whose memory the consumers work in: polls are relaxed, and an
    acquire load follows at the end.
    """
    if LONG:
        while load_relaxed(pointer) < least:
            nap()
        load_acquire(pointer)
    else:
        if load_acquire(pointer) < least:
            while load_relaxed(pointer) < least:
                pass
            load_acquire(pointer)
