"""Prefill on Hopper: a producer warp and two or three consumer warpgroups, each program doing tile after tile.

    HBM/L2 --TMA--> rings of K and V tiles in shared memory --wgmma--> S, P, O in registers --TMA--> HBM

The pieces: schedule.py (which tile next), producer.py, consumer.py, pipeline.py (what lies between those two),
softmax.py (from S to P).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .arguments import Arguments
from .consumer import consume
from .pipeline import new_queries, new_ring
from .producer import produce
from .schedule import new_slots

# Sizes change from call to call; kernels are not compiled anew for those that are 1 or multiples of 16.
PLAIN_INTS = [
    "o_b", "o_h", "o_l", "lse_b", "lse_h", "lse_l", "list_b", "list_h", "list_q", "list_n", "slopes_b",
    "batch", "heads", "group", "q_len", "kv_len", "total_q", "value_dim", "q_offset", "left", "right", "chunk",
    "section", "slots",
]  # fmt: skip


@gluon.jit
def consumer0(a, slots, queries, keys, values, outs):
    consume(a, slots, queries, keys, values, outs, 0)


@gluon.jit
def consumer1(a, slots, queries, keys, values, outs):
    consume(a, slots, queries, keys, values, outs, 1)


@gluon.jit
def consumer2(a, slots, queries, keys, values, outs):
    consume(a, slots, queries, keys, values, outs, 2)


@gluon.jit(do_not_specialize=PLAIN_INTS)
def prefill(
    q, k, v, o, OUT, LSE, FLAGS, COUNTER, KV_LENGTHS, Q_OFFSET, CU_Q, CU_K, ORDER, START, SLOPES, SINKS, MASK,
    LIST, RANK, o_b, o_h, o_l, lse_b, lse_h, lse_l, mask_b, mask_h, mask_q, mask_k, list_b, list_h, list_q, list_n,
    slopes_b, batch, heads, group, q_len, kv_len, total_q, value_dim, q_offset, scale, softcap, left, right, chunk,
    section, slots,
    S: gl.constexpr,
):  # fmt: skip
    a = Arguments(
        q, k, v, o, OUT, LSE, FLAGS, COUNTER, KV_LENGTHS, Q_OFFSET, CU_Q, CU_K, ORDER, START, SLOPES, SINKS, MASK,
        LIST, RANK, o_b, o_h, o_l, lse_b, lse_h, lse_l, mask_b, mask_h, mask_q, mask_k, list_b, list_h, list_q, list_n,
        slopes_b, batch, heads, group, q_len, kv_len, total_q, value_dim, q_offset, scale, softcap, left, right, chunk,
        section, slots, S,
    )  # fmt: skip
    CONSUMERS: gl.constexpr = S.consumers
    slots = new_slots(COUNTER, CONSUMERS)
    queries = new_queries(q, S.q_stages, CONSUMERS, S.chunks)
    keys = new_ring(k, S.k_stages, CONSUMERS)
    values = new_ring(v, S.v_stages, CONSUMERS)
    if S.staged == "own":
        outs = gl.allocate_shared_memory(o.dtype, [CONSUMERS, 1, 1, 64, S.out_columns], o.layout)
    else:
        outs = queries.tiles
    fence_async_shared()
    shared = (a, slots, queries, keys, values, outs)
    producing = (a, slots, queries, keys, values)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(consumer0, shared), (consumer1, shared), (produce, producing)],
            [4, 1],
            [S.consumer_regs, S.producer_regs],
        )
    else:
        gl.warp_specialize(
            [(consumer0, shared), (consumer1, shared), (consumer2, shared), (produce, producing)],
            [4, 4, 1],
            [S.consumer_regs, S.consumer_regs, S.producer_regs],
        )
