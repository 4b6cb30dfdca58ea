"""Counters by which the programs of a call find out who is last: zero before a call and after it.

Calls of one stream run one after the other and share them; those of other streams have their own. A captured call has
none, for it may be replayed beside any other.
"""

from __future__ import annotations

import torch


class Tickets:
    """The counters of all calls of a plan."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.by_stream: dict[int, torch.Tensor] = {}

    def take(self, device: torch.device) -> torch.Tensor:
        """Counters for a call on the current stream."""
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        counters = self.by_stream.get(stream)
        if counters is None:
            counters = self.by_stream[stream] = torch.zeros(self.count, dtype=torch.int32, device=device)
        return counters


def capturing() -> bool:
    """Whether the current stream's calls go into a CUDA graph."""
    return torch.cuda.is_available() and torch._C._cuda_isCurrentStreamCapturing()
