"""What passes between the warps of a latent decode program, by mbarriers or by hardware barriers (`named`).

Hardware barriers have no parity: nobody arrives twice before the other side has waited once
(tests/helpers/mla_machine.py). The producer waits for the last arrivals before it ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..bwd.sync import named_barrier

# Hardware barriers; warp_specialize takes those below 8.
READY = gl.constexpr(8)  # and 9: weights and maximum of a block are there, from one consumer to the other
SCORED = gl.constexpr(10)  # block 0, from consumer 0 to consumer 1
ROPE = gl.constexpr(11)  # the same to the producer
FREE = gl.constexpr(12)  # to 15: half a block, from a consumer to the producer
TWO = gl.constexpr(256)  # threads of both consumers
FILL = gl.constexpr(160)  # of a consumer and the producer


@gluon.jit
def stay(sh, u, half: gl.constexpr):
    """A wait for half a block that has been there for long: the assembler moves nothing across its branch."""
    EACH: gl.constexpr = sh.S.pieces // 2
    mbarrier.wait(sh.full[half * EACH], u & 1)


@gluon.jit
def arrive_free(sh, half: gl.constexpr):
    if sh.S.named:
        named_barrier("bar.arrive", FREE + half, FILL)
    else:
        mbarrier.arrive(sh.free[half], count=1)


@gluon.jit
def wait_free(sh, half: gl.constexpr, u):
    """Until the half of pair u - 1 is not needed any more."""
    if sh.S.named:
        if u > 0:
            named_barrier("bar.sync", FREE + half, FILL)
    else:
        mbarrier.wait(sh.free[half], (u & 1) ^ 1)


@gluon.jit
def arrive_scored(sh):
    if sh.S.named:
        named_barrier("bar.arrive", ROPE, FILL)
        if sh.S.gate > 0:
            named_barrier("bar.arrive", SCORED, TWO)
    else:
        mbarrier.arrive(sh.scored.index(0), count=1)


@gluon.jit
def wait_scored(sh, u):
    """Consumer 1, until S of block 0 of pair u is complete."""
    if sh.S.named:
        named_barrier("bar.sync", SCORED, TWO)
    else:
        mbarrier.wait(sh.scored.index(0), u & 1)


@gluon.jit
def wait_rope(sh, u):
    """The producer, until the rope columns of block 0 of pair u - 1 are not needed any more."""
    if sh.S.named:
        if u > 0:
            named_barrier("bar.sync", ROPE, FILL)
    else:
        mbarrier.wait(sh.scored.index(0), (u & 1) ^ 1)


@gluon.jit
def arrive_ready(sh, b: gl.constexpr):
    if sh.S.named:
        named_barrier("bar.arrive", READY + b, TWO)
    else:
        mbarrier.arrive(sh.ready[b], count=1)


@gluon.jit
def wait_ready(sh, b: gl.constexpr, u):
    if sh.S.named:
        named_barrier("bar.sync", READY + b, TWO)
    else:
        mbarrier.wait(sh.ready[b], u & 1)


@gluon.jit
def wait_last(sh, u):
    """The producer, at its end: hardware barriers are left as they were found."""
    if sh.S.named:
        wait_rope(sh, u)
        for half in gl.static_range(4):
            wait_free(sh, half, u)


@gluon.constexpr_function
def prefetch_text(size):
    return (
        "{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; "
        f"@p cp.async.bulk.prefetch.L2.global [$1], {size}; mov.b32 $0, 0; }}"
    )


@gluon.jit
def prefetch_bytes(pointer, SIZE: gl.constexpr):
    """Brings memory to L2, by one lane."""
    TEXT: gl.constexpr = prefetch_text(SIZE)
    gl.inline_asm_elementwise(TEXT, "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1)
