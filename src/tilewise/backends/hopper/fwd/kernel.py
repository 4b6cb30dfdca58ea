"""Prefill on Hopper: persistent programs of a producer warp and two or three consumer warpgroups.

    HBM/L2 --TMA--> rings of K and V tiles in shared memory --wgmma--> S, P, O in registers --TMA--> HBM

Files: tile_scheduler.py (which work tile next), producer.py, consumer.py, pipeline.py (the rings between those two),
softmax.py (from S to P).
"""

from ...gpu.gluon import gl, gluon
from ..signature import gluon_kernel
from .arguments import Arguments
from .consumer import consume
from .nonfinite import fixup
from .pipeline import new_queries, new_ring, partition
from .producer import produce
from .tile_scheduler import new_scheduler


@gluon.jit
def prefill(a):
    CONSUMERS: gl.constexpr = a.S.consumers
    scheduler = new_scheduler(a.COUNTER, CONSUMERS)
    queries = new_queries(a.q, a.S.q_stages, CONSUMERS, a.S.chunks, a.S.out_aliases_q_chunks)
    keys = new_ring(a.k, a.S.k_stages, CONSUMERS)
    values = keys
    if a.S.v_stages > 0:
        values = new_ring(a.v, a.S.v_stages, CONSUMERS)
    if a.S.out_aliases_q_chunks == 0:
        outs = gl.allocate_shared_memory(a.o.dtype, [CONSUMERS, 1, 1, 64, a.S.out_columns], a.o.layout)
    else:
        outs = queries.tiles
    partition(a, consume, produce, scheduler, queries, keys, values, outs)


@gluon_kernel(Arguments)
def fwd_kernel(a):
    if a.S.fixup:
        fixup(a)
    else:
        prefill(a)
