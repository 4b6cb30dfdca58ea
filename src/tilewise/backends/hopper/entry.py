"""The kernel that is launched: one list of arguments for prefill and for its repair."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .arguments import Arguments
from .prefill import prefill
from .repair import repair

# Sizes change from call to call; kernels are not compiled anew for those that are 1 or multiples of 16.
PLAIN_INTS = [
    "o_b", "o_h", "o_l", "lse_b", "lse_h", "lse_l", "list_b", "list_h", "list_q", "list_n", "slopes_b",
    "batch", "heads", "group", "q_len", "kv_len", "total_q", "value_dim", "q_offset", "left", "right", "chunk",
    "section", "slots",
]  # fmt: skip


@gluon.jit(do_not_specialize=PLAIN_INTS)
def attend(
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
    if S.repairs:
        repair(a)
    else:
        prefill(a)
