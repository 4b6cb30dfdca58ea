"""The backward kernels' arguments, declared once: signatures are made from these names, and a launch fills them."""

from __future__ import annotations

# Pointer arguments, and the fields of `BackwardTensors` or of its forward `Tensors` that they come from.
TENSORS = {
    "Q": "q", "K": "k", "V": "v", "LSE": "lse", "MASK": "mask", "TREE": "tree_mask", "SLOPES": "alibi_slopes",
    "PLACES": "places", "Q_BIAS": "q_bias", "K_BIAS": "k_bias",
    "KV_LENGTHS": "kv_lengths", "Q_OFFSET": "q_offset", "CU_Q": "cu_seqlens_q", "CU_K": "cu_seqlens_k", "OUT": "out",
    "SINKS": "sinks", "SEED": "dropout_seed",
}  # fmt: skip
GRADIENTS = {
    "DOUT": "dout", "DQ": "dq", "DK": "dk", "DV": "dv", "DMASK": "dmask", "DLSE": "dlse", "DSLOPES": "dalibi_slopes",
    "DQ_BIAS": "dq_bias", "DK_BIAS": "dk_bias",
}  # fmt: skip
ROWS_ONLY = ("OUT", "SINKS", "DLSE", "DSLOPES")  # read or written by the kernels of `rows.py` alone
WORKSPACES = ("DELTA", "DROWS", "FLAGS", "LIST", "RANK", "LOADS")
STRIDES = {  # the dims of each tensor whose strides are passed
    "q": "bhl", "k": "bhl", "v": "bhl", "do": "bhl", "lse": "bhl", "dq": "bhl", "dk": "bhl", "dv": "bhl",
    "mask": "bhqk", "dmask": "bhqk", "list": "bhqn", "slopes": "b", "tree": "bq", "qb": "bhl", "kb": "bhl",
}  # fmt: skip
SCALARS = (
    "batch", "heads", "rows", "q_len", "kv_len", "total_q", "total_k", "q_offset", "scale", "softcap", "rules",
    "swizzle", "mask_heads", "tiles_q", "tiles_k",
)  # fmt: skip
SIZES = [name for name in SCALARS if name not in ("scale", "softcap")]  # not specialised for 1 or multiples of 16
NAMES = [
    *(name for name in (*TENSORS, *GRADIENTS) if name not in ROWS_ONLY), *WORKSPACES,
    *(f"{name}_{dim}" for name, dims in STRIDES.items() for dim in dims), *SCALARS,
]  # fmt: skip
