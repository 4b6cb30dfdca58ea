"""A record as text: each case with every result, then a summary."""

from __future__ import annotations

from collections.abc import Iterator

from .record import Cell, Record, TimedResult
from .report import aligned, ratio_text, time_text


def tables(record: Record) -> Iterator[list[str]]:
    """Blocks of lines: a table for each group, then why results are missing, then the summary."""
    for group, cells in record.groups.items():
        yield [
            group,
            *aligned(
                [["case", "way", "time", "spread", rate_unit(cells), "of limit", "error"], *_lines(record, cells)]
            ),
        ]
    if refused := _refused(record):
        yield refused
    yield [summary(record)]


def _lines(record: Record, cells: list[Cell]) -> Iterator[list[str]]:
    for cell in cells:
        for number, result in enumerate(cell.ways):
            share = record.share(cell, result)
            yield [
                "" if number else cell.name,
                result.name + (f" ({result.note})" if result.note else ""),
                time_text(result.timing.seconds),
                f"{result.timing.spread:.0%}",
                rate_text(cell, result, rate_unit(cells)),
                "" if share is None else f"{share:.0%}",
                error_text(cell, result),
            ]


def _refused(record: Record) -> list[str]:
    """The candidates that could not compute some cases, and why."""
    reasons: dict[tuple[str, str], int] = {}
    for cell in record.cells:
        for name, reason in cell.refused.items():
            reasons[name, reason] = reasons.get((name, reason), 0) + 1
    return [f"{name}: not in {count} of {len(record.cells)} cases, {why}" for (name, why), count in reasons.items()]


def summary(record: Record) -> str:
    """The result of the run in one line."""
    ratios = sorted(cell.ratio for cell in record.cells if cell.ratio is not None)
    words = [f"{len(record.cells)} cases, {len(record.wrong)} of ours wrong"]
    if record.mean_ratio is not None:
        low, high = ratio_text(ratios[0], False), ratio_text(ratios[-1], False)
        words.append(f"{ratio_text(record.mean_ratio, False)} as fast as the fastest peer on average ({low} to {high})")
    if record.alone:
        words.append(f"{len(record.alone)} without a peer that can do it")
    return "; ".join(words)


def rate_unit(cells: list[Cell]) -> str:
    """GFLOP/s or GB/s, or TFLOP/s or TB/s if the numbers are large."""
    best = max((cell.rate(result) for cell in cells for result in cell.ways), default=0.0)
    if cells[0].metric == "flops":
        return "TFLOP/s" if best >= 1e4 else "GFLOP/s"
    return "TB/s" if best >= 1e3 else "GB/s"


def rate_value(cell: Cell, result: TimedResult, unit: str) -> float:
    return cell.rate(result) / (1e3 if unit.startswith("T") else 1)


def rate_text(cell: Cell, result: TimedResult, unit: str) -> str:
    value = rate_value(cell, result, unit)
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def error_text(cell: Cell, result: TimedResult) -> str:
    if result.error is None:
        return "not checked"
    return f"{result.error:.1e}" + ("" if cell.is_right(result) else " WRONG")
