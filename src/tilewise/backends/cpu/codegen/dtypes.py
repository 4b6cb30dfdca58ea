"""Storage types of tensors as the kernels know them: `dtypes.INT8` in kernel code, `CODES["int8"]` in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.extending import register_jitable

from ....core.storage import PLAIN
from .formats import DECODE, ENCODE

LATENT_NAME = "fp8_latent"  # rows hold their scales: converted as a whole, never read in place
CODES = {name: code for code, name in enumerate((*DECODE, "bool", LATENT_NAME))}
# np.int64, not int: Numba would compile a function again for every literal argument.
F32, F16, BF16, INT8, INT4, BOOL = (np.int64(CODES[name]) for name in ("f32", "f16", "bf16", "int8", "int4", "bool"))
FP8, LATENT = np.int64(CODES["fp8_e4m3"]), np.int64(CODES[LATENT_NAME])
STORED = (*DECODE, LATENT_NAME)  # of K and V
PACKED = tuple(np.int64(CODES[name]) for name, (_, parts) in DECODE.items() if len(parts) == 2)
FIRST_QUANTISED = np.int64(min(CODES[name] for name in ENCODE))
NAMES = {dtype: stored.name for dtype, stored in PLAIN.items()} | {torch.bool: "bool"}


@register_jitable
def is_quantised(dtype: Any) -> Any:
    """Whether there are scales, in a tensor of their own."""
    return FIRST_QUANTISED <= dtype < BOOL


@register_jitable
def is_packed(dtype: Any) -> Any:
    """Whether one stored number holds two elements."""
    return dtype in PACKED
