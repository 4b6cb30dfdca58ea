"""Names of the types that K, V and queries are given in: short ones, and whatever else people call them."""

from __future__ import annotations

from typing import Any

import torch

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
OTHER_NAMES = {
    "float32": "f32", "float": "f32", "fp32": "f32", "single": "f32",
    "float16": "f16", "half": "f16", "fp16": "f16",
    "bfloat16": "bf16",
    "fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e4m3": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3",
}  # fmt: skip


def short_name(name: Any) -> Any:
    """The short name of a type, by any of its names or as torch's; what is no name comes back as it is.

    >>> short_name("float16"), short_name("torch.bfloat16"), short_name("half"), short_name(torch.float32)
    ('f16', 'bf16', 'f16', 'f32')
    >>> short_name("int8"), short_name("f64"), short_name(None)
    ('int8', 'f64', None)
    """
    if isinstance(name, torch.dtype):
        name = str(name)
    if not isinstance(name, str):
        return name
    plain = name.lower().removeprefix("torch.")
    return OTHER_NAMES.get(plain, plain)
