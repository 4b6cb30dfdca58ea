"""`tilewise compare`: what became faster or slower between two records, beyond noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .measure import geometric_mean
from .record import Cell, Record, TimedResult
from .report import aligned, ratio_text, time_text

LEAST = 0.03  # changes smaller than this are not reported, however quiet the machine


@dataclass(frozen=True, slots=True)
class Change:
    """A result that is in both records."""

    cell: Cell  # of the newer record
    now: TimedResult
    before: TimedResult

    @property
    def factor(self) -> float:
        """How many times as fast as before."""
        return self.before.timing.seconds / self.now.timing.seconds

    @property
    def noise(self) -> float:
        """The relative change that the spread of both runs explains."""
        return max(LEAST, self.now.timing.spread, self.before.timing.spread)

    @property
    def verdict(self) -> str:
        if self.factor > 1 + self.noise:
            return "faster"
        return "SLOWER" if self.factor < 1 / (1 + self.noise) else "same"


def changes(old: Record, new: Record) -> list[Change]:
    """All results that are in both records, in the order of the newer one."""
    before = {(cell.group, cell.name, result.name): result for cell in old.cells for result in cell.ways}
    matched = []
    for cell in new.cells:
        for now in cell.ways:
            if (cell.group, cell.name, now.name) in before:
                matched.append(Change(cell, now, before[cell.group, cell.name, now.name]))
    return matched


def compare(old_file: Path, new_file: Path, every: bool = False) -> int:
    """Prints the changes of ours beyond noise (or all), and returns the exit status: 1 if something got slower.

    Peers show how much the machine itself has changed; if they changed, ours is judged by its ratio to them.
    """
    old, new = Record.read(old_file), Record.read(new_file)
    all_changes = changes(old, new)
    if not all_changes:
        print(f"{old_file} and {new_file} have no case in common")
        return 2
    for line in _differences(old, new):
        print(f"note: {line}")
    drift = _drift(all_changes)
    if drift is not None:
        print(f"peers ran at {ratio_text(drift, False)} their earlier speed; tilewise's changes are relative to that")
    ours = [_without(drift, change) for change in all_changes if change.now.name.startswith("tilewise")]
    shown = [change for change in ours if every or change.verdict != "same"]
    if shown:
        print("\n".join(_table(shown)))
    count = {verdict: sum(c.verdict == verdict for c in ours) for verdict in ("faster", "SLOWER", "same")}
    missing = len(_keys(old) - _keys(new)), len(_keys(new) - _keys(old))
    print(
        f"{len(ours)} results of ours: {count['faster']} faster, {count['SLOWER']} slower, {count['same']} the same "
        f"within noise; {missing[0]} cases only in the first, {missing[1]} only in the second"
    )
    if newly := [cell for cell in new.wrong if (cell.group, cell.name) in _keys(old)]:
        print("WRONG: " + ", ".join(f"{cell.group}, {cell.name}" for cell in newly))
    return 1 if count["SLOWER"] or newly else 0


def _without(drift: float | None, change: Change) -> Change:
    """The change relative to that of the machine."""
    if drift is None:
        return change
    old = change.before.timing
    timing = type(old)(old.seconds / drift, old.median / drift, old.spread, old.rounds, old.repeats)
    return Change(change.cell, change.now, replace(change.before, timing=timing))


def _drift(all_changes: list[Change]) -> float | None:
    factors = [change.factor for change in all_changes if not change.now.name.startswith(("tilewise", "our "))]
    return geometric_mean(factors) if len(factors) >= 3 else None


def _table(shown: list[Change]) -> list[str]:
    lines = [["case", "way", "before", "now", "as fast", "noise", ""]]
    for change in sorted(shown, key=lambda change: change.factor):
        lines.append([
            f"{change.cell.group}: {change.cell.name}",
            change.now.name,
            time_text(change.before.timing.seconds),
            time_text(change.now.timing.seconds),
            ratio_text(change.factor, False),
            f"{change.noise:.0%}",
            change.verdict,
        ])  # fmt: skip
    return aligned(lines)


def _differences(old: Record, new: Record) -> Iterator[str]:
    """What else differs between the runs."""
    for part in ("device", "versions"):
        was, is_now = old.about.get(part, {}), new.about.get(part, {})
        for name in sorted({*was, *is_now} - {"load", "memory_available_bytes"}):
            if was.get(name) != is_now.get(name):
                yield f"{part} {name}: {was.get(name)} before, {is_now.get(name)} now"
    for name in ("quick", "dtype", "complete"):
        if old.about.get(name) != new.about.get(name):
            yield f"{name}: {old.about.get(name)} before, {new.about.get(name)} now"


def _keys(record: Record) -> set[tuple[str, str]]:
    return {(cell.group, cell.name) for cell in record.cells}
