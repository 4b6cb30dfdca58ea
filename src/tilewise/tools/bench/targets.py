"""Targets: the required results of the rows of the suite `cpu`, and the measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .measure import geometric_mean
from .record import Cell, Record
from .report import aligned, ratio_text


@dataclass(frozen=True, slots=True)
class Row:
    """One bar to reach: a factor over a peer, or a share of a speed."""

    name: str
    against: str
    bar: float  # of the geometric mean over the row's cases
    least: float = 0.0  # of each case
    is_share: bool = False  # shown in percent

    def describe(self, ratio: float) -> str:
        """A ratio in words: times as fast as the row's peer, or a share of the read speed."""
        return f"{ratio_text(ratio, self.is_share)} {'of the' if self.is_share else 'as fast as'} {self.against}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row and its measured ratios."""

    row: Row
    cells: list[Cell] = field(default_factory=list)

    @property
    def value(self) -> float | None:
        """The geometric mean over the cells; None if there are none."""
        return geometric_mean([cell.over_peer for cell in self.cells]) if self.cells else None

    @property
    def worst(self) -> Cell | None:
        return min(self.cells, key=lambda cell: cell.over_peer, default=None)

    @property
    def verdict(self) -> str:
        if self.value is None or self.worst is None:
            return "not measured"
        return "reached" if self.value >= self.row.bar and self.worst.over_peer >= self.row.least else "missed"


def outcomes(rows: Iterable[Row], cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Each row with the result of its cases, as plain data."""
    results = [Outcome(row, [cell for cell in cells if cell.group == row.name and cell.ways]) for row in rows]
    return [
        {**asdict(o.row), "value": o.value, "worst": o.worst and o.worst.over_peer, "verdict": o.verdict}
        for o in results
    ]


def row_table(record: Record) -> list[str]:
    """A table of all rows: bar, measured result, whether it was reached."""
    lines = [["work", "against", "at least", "measured", "", "slowest case"]]
    for row in record.rows:
        worst = Outcome(Row("", "", 0.0), [cell for cell in record.groups.get(row["name"], []) if cell.ways]).worst
        lines.append([
            row["name"], row["against"], _bar(row),
            "-" if row["value"] is None else ratio_text(row["value"], row["is_share"]),
            row["verdict"],
            "-" if worst is None else f"{ratio_text(worst.over_peer, row['is_share'])} {worst.name}",
        ])  # fmt: skip
    return aligned(lines)


def _bar(row: Mapping[str, Any]) -> str:
    bar, least = (ratio_text(row[name], row["is_share"]) for name in ("bar", "least"))
    if row["least"] == row["bar"]:
        return f"{bar} each"
    return f"{bar}, each {least}" if row["least"] else bar
