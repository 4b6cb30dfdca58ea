"""A library's call that is timed beside ours, and helpers of the peers' files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ....core.options import as_window
from ...workloads import Inputs, Workload

OURS = "tilewise"
MOST_BYTES = {"cpu": 2 * 2**30, "cuda": 16 * 2**30}  # of a mask, of scores or of copies; larger calls are refused


@dataclass(frozen=True, slots=True)
class Candidate:
    """A library's call with the same output, or why there is none."""

    name: str
    call: Callable[[], torch.Tensor] | None = None
    refusal: str = ""


class Refused(Exception):
    """A library cannot express the call."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(reason)


def not_installed(module: str) -> str | None:
    """Why a module cannot be used, without importing it; None if it is installed."""
    try:
        return None if importlib.util.find_spec(module) else "not installed"
    except (ImportError, ValueError):
        return "not installed"


def refuse(name: str, **features: object) -> None:
    """Raises `Refused` if one of these is set; their names are what the library lacks."""
    for what, value in features.items():
        if value:
            raise Refused(name, f"it has no {what.replace('_', ' ')}")


def limit(name: str, what: str, size: int, device: torch.device) -> None:
    """Raises `Refused` if `size` bytes exceed `MOST_BYTES`."""
    if size > MOST_BYTES.get(device.type, 2**31):
        raise Refused(name, f"{what} would take {size / 2**30:.0f} GiB")


def dense_mask(case: Workload, x: Inputs) -> torch.Tensor:
    """The case's visible cells: bool, `[B, 1, 1 or Lq, Lk]`."""
    device = x.q.device
    lengths = torch.tensor([case.kv_len], device=device) if x.lengths is None else x.lengths
    lengths = lengths[:, None, None, None]
    kpos = torch.arange(case.kv_len, device=device)
    qpos = lengths - case.q_len + torch.arange(case.q_len, device=device)[:, None]  # [B, 1, Lq, 1]
    visible = kpos < lengths
    if case.causal:
        visible = visible & (kpos <= qpos)
    if case.window is not None:
        left, right = as_window(case.window)
        visible = visible if left is None else visible & (qpos - kpos <= left)
        visible = visible if right is None else visible & (kpos - qpos <= right)
    if case.chunk is not None:
        visible = visible & (kpos // case.chunk == qpos // case.chunk)
    mask = x.options.get("mask")
    if mask is not None:
        visible = visible & (mask if mask.dtype == torch.bool else mask != -torch.inf)
    return visible
