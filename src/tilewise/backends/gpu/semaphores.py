"""Semaphores by which the programs of a call find the last-arriver: counters, zero before a call and after it.

Concurrent calls must not share them; calls of one stream run one after the other, and do. A captured call may be
replayed at any time, so it gets its own counters. They are allocated beforehand: cleared inside a capture, they would
be cleared by every replay.
"""

from __future__ import annotations

from threading import Thread

import torch

from ...core.private import torch as private

SPARE = 64  # captured calls for which counters are allocated in advance
_kept: list[torch.Tensor] = []  # counters of captured calls: a graph may outlive all other references to them


class Semaphores:
    """The counters of all calls of a plan; `spare` sets are for captured calls."""

    def __init__(self, count: int, spare: int = SPARE) -> None:
        self.count, self.sets = count, 1 + spare
        self.by_stream: dict[int, torch.Tensor] = {}
        self.spare: list[torch.Tensor] = []

    def take(self, device: torch.device) -> torch.Tensor:
        """Counters for one call on the current stream."""
        if device.type != "cuda":
            return torch.zeros(self.count, dtype=torch.int32, device=device)
        if private.is_capturing():
            counters = self.spare.pop() if self.spare else self.zeros(1, device)[0]
            _kept.append(counters)
            return counters
        stream = private.current_stream(device.index)
        known = self.by_stream.get(stream)
        if known is None:
            known, *spare = self.lasting(device)
            self.by_stream[stream] = known
            self.spare += spare
        return known

    def address(self, stream: int, device: torch.device) -> int:
        """The address of the counters for one call on this stream, the current one."""
        known = None if private.is_capturing() else self.by_stream.get(stream)
        return (self.take(device) if known is None else known).data_ptr()

    def lasting(self, device: torch.device) -> list[torch.Tensor]:
        """Allocates all sets, in a separate thread: allocations of this one may come from the pool of a CUDA graph that
        `torch.compile` is about to capture, where nothing may persist.
        """
        made: list[torch.Tensor] = []

        def make() -> None:
            made.extend(self.zeros(self.sets, device))
            torch.cuda.synchronize(device)  # another stream will use them, perhaps in a capture that follows at once

        thread = Thread(target=make)
        thread.start()
        thread.join()
        if not made:
            raise torch.OutOfMemoryError(f"no memory for {self.sets} x {self.count} counters")
        return made

    def zeros(self, sets: int, device: torch.device) -> list[torch.Tensor]:
        """Sets of counters, each aligned to 16 bytes."""
        return list(torch.zeros(sets, -(-self.count // 4) * 4, dtype=torch.int32, device=device).unbind(0))


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and private.is_capturing()
