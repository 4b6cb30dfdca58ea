"""What the heuristics need to know of a device."""

from __future__ import annotations

from functools import cache

import torch

PROCESSORS_OF_AN_H200 = 132


@cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return PROCESSORS_OF_AN_H200
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def arch_of(device: torch.device) -> int:
    """The compute capability, 90 for an H200; 0 where there is no PTX, as on AMD's GPUs and in the interpreter."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
