"""The parameter struct of a kernel: 64-bit numbers, whose address it gets beside that of its scratch memory.

Strides are in bytes. An address of 0 means that the tensor is not there.
"""

from __future__ import annotations

import numpy as np

# The tensors of a call: address, strides over the batch (or pages), heads and rows
PER_CALL = """
q q_b q_h q_l
k k_b k_h k_l
v v_b v_h v_l
out out_b out_h out_l
lse lse_b lse_h lse_l
k_scales k_scales_b k_scales_h k_scales_l
v_scales v_scales_b v_scales_h v_scales_l
k_scales_code v_scales_code
mask mask_b mask_h mask_q mask_k
states states_b states_h states_q states_k
slopes slopes_b slopes_h
sinks kv_lengths q_offsets cu_q cu_k
table table_b
""".split()
PER_PROBLEM = """
q_code k_code v_code k_group v_group k_row v_row mask_code page
batch heads kv_heads q_len kv_len head_dim value_dim
causal left right chunk offset
tile_rows tile_keys split_size split_few partial_bytes keep_partials head_batch prefetch_distance
worker combine parallel thread_main threads decode prefill prefill_amx tile_config
qk qk_f32 pv pv_f32 amx_qk amx_pv vnni_qk vnni_pv
work_items counter partials
""".split()
REAL = ["scale", "softcap"]
PARAMS = np.dtype([(name, "i8") for name in PER_CALL + PER_PROBLEM] + [(name, "f8") for name in REAL])
INDEX = {name: i for i, name in enumerate(PARAMS.names or ())}
# Four more numbers behind the struct: the next work item, how many there are, whether one was left undone by AMX,
# how many are done.
COUNTER = len(INDEX)
COUNT, UNDONE, DONE, NUMBERS = COUNTER + 1, COUNTER + 2, COUNTER + 3, COUNTER + 4
BLOCK_BYTES = -(-8 * NUMBERS // 64) * 64
TASK_BYTES = 64  # of `thread_main`'s argument
NO_LIMIT = 1 << 40  # a window side without a limit
END = 1 << 41  # an offset that stands for "the queries are the last positions"
MASK_BOOL = 8  # a mask's code; float masks have the code of their dtype
# A work item: `rows` query rows from `row` on, of one batch row and KV head, over keys `start` to `end`. With
# `splits` above 1 its result is a split-KV partial, to be combined with those of the other splits, each
# `kv_heads` items after the one before.
WORK_ITEM = np.dtype([(name, "i8") for name in ("b", "head", "row", "rows", "start", "end", "split", "splits")])
