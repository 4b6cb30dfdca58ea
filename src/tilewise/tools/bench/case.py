"""What a suite is made of: rows with a bar, the cases that a row is measured by, and their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .measure import Timing, geometric_mean


@dataclass(frozen=True, slots=True)
class Row:
    """One bar to reach: a factor over a peer, or a share of a speed."""

    name: str
    against: str
    bar: float  # of the geometric mean over the row's cases
    least: float = 0.0  # of each case
    is_share: bool = False  # shown in percent


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case with its tensors in place."""

    ours: Callable[[], torch.Tensor]
    peer: Callable[[], object]
    error: Callable[[torch.Tensor], float]  # the largest, against float64
    allowed: float  # of that error
    flops: int
    moved: int  # bytes that ours reads and writes at least
    workspace: int  # bytes
    peer_read: int = 0  # bytes that the peer reads: then it is speeds of reading that are compared, not times
    peer_same: bool = True  # the peer computes the same output


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement; tensors are made by `prepare`, when its turn comes."""

    row: str
    name: str
    prepare: Callable[[], Prepared]
    needs_half_sdpa: bool = False  # which ends the process on some machines


@dataclass(frozen=True, slots=True)
class Measured:
    """A case's result."""

    row: str
    name: str
    ours: Timing
    peer: Timing
    ratio: float  # how many times as fast as the peer
    error: float
    allowed: float
    peer_error: float | None
    gflops: float  # GFLOP/s of ours
    gbytes: float  # GB/s of ours
    workspace: int

    @property
    def is_right(self) -> bool:
        return self.error <= self.allowed  # False for NaN


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row and what was measured for it."""

    row: Row
    cells: list[Measured] = field(default_factory=list)

    @property
    def value(self) -> float | None:
        """The geometric mean over the cells; None if there are none."""
        return geometric_mean([cell.ratio for cell in self.cells]) if self.cells else None

    @property
    def worst(self) -> Measured | None:
        return min(self.cells, key=lambda cell: cell.ratio, default=None)

    @property
    def verdict(self) -> str:
        if self.value is None or self.worst is None:
            return "not measured"
        return "reached" if self.value >= self.row.bar and self.worst.ratio >= self.row.least else "missed"
