"""Runs the suite `cpu`: every case timed beside its peer and checked, and held to the bar of its row."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..progress import Screen
from . import cpu_suite, machine, report
from .case import Case, Measured
from .measure import interleaved
from .record import Record

BUDGET, QUICK_BUDGET = 4.0, 0.5  # seconds of timing for each case
FULL_MEMORY = 4 * 1024**2  # bytes of workspace that a thread may take


def run_cpu(
    words: Sequence[str], quick: bool, half_sdpa: bool, keep: Callable[[Mapping[str, Any]], None]
) -> tuple[Record, dict[str, Any], list[list[str]]]:
    """The suite with bars: its record, that as plain data, and its tables; `keep` is given the data after each case."""
    sizes, notes = cpu_suite.sizes_here()
    if os.environ.items() >= machine.SAFE_ISA.items():
        notes.append(
            "SDPA in bf16 and f16 ran with ONEDNN_MAX_CPU_ISA as shown: without it, oneDNN's AMX products end "
            "the process here (MKL's, which SDPA uses for bf16, do not)"
        )
    notes += machine.load_notes()
    if not half_sdpa:
        notes.append("SDPA in bf16 and f16 ends the process here, also without AMX: those cases are left out")
    cases = [c for c in cpu_suite.cases(sizes, quick) if half_sdpa or not c.needs_half_sdpa]
    command = f"tilewise {shlex.join(words)}"
    about: dict[str, Any] = {"suite": "cpu", "quick": quick, **machine.describe(command), "notes": notes, "failed": []}
    budget = QUICK_BUDGET if quick else BUDGET
    results: list[Measured] = []
    start = time.perf_counter()

    def data() -> dict[str, Any]:
        done = len(results) + len(about["failed"])
        ended = {"complete": done == len(cases), "seconds": time.perf_counter() - start}
        return report.as_data({**about, **ended}, report.outcomes(cpu_suite.ROWS, results))

    try:
        with Screen(len(cases) + 1, sys.stderr) as screen:
            screen.print(f"{len(cases)} cases, {report.rough_time(budget * (len(cases) + 1))} at least")
            screen.step("ceilings of this machine")
            with torch.no_grad():
                about["ceilings"] = machine.ceilings(sizes.read, sizes.matrix, budget)
            for _ in measure_all(cases, budget, results, about["failed"], screen):
                keep(data())
    except KeyboardInterrupt:
        notes.append(f"interrupted: {len(results)} of {len(cases)} cases done")
    notes += [f"failed: {reason}" for reason in about["failed"]]
    found = report.outcomes(cpu_suite.ROWS, results)
    shown = [report.heading(about), report.cell_table(found), report.row_table(found), workspace_line(results)]
    last = data()
    return Record.from_data(last), last, shown


def measure_all(
    cases: Sequence[Case], budget: float, results: list[Measured], failed: list[str], screen: Screen
) -> Iterator[None]:
    """Appends each case's result to `results`, or why it has none to `failed`, and yields after each."""
    start = time.perf_counter()
    for number, case in enumerate(cases, 1):
        screen.step(f"{case.row}: {case.name}")
        try:
            result = measure(case, budget)
            results.append(result)
            said = f"{_against(case.row, result.ratio)}, error {result.error:.1e}"
        except Exception as error:  # too little memory, for one; the other cases go on
            reason = (str(error) or type(error).__name__).splitlines()[0]
            failed.append(f"{case.row}: {case.name}: {reason}")
            said = f"FAILED: {reason}"
        left = report.left_text(number, len(cases), time.perf_counter() - start)
        screen.print(f"[{number}/{len(cases)}] {case.row}: {case.name}: {said}{left}")
        yield


def _against(name: str, ratio: float) -> str:
    """A ratio in words: how many times as fast as the row's peer, or which share of the speed of reading."""
    row = next(row for row in cpu_suite.ROWS if row.name == name)
    return f"{report.ratio_text(ratio, row.is_share)} {'of the' if row.is_share else 'as fast as'} {row.against}"


@torch.no_grad()
def measure(case: Case, budget: float) -> Measured:
    """Times and checks one case."""
    made = case.prepare()
    error = made.error(made.ours())
    other = made.peer()
    peer_error = made.error(other) if made.peer_same and isinstance(other, torch.Tensor) else None
    ours, peer = interleaved([made.ours, made.peer], budget)
    ratio = peer.seconds / ours.seconds
    if made.peer_read:
        ratio *= made.moved / made.peer_read
    gflops, gbytes = (amount / ours.seconds / 1e9 for amount in (made.flops, made.moved))
    return Measured(
        case.row, case.name, ours, peer, ratio, error, made.allowed, peer_error, gflops, gbytes, made.workspace
    )


def workspace_line(results: Iterable[Measured]) -> list[str]:
    """The most memory that a call took beside its tensors."""
    most = max(results, key=lambda result: result.workspace, default=None)
    if most is None:
        return []
    each = most.workspace / torch.get_num_threads()
    verdict = "reached" if each < FULL_MEMORY else "missed"
    return [f"workspace at most {each / 1024**2:.2f} MiB a thread, under 4: {verdict} ({most.row}: {most.name})"]
