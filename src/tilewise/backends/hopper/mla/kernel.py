"""The latent decode kernel: a producer warp and two consumer warpgroups for each program."""

from ...gpu.gluon import fence_async_shared, gl, gluon
from ..signature import gluon_kernel
from .arguments import Arguments
from .consumer import consume
from .gather import gather, widen
from .pipeline import new_shared
from .producer import produce
from .tile_scheduler import Run, run_of


@gluon.jit
def consumer0(a, run, sh):
    consume(a, run, sh, 0)


@gluon.jit
def consumer1(a, run, sh):
    consume(a, run, sh, 1)


@gluon_kernel(Arguments)
def latent_decode(a):
    split = gl.program_id(0) // a.tiles
    seq, first, left, size = run_of(a, split)
    run = Run(seq, first, left, size, split, gl.program_id(0) % a.tiles)
    sh = new_shared(a)
    fence_async_shared()
    given = (a, run, sh)
    if a.S.fp8:
        gl.warp_specialize(
            [(consumer0, given), (consumer1, given), (widen, given)], [4, 4], [a.S.consumer_regs, a.S.producer_regs]
        )
    elif a.S.gather:
        gl.warp_specialize(
            [(consumer0, given), (consumer1, given), (gather, given)], [4, 4], [a.S.consumer_regs, a.S.producer_regs]
        )
    else:
        gl.warp_specialize(
            [(consumer0, given), (consumer1, given), (produce, given)], [4, 1], [a.S.consumer_regs, a.S.producer_regs]
        )
