"""How time, memory and tiles grow with the length: exponents fitted to a record of `bench --scale`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .record import Cell, Record
from .report import aligned, time_text

LINEAR = 1.2  # largest exponent of time over visible cells
FLAT = 0.2  # largest exponent of memory over length, or
SMALL = 4 * 2**20  # bytes by which memory may grow in all
LONG = 4  # lengths that are fitted, the longest ones: short calls are mostly overhead


@dataclass(frozen=True, slots=True)
class Growth:
    """The exponents of one kind of mask; None if there are too few points."""

    kind: str
    time: float | None  # over length
    cells: float | None  # of time over visible cells
    tiles: float | None  # over length
    memory: float | None  # over length
    memory_bytes: int | None  # at the longest
    memory_growth: int | None  # bytes, from the shortest to the longest

    @property
    def is_linear(self) -> bool | None:
        return None if self.cells is None else self.cells <= LINEAR

    @property
    def is_flat(self) -> bool | None:
        if self.memory_growth is None:
            return None
        return self.memory_growth <= SMALL or (self.memory is not None and self.memory <= FLAT)


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The slope of log y over log x, by least squares; None for fewer than two points.

    >>> exponent([1, 2, 4], [3, 12, 48])
    2.0
    """
    points = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True) if x > 0 and y > 0]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else None


def growth(kind: str, cells: Sequence[Cell]) -> Growth:
    """The exponents of the longest cases of one kind."""
    cells = sorted((c for c in cells if c.ours is not None), key=lambda c: c.x or 0)
    last = cells[-LONG:]
    lengths = [c.x or 0 for c in last]
    seconds = [c.ours.timing.seconds for c in last if c.ours]
    memory = [c.memory for c in cells if c.memory is not None]
    known = [c for c in last if c.memory]
    return Growth(
        kind,
        exponent(lengths, seconds),
        exponent([c.cells for c in last], seconds),
        exponent(lengths, [c.tiles for c in last]),
        exponent([c.x or 0 for c in known], [c.memory or 0 for c in known]),
        memory[-1] if memory else None,
        memory[-1] - memory[0] if memory else None,
    )


def growths(record: Record) -> list[Growth]:
    return [growth(kind, cells) for kind, cells in record.groups.items()]


def growth_table(record: Record) -> list[str]:
    """A table of exponents: whether time is linear in visible cells and memory constant."""
    lines = [["mask", "longest", "time", "time ~ L^", "time ~ cells^", "tiles ~ L^", "memory", ""]]
    for g in growths(record):
        done = [(c.x or 0, c.name, c.ours.timing.seconds) for c in record.groups[g.kind] if c.ours is not None]
        if not done:
            continue
        _, longest, seconds = max(done)
        verdicts = [
            {True: "linear in cells", False: "NOT linear in cells", None: ""}[g.is_linear],
            {True: "memory flat", False: "memory GROWS", None: ""}[g.is_flat],
        ]
        lines.append([
            g.kind, longest, time_text(seconds), _text(g.time), _text(g.cells), _text(g.tiles),
            "-" if g.memory_bytes is None else f"{g.memory_bytes / 2**20:.1f} MiB",
            ", ".join(filter(None, verdicts)),
        ])  # fmt: skip
    return aligned(lines)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
