"""Runs a suite: every case timed beside its peer and checked, then the tables and the JSON."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import InvalidArgument
from . import cpu_suite, machine, report
from .case import Case, Measured
from .measure import take_turns

INTERRUPTED = 130  # what a shell reports after Ctrl-C
WRONG = 1
BUDGET, QUICK_BUDGET = 4.0, 0.5  # seconds of timing for each case
FULL_MEMORY = 4 * 1024**2  # bytes of workspace that a thread may take


def bench(suite: str, quick: bool, json_file: Path | None) -> int:
    """Measures `suite`, prints the tables and writes the JSON; returns the exit status.

    Ctrl-C ends the measuring, not the report. The status is 1 if a result is wrong; a bar that is missed is a result.
    """
    if json_file is not None and not json_file.parent.is_dir():
        raise InvalidArgument("--json", f"{json_file}", "a file in a folder that exists")
    words = ["bench", "--suite", suite, *["--quick"] * quick, *(["--json", str(json_file)] if json_file else [])]
    narrow_sdpa = _ensure_narrow_sdpa(words)
    sizes, notes = cpu_suite.sizes_here()
    if os.environ.items() >= machine.SAFE_ISA.items():
        notes.append(
            "SDPA in bf16 and f16 ran with ONEDNN_MAX_CPU_ISA as shown: without it, oneDNN's AMX products end "
            "the process here (MKL's, which SDPA uses for bf16, do not)"
        )
    if machine.load() > 0.3:
        notes.append(f"the machine was not quiet: load {machine.load():.1f} at the start")
    if not narrow_sdpa:
        notes.append("SDPA in bf16 and f16 ends the process here, also without AMX: those cases are left out")
    cases = [c for c in cpu_suite.cases(sizes, quick) if narrow_sdpa or not c.needs_narrow_sdpa]
    about = {"suite": suite, "quick": quick, **machine.describe(f"tilewise {' '.join(words)}"), "notes": notes}
    budget = QUICK_BUDGET if quick else BUDGET
    results: list[Measured] = []
    start = time.perf_counter()
    try:
        _say("ceilings of this machine")
        with torch.no_grad():
            about["ceilings"] = machine.ceilings(sizes.read, sizes.matrix, budget)
        measure_all(cases, budget, results)
    except KeyboardInterrupt:
        notes.append(f"interrupted: {len(results)} of {len(cases)} cases done")
    about |= {"complete": len(results) == len(cases), "seconds": time.perf_counter() - start}
    found = report.outcomes(cpu_suite.ROWS, results)
    if json_file is not None:
        report.write_json(json_file, report.as_data(about, found))
    tables = [report.heading(about), report.cell_table(found), report.row_table(found), workspace_line(results)]
    print("\n\n".join("\n".join(lines) for lines in tables if lines))
    if not about["complete"]:
        return INTERRUPTED
    return 0 if all(result.is_right for result in results) else WRONG


def measure_all(cases: Sequence[Case], budget: float, results: list[Measured]) -> None:
    """Appends each case's result to `results` as soon as it is there."""
    for number, case in enumerate(cases, 1):
        _say(f"[{number}/{len(cases)}] {case.row}: {case.name}")
        start = time.perf_counter()
        result = measure(case, budget)
        results.append(result)
        taken = time.perf_counter() - start
        _say(f"        {result.ratio:.3g} of the peer, error {result.error:.1e}, {taken:.1f} s")


@torch.no_grad()
def measure(case: Case, budget: float) -> Measured:
    """Times and checks one case."""
    made = case.prepare()
    error = made.error(made.ours())
    other = made.peer()
    peer_error = made.error(other) if made.peer_same and isinstance(other, torch.Tensor) else None
    ours, peer = take_turns([made.ours, made.peer], budget)
    ratio = peer.seconds / ours.seconds
    if made.peer_read:
        ratio *= made.moved / made.peer_read
    gflops, gbytes = (amount / ours.seconds / 1e9 for amount in (made.flops, made.moved))
    return Measured(
        case.row, case.name, ours, peer, ratio, error, made.allowed, peer_error, gflops, gbytes, made.workspace
    )


def workspace_line(results: Sequence[Measured]) -> list[str]:
    """The most memory that a call took beside its tensors."""
    if not results:
        return []
    most = max(results, key=lambda result: result.workspace)
    each = most.workspace / torch.get_num_threads()
    verdict = "reached" if each < FULL_MEMORY else "missed"
    return [f"workspace at most {each / 1024**2:.2f} MiB a thread, under 4: {verdict} ({most.row}: {most.name})"]


def _ensure_narrow_sdpa(words: Sequence[str]) -> bool:
    """Whether SDPA may be called in bf16 and f16; begins anew without AMX where that makes it work."""
    if machine.sdpa_survives():
        return True
    if os.environ.items() >= machine.SAFE_ISA.items() or not machine.sdpa_survives(machine.SAFE_ISA):
        return False
    _say(f"SDPA in bf16 or f16 ends the process here; begins anew with {machine.SAFE_ISA}")
    _restart(words)
    return False


def _restart(words: Sequence[str]) -> None:
    """This command again, in this process, in an environment that oneDNN reads when it starts."""
    sys.stdout.flush()
    environment = {**os.environ, **machine.SAFE_ISA}
    os.execve(sys.executable, [sys.executable, "-m", "tilewise", *words], environment)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
