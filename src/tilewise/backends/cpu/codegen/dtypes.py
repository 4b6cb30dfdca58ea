"""Storage types of tensors as the kernels know them: `dtypes.INT8` in kernel code, `CODES["int8"]` in Python."""

# mypy: ignore-errors
from __future__ import annotations

import numpy as np
import torch
from numba.extending import register_jitable

from ....core.storage import PLAIN

CODES = {name: code for code, name in enumerate(("f32", "f16", "bf16", "int8", "int4", "fp8_e4m3", "bool"))}
# np.int64 and not int: Numba compiles a function anew for every literal that it is called with.
F32, F16, BF16, INT8, INT4, FP8_E4M3, BOOL = map(np.int64, CODES.values())
STORED = tuple(CODES)[:-1]  # those of K and V
NAMES = {dtype: stored.name for dtype, stored in PLAIN.items()} | {torch.bool: "bool"}


@register_jitable
def is_quantised(dtype):
    """Whether elements have scales."""
    return INT8 <= dtype <= FP8_E4M3
