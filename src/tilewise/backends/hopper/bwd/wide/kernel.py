"""Backward of wide heads on Hopper: one kernel, launched for dQ and for dK with dV. Nothing is accumulated in global
memory, so gradients are deterministic, and S and dP are computed twice.

    outer rows X, Y of a program (dQ: Q, dO; dK and dV: K, V); for each block of inner rows U, W (last first):
        S = X U', dP = Y W'                [64, BI] per consumer, in registers
        P = exp2(S c - lse), dS = P (dP - delta)
        dX += dS U, dV += P W              left operands from registers

Where a consumer's registers cannot hold dK and dV (`roles`), both consumers have the same 64 keys: the first computes
S, P and dV, the second dP and dK, with P through shared memory.

Partitions: two consumer warpgroups, a producer warp (TMA loads).
"""

from ....gpu.gluon import fence_async_shared, gl
from ...signature import gluon_kernel
from .arguments import WideArguments, new_buffers
from .consumer import consume
from .producer import produce
from .split import consume_split, new_chunk_buffers, produce_chunks


@gluon_kernel(WideArguments)
def wide_backward(a):
    index = gl.program_id(0)
    if a.S.chunks == 1:
        buf = new_buffers(a)
        fence_async_shared()
        gl.warp_specialize(
            [(consume, (a, buf, index, 0)), (consume, (a, buf, index, 1)), (produce, (a, buf, index))],
            [4, 1],
            [a.S.consumer_regs, a.S.producer_regs],
        )
    else:
        buf = new_chunk_buffers(a)
        fence_async_shared()
        gl.warp_specialize(
            [(consume_split, (a, buf, index, 0)), (consume_split, (a, buf, index, 1)),
             (produce_chunks, (a, buf, index))],
            [4, 1],
            [a.S.consumer_regs, a.S.producer_regs],
        )  # fmt: skip
