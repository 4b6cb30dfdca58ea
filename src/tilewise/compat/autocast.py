"""Autocast for drop-ins of torch functions, which torch would call with the autocast dtype."""

from __future__ import annotations

from typing import TypeVar

import torch

MaybeTensor = TypeVar("MaybeTensor", bound=torch.Tensor | None)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def autocast(like: torch.Tensor, *tensors: MaybeTensor) -> tuple[MaybeTensor, ...]:
    """The tensors in autocast's dtype if it is on for the device of `like`; float64 and bool are not changed."""
    device = like.device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x is None or x.dtype not in FLOATS else x.to(dtype) for x in tensors)  # type: ignore[misc]
