"""The charts of a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .peers.candidate import OURS
from .record import Cell, Record
from .report import ratio_text
from .scaling import growths
from .svg import Bar, Chart, bars, lines
from .tables import rate_text, rate_unit, rate_value

LEAST_POINTS = 3  # of a line; fewer are drawn as bars
MOST_OVER = 3.0  # times the required result: longer bars are cut off


def charts(record: Record) -> dict[str, Chart]:
    """Each chart by its title."""
    if record.rows:
        targets = {"Share of what was asked for (the mark)": bullets(record)}
        return targets | {title_of(group, cells): chart(cells) for group, cells in record.groups.items()}
    if record.about.get("suite") == "scale":
        return scale(record)
    drawn: dict[str, Chart] = {}
    single_cases: dict[str, list[Cell]] = {}
    for group, cells in record.groups.items():
        suite = group.partition(": ")[0]
        if len(cells) > 1:
            drawn[title_of(group, cells)] = chart(cells)
        else:  # one chart for all groups of a single case
            name = f"{group.partition(': ')[2]}, {cells[0].name}"
            single_cases.setdefault(suite, []).append(replace(cells[0], name=name))
    return {title_of(suite, cells): chart(cells) for suite, cells in single_cases.items()} | drawn


def title_of(group: str, cells: list[Cell]) -> str:
    return f"{group} ({rate_unit(cells)})"


def chart(cells: list[Cell]) -> Chart:
    """Lines over x if there are enough points, else bars."""
    unit = rate_unit(cells)
    xs = sorted({cell.x for cell in cells if cell.x is not None})
    one = len({cell.group for cell in cells}) == 1
    if one and len(xs) >= LEAST_POINTS and all(cell.x is not None for cell in cells):
        series: dict[str, list[tuple[float, float]]] = {OURS: []}
        for cell in cells:
            for result in cell.ways:
                if cell.is_right(result):
                    series.setdefault(result.name, []).append((cell.x or 0, rate_value(cell, result, unit)))
        name = "head dim" if cells[0].name.startswith("D ") else "length"
        return lines(series, name, unit)
    return bars({_heading(cell): _bars(cell, unit) for cell in cells})


def _heading(cell: Cell) -> str:
    if cell.ratio is None:
        return f"{cell.name} · no peer supports it" if cell.refused else cell.name
    return f"{cell.name} · {ratio_text(cell.ratio, False)} as fast as the best peer"


def _bars(cell: Cell, unit: str) -> list[Bar]:
    drawn = []
    for result in cell.ways:
        wrong = not cell.is_right(result)
        kind = "bad" if wrong else "ours" if result.name.startswith(OURS) else "peer"
        text = rate_text(cell, result, unit) + (" wrong" if wrong else "")
        drawn.append(Bar(result.name, rate_value(cell, result, unit), text, kind))
    return drawn


def bullets(record: Record) -> Chart:
    """Each row of the suite `cpu`: how much of its bar was reached."""
    return bars(
        {f"{row['name']} · {row['against']}": [_bullet(row)] for row in record.rows if row["value"] is not None}
    )


def _bullet(row: Mapping[str, Any]) -> Bar:
    kind = "ours" if row["verdict"] == "reached" else "peer"
    text = f"{ratio_text(row['value'], row['is_share'])} {row['verdict']}"
    wanted = f"at least {ratio_text(row['bar'], row['is_share'])}"
    return Bar(wanted, min(MOST_OVER, row["value"] / row["bar"]), text, kind, mark=1.0)


def scale(record: Record) -> dict[str, Chart]:
    """Time and memory over the length, by kind of mask."""
    ours = {
        kind: [(c.x or 0, c.ours.timing.seconds * 1e3) for c in cells if c.ours]
        for kind, cells in record.groups.items()
    }
    fitted = {g.kind: g for g in growths(record)}
    named = {
        f"{kind}, L^{fitted[kind].time:.2f}" if fitted[kind].time is not None else kind: points
        for kind, points in ours.items()
    }
    drawn = {"Time of a call (ms)": lines(named, "length", "ms", log_y=True)}
    memory = {kind: [(c.x or 0, c.memory / 2**20) for c in cells if c.memory] for kind, cells in record.groups.items()}
    if any(memory.values()):
        drawn["Memory beside inputs and output (MiB)"] = lines(memory, "length", "MiB", log_y=True)
    for kind, cells in record.groups.items():
        if any(cell.peers for cell in cells):
            series: dict[str, list[tuple[float, float]]] = {OURS: []}
            for cell in cells:
                for result in cell.ways:
                    series.setdefault(result.name, []).append((cell.x or 0, result.timing.seconds * 1e3))
            drawn[f"{kind}: beside others (ms)"] = lines(series, "length", "ms", log_y=True)
    return drawn
