"""Backward on Hopper in one kernel: dK and dV of 128 keys stay in registers, dQ is accumulated in global memory.

    for each query block i that sees the key block (last first):
        S^T = K Q^T, dP^T = V dO^T         [64, BM] per consumer, in registers
        P^T = exp2(S^T c - lse), dS^T = P^T (dP^T - delta)
        dV += P^T dO, dK += dS^T Q         left operands from registers
        dQ_i = dS K                        dS through shared memory, columns or rows split over the consumers
        reducers add dQ_i to global memory by TMA reduce-add, in the order of key blocks

Partitions: two consumer warpgroups of 64 keys, a producer warp (TMA loads), two reducer warps (TMA reduce-add),
optionally a converter warp (dQ to its dtype).
"""

from ...gpu.gluon import fence_async_shared, gl
from ..signature import gluon_kernel
from .arguments import BackwardArguments, new_buffers
from .consumer import consume
from .converter import convert_all
from .producer import produce
from .reducer import reduce


@gluon_kernel(BackwardArguments)
def backward(a):
    tile_index = gl.program_id(0)
    if not a.S.persistent:
        # Drawn from a counter: a program may wait only for programs that started before it.
        tile_index = gl.atomic_add(a.COUNTER, 1, sem="relaxed")
    buf = new_buffers(a)
    fence_async_shared()
    if a.S.converts:
        gl.warp_specialize(
            [(consume, (a, buf, tile_index, 0)), (consume, (a, buf, tile_index, 1)), (produce, (a, buf, tile_index)),
             (reduce, (a, buf, tile_index, 0)), (reduce, (a, buf, tile_index, 1)), (convert_all, (a, buf))],
            [4, 1, 1, 1, 1],
            [a.S.consumer_regs, a.S.producer_regs, a.S.producer_regs, a.S.producer_regs, a.S.producer_regs],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(consume, (a, buf, tile_index, 0)), (consume, (a, buf, tile_index, 1)), (produce, (a, buf, tile_index)),
             (reduce, (a, buf, tile_index, 0)), (reduce, (a, buf, tile_index, 1))],
            [4, 1, 1, 1],
            [a.S.consumer_regs, a.S.producer_regs, a.S.producer_regs, a.S.producer_regs],
        )  # fmt: skip
