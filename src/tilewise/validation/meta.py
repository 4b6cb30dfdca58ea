"""Calls over meta tensors: their operators do no more than give shapes, so what has a form is checked before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.tracing import is_wrapper


def is_meta(x: Any) -> bool:
    """Whether it is on meta, and no FakeTensor or other wrapper."""
    return isinstance(x, torch.Tensor) and x.is_meta and not is_wrapper(x)


def checkable(options: dict[str, Any], longest: Sequence[str]) -> dict[str, Any] | None:
    """The options for a check that reads no values. None where a mask has the size of the longest packed sequence, and
    none of `longest` says how long that is.
    """
    masked = options.get("mask") is not None or options.get("tree_mask") is not None
    if masked and any(options.get(name) is None for name in longest):
        return None
    return options | {"validate": False} if options.get("validate") is True else options
