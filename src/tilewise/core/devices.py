"""Devices as callers name them."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidArgument


def as_device(device: Any) -> torch.device:
    """A device that tensors can be made on, with its number; None is torch's default."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, TypeError, RuntimeError, ValueError) as error:  # the first: torch without CUDA
        reason = str(error).partition("\n")[0]
        raise InvalidArgument("device", repr(device), "a device that torch has here", reason) from None
