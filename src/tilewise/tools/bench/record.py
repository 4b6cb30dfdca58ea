"""The record of a benchmark run: the machine, and every case with the results of its candidates.

That of the suite `cpu` has `rows` too: bars and results (`targets.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InvalidArgument
from .measure import Timing, geometric_mean
from .peers.candidate import OURS
from .record_check import check
from .report import printable

FORMAT = 2
LARGEST = 1 << 26  # bytes of a file: a thousand times those of ours
NO_PEERS = (OURS, "our ", "read speed")  # other forms of ours, and the machine itself


@dataclass(frozen=True, slots=True)
class TimedResult:
    """The result of one candidate: its time and its largest error against float64."""

    name: str
    timing: Timing
    error: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """One case, with the results of all candidates that could compute it."""

    group: str  # cases that are shown together, such as those of one model
    name: str
    metric: str  # what bounds it: "flops" or "bytes"
    ways: tuple[TimedResult, ...]  # ours first
    refused: Mapping[str, str] = field(default_factory=dict)  # candidates that could not compute it, and why
    x: float | None = None  # its x value in a chart, such as its length
    allowed: float = 0.0  # the error bound
    flops: int = 0
    bytes: int = 0
    workspace: int = 0
    plan: str = ""
    cells: int = 0  # visible (query, key) pairs
    tiles: int = 0  # visited
    memory: int | None = None  # measured peak of ours in bytes, without inputs and output

    @property
    def ours(self) -> TimedResult | None:
        return next((result for result in self.ways if result.name == OURS), None)

    @property
    def peers(self) -> list[TimedResult]:
        """The peers with right results, fastest first."""
        others = [result for result in self.ways if not result.name.startswith(NO_PEERS) and self.is_right(result)]
        return sorted(others, key=lambda result: result.timing.seconds)

    @property
    def ratio(self) -> float | None:
        """The speed of ours relative to the fastest peer."""
        if self.ours is None or not self.peers:
            return None
        return self.peers[0].timing.seconds / self.ours.timing.seconds

    @property
    def over_peer(self) -> float:
        """The speed of ours, the first result, relative to the second: in the suite `cpu` the row's peer."""
        return self.ways[1].timing.seconds / self.ways[0].timing.seconds

    def is_right(self, result: TimedResult) -> bool:
        """Whether its error is within the bound (NaN is not). An unchecked result is right unless it is ours."""
        return result.error <= self.allowed if result.error is not None else result.name != OURS

    def rate(self, result: TimedResult) -> float:
        """GFLOP/s or GB/s."""
        return (self.flops if self.metric == "flops" else self.bytes) / result.timing.seconds / 1e9


@dataclass(frozen=True, slots=True)
class Record:
    """A run: `about` has device, versions, date, command, ceilings, notes."""

    about: Mapping[str, Any]
    cells: Sequence[Cell]
    rows: Sequence[Mapping[str, Any]] = ()  # of the suite `cpu`: bars and results

    @property
    def groups(self) -> dict[str, list[Cell]]:
        groups: dict[str, list[Cell]] = {}
        for cell in self.cells:
            groups.setdefault(cell.group, []).append(cell)
        return groups

    @property
    def mean_ratio(self) -> float | None:
        """The geometric mean of the ratios to the fastest peer."""
        ratios = [cell.ratio for cell in self.cells if cell.ratio is not None]
        return geometric_mean(ratios) if ratios else None

    @property
    def alone(self) -> list[Cell]:
        """The cases that peers were tried for and none could compute."""
        return [cell for cell in self.cells if cell.ratio is None and cell.refused]

    @property
    def wrong(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.ours is None or not cell.is_right(cell.ours)]

    def share(self, cell: Cell, result: TimedResult) -> float | None:
        """The least time that the machine's limits allow, as a share of the measured time."""
        limits = self.about.get("ceilings") or {}
        products = limits.get("matmul_gflop_per_s") or limits.get("sgemm_gflop_per_s")
        reading = limits.get("read_gb_per_s")
        if not products or not reading:
            return None
        return max(cell.flops / products, cell.bytes / reading) / 1e9 / result.timing.seconds

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        rows = {"rows": [_plain(dict(row)) for row in self.rows]} if self.rows else {}
        return {"format": FORMAT, **self.about, **rows, "cells": [_plain(asdict(cell)) for cell in self.cells]}

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record in a file."""
        try:
            with path.open("rb") as file:
                content = file.read(LARGEST + 1)
            if len(content) > LARGEST:
                raise ValueError(f"it has more than {LARGEST >> 20} MiB")
            data = _printable(json.loads(content.decode()))
            check(data)
        except OSError as error:
            raise InvalidArgument("record", str(path), "a file that can be read", error.strerror or "") from error
        except (ValueError, RecursionError) as error:
            raise InvalidArgument("record", str(path), "a JSON file of `tilewise bench`", str(error)) from error
        try:
            return cls.from_data(data)
        except (AttributeError, KeyError, TypeError) as error:  # not a record of ours
            raise InvalidArgument("record", str(path), "a JSON file of `tilewise bench`") from error

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Record:
        about = {key: value for key, value in data.items() if key not in ("cells", "rows", "format")}
        return cls(about, [_cell(cell) for cell in data["cells"]], data.get("rows", ()))


def _cell(data: Mapping[str, Any]) -> Cell:
    results = [
        TimedResult(x["name"], Timing(**x["timing"]), _number(x["error"]), x.get("note", "")) for x in data["ways"]
    ]
    return Cell(**{**data, "ways": tuple(results)})


def _printable(value: Any) -> Any:
    """Data whose texts a terminal and a page can show."""
    if isinstance(value, dict):
        return {printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def _number(value: float | str | None) -> float | None:
    """JSON has no NaN: it is stored as a string."""
    return None if value is None else float(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    return value
