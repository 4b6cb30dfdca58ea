"""The `device` argument."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidArgument


def as_device(device: Any) -> torch.device:
    """The torch device, with its index, that `device` names; None is torch's default. Checks that it can be used."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, TypeError, RuntimeError, ValueError) as error:  # AssertionError: torch without CUDA
        reason = str(error).partition("\n")[0]
        raise InvalidArgument("device", repr(device), "a device that torch has here", reason) from None
