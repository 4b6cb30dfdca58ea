"""The kernel that is launched: one list of arguments for prefill and for its repair."""

from triton.experimental import gluon

from .arguments import Arguments
from .nonfinite import repair
from .prefill import prefill
from .signature import kernel_of

# Sizes change from call to call; kernels are not compiled anew for those that are 1 or multiples of 16.
PLAIN_INTS = [
    "o_b", "o_h", "o_l", "lse_b", "lse_h", "lse_l", "list_b", "list_h", "list_q", "list_n", "slopes_b",
    "batch", "heads", "group", "q_len", "kv_len", "total_q", "value_dim", "q_offset", "left", "right", "chunk",
    "section", "slots",
]  # fmt: skip


@gluon.jit
def body(a):
    if a.S.repairs:
        repair(a)
    else:
        prefill(a)


attend = kernel_of("attend", Arguments, body, PLAIN_INTS)
