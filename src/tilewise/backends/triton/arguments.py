"""The forward kernel's arguments, declared once: its signature is made from these names, and a launch fills them."""

from __future__ import annotations

# Pointer arguments, and the fields of `Tensors` that they come from.
TENSORS = {
    "Q": "q", "K": "k", "V": "v", "OUT": "out", "LSE": "lse", "K_SCALES": "k_scales", "V_SCALES": "v_scales",
    "MASK": "mask", "TREE": "tree_mask", "POSITIONS": "positions", "SLOPES": "alibi_slopes", "Q_BIAS": "q_bias",
    "K_BIAS": "k_bias", "SINKS": "sinks", "SEED": "dropout_seed", "PLACES": "places", "INDICES": "key_indices",
    "KV_LENGTHS": "kv_lengths", "Q_OFFSET": "q_offset", "CU_Q": "cu_seqlens_q", "CU_K": "cu_seqlens_k",
    "TABLE": "block_table",
}  # fmt: skip
WORKSPACES = ("PARTIAL", "PARTIAL_ML", "SEMAPHORES", "FLAGS", "LIST", "RANK", "ORDER")
STRIDES = {  # the dims of each tensor whose strides are passed
    "q": "bhl", "k": "bhl", "v": "bhl", "o": "bhl", "lse": "bhl", "ks": "bhl", "vs": "bhl", "mask": "bhqk",
    "list": "bhqn", "slopes": "b", "tree": "bq", "positions": "b", "qb": "bhl", "kb": "bhl", "table": "b",
    "indices": "bhl",
}  # fmt: skip
SCALARS = (
    "batch", "head_blocks", "q_len", "kv_len", "total_q", "q_offset", "scale", "softcap", "rules", "swizzle", "splits",
    "split_tiles", "chosen_keys",
)  # fmt: skip
SIZES = [name for name in SCALARS if name not in ("scale", "softcap")]  # not specialised for 1 or multiples of 16
NAMES = [*TENSORS, *WORKSPACES, *(f"{name}_{dim}" for name, dims in STRIDES.items() for dim in dims), *SCALARS]
