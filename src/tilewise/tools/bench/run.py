"""Runs suites: every case timed beside its peers and checked, then the tables, the files and the exit status."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.outputs import check_target, write_or_rescue
from ...errors import InvalidArgument
from ..progress import Screen
from . import cpu_suite, grid, machine, measure_gpu, page, plot, precompile, report, run_cpu
from .peers import OURS, installed
from .record import Cell, Record
from .scaling import growth_table
from .suites import SUITES, Scope, Task, scale
from .tables import tables

INTERRUPTED = 130  # what a shell reports after Ctrl-C
WRONG = 1
WAY_BUDGET = {
    "cpu": (1.0, 0.2),
    "cuda": (0.2, 0.08),
    "mps": (0.5, 0.2),
}  # seconds for each way of a case, and if it must be quick
DTYPES = cpu_suite.DTYPES
# One compiles anew for each case, in tens of seconds on a CPU; the other takes 50 times as long as the rest.
SLOW_PEERS = {"flex": "it compiles anew for each case", "mlx": "it is slow on a CPU"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for."""

    words: Sequence[str]  # the command line itself, to be written down and, if need be, begun anew
    suites: Sequence[str]  # "cpu" alone, "scale" alone, or names of `SUITES`
    device: str = "cpu"
    dtype: str = ""  # f32 on a CPU, bf16 on a GPU
    quick: bool = False
    peers: Sequence[str] | None = None  # all that are installed
    jobs: int | None = None
    json: Path | None = None
    html: Path | None = None
    plot: Path | None = None


def bench(asked: Asked) -> int:
    """Measures, prints the tables and writes the files; returns the exit status.

    Ctrl-C ends the measuring, not the report. The status is 1 if a result is wrong or a case fails; a bar that is
    missed is a result.
    """
    check(asked)
    check_files(asked.json, asked.html, asked.plot)
    half_sdpa = asked.device != "cpu" or not _is_half(asked) or _ensure_half_sdpa(asked.words)

    def keep(data: Mapping[str, Any]) -> None:
        """Called after each case, so that a process that is killed has lost only the last."""
        if asked.json is not None:
            with suppress(OSError):  # the end tries again
                report.write_json(asked.json, data, rescue=False)

    if "cpu" in asked.suites:
        record, data, shown = run_cpu.run_cpu(asked.words, asked.quick, half_sdpa, keep)
    else:
        record = _models(asked, half_sdpa, keep)
        data, shown = record.as_data(), None
    if asked.json is not None:
        report.write_json(asked.json, data)
    _print(shown or _tables(record))
    _write(record, asked.html, asked.plot)
    if not record.about["complete"]:
        return INTERRUPTED
    return WRONG if record.wrong or record.about.get("failed") else 0


def show(file: Path, html: Path | None = None, picture: Path | None = None) -> int:
    """A record from a file: its tables, or the page and the picture that are asked for."""
    check_files(None, html, picture)
    record = Record.read(file)
    _write(record, html, picture)
    if html is None and picture is None:
        _print(_tables(record))
    return 0


def _tables(record: Record) -> list[list[str]]:
    shown = [report.heading(record.about), *tables(record)]
    return [*shown, growth_table(record)] if record.about.get("suite") == "scale" else shown


def _print(shown: Sequence[Sequence[str]]) -> None:
    print("\n\n".join("\n".join(lines) for lines in shown if lines), flush=True)


def _write(record: Record, html: Path | None, picture: Path | None) -> None:
    if html is not None:
        write_or_rescue(html, page.page(record))
    if picture is not None:
        plot.draw(record, picture)


def check_files(json: Path | None, html: Path | None, picture: Path | None) -> None:
    """Whether files can be written, before there is anything to write."""
    for option, file in (("--json", json), ("--html", html), ("--plot", picture)):
        check_target(option, file)
    if picture is not None:
        plot.check_name(picture)


def check(asked: Asked) -> None:
    """Whatever can be wrong, before anything is measured."""
    for alone in ("cpu", "scale"):
        if alone in asked.suites and len(asked.suites) > 1:
            raise InvalidArgument("--suite", ",".join(asked.suites), f"{alone} alone: its report has another form")
    if "cpu" in asked.suites:
        if asked.device != "cpu":
            raise InvalidArgument("--device", asked.device, "cpu, for the suite of that name", "try --suite models")
        for option, value in (("--dtype", asked.dtype), ("--peers", asked.peers)):
            if value:
                raise InvalidArgument(option, str(value), "no such choice for the suite cpu, which has its own")
    for name in asked.peers or ():
        if why := installed()[name]:
            raise InvalidArgument("--peers", name, "libraries that are here", why)


def _is_half(asked: Asked) -> bool:
    return "cpu" in asked.suites or asked.dtype in ("bf16", "f16")


def _models(asked: Asked, half_sdpa: bool, keep: Callable[[Mapping[str, Any]], None]) -> Record:
    """The suites of models, or the one of lengths; `keep` is given the record after each case."""
    device = torch.device(asked.device)
    kind = asked.dtype or {"cuda": "bf16", "mps": "f16"}.get(device.type, "f32")
    scope = Scope(device.type == "cuda", asked.quick)
    named = {**SUITES, "scale": scale}
    tasks = [task for suite in asked.suites for task in named[suite](scope)]
    found = installed()
    left_out: dict[str, str] = {}
    if asked.peers is None and (asked.quick or device.type == "cpu"):
        left_out = {name: f"left out: {why}; --peers names it" for name, why in SLOW_PEERS.items()}
    if not half_sdpa:
        left_out |= dict.fromkeys(("sdpa", "flex"), "ends the process here in bf16 and f16")
    found = {**found, **{name: why for name, why in left_out.items() if found[name] is None}}
    peers = [name for name in (found if asked.peers is None else asked.peers) if found[name] is None]
    about: dict[str, Any] = {
        "suite": ",".join(asked.suites),
        "quick": asked.quick,
        "dtype": kind,
        **machine.describe(f"tilewise {shlex.join(asked.words)}", device),
        "peers": found,
        "notes": machine.load_notes(),
    }
    full, short = WAY_BUDGET[device.type]
    run = grid.Bench(device, DTYPES[kind], short if asked.quick else full, peers)
    cells: list[Cell] = []
    start = time.perf_counter()

    def record() -> Record:
        ended = {"complete": len(cells) == len(tasks), "seconds": time.perf_counter() - start}
        return Record({**about, **ended}, cells)

    with Screen(len(tasks) + 1, sys.stderr) as screen:
        try:
            screen.print(f"{len(tasks)} cases, {report.rough_time(run.budget * len(tasks))} at least")
            screen.step("ceilings of this machine")
            about["ceilings"] = _ceilings(run, asked.quick)
            if device.type == "cuda":
                screen.print("compiles what is not yet kept")
                precompile.precompile(tasks, device, run.dtype, peers, asked.jobs or precompile.default_jobs(device))
            begun = time.perf_counter()
            for number, task in enumerate(tasks, 1):
                screen.step(f"{task.suite}: {task.group}, {task.case.name}")
                cell = _measured(task, run)
                cells.append(cell)
                left = report.left_text(number, len(tasks), time.perf_counter() - begun)
                screen.print(f"[{number}/{len(tasks)}] {cell.group}, {cell.name}: {_result(cell)}{left}")
                keep(record().as_data())
        except KeyboardInterrupt:
            about["notes"].append(f"interrupted: {len(cells)} of {len(tasks)} cases done")
    return record()


def _measured(task: Task, run: grid.Bench) -> Cell:
    """The case; one that fails is kept with the reason, and the others go on."""
    try:
        return grid.measure(task, run)
    except Exception as error:  # too little memory, for one
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return Cell(grid.group_of(task), task.case.name, task.metric, (), {OURS: reason}, task.x)
    finally:
        if run.device.type == "cuda":
            torch.cuda.empty_cache()


def _result(cell: Cell) -> str:
    if cell.ours is None:
        return f"FAILED: {cell.refused.get(OURS, '')}"
    beside = (
        "no peer" if cell.ratio is None else f"{report.ratio_text(cell.ratio, False)} as fast as {cell.peers[0].name}"
    )
    return f"{report.time_text(cell.ours.timing.seconds)}, {beside}, error {cell.ours.error:.1e}"


def _ceilings(run: grid.Bench, quick: bool) -> dict[str, Any]:
    budget = run_cpu.QUICK_BUDGET if quick else run_cpu.BUDGET / 2
    with torch.no_grad():
        if run.device.type != "cpu":
            given = {} if run.device.type == "cuda" else {"size": 4096, "read": 2**30}  # memory is shared with others
            return measure_gpu.ceilings(run.device, run.dtype, budget / 2, **given)
        sizes, _ = cpu_suite.sizes_here()
        return machine.ceilings(sizes.read, sizes.matrix, budget)


def _ensure_half_sdpa(words: Sequence[str]) -> bool:
    """Whether SDPA may be called in bf16 and f16; begins anew without AMX where that makes it work."""
    if machine.sdpa_survives():
        return True
    if os.environ.items() >= machine.SAFE_ISA.items() or not machine.sdpa_survives(machine.SAFE_ISA):
        return False
    print(
        f"SDPA in bf16 or f16 ends the process here; begins anew with {machine.SAFE_ISA}", file=sys.stderr, flush=True
    )
    _restart(words)
    return False


def _restart(words: Sequence[str]) -> None:
    """This command again, in this process, in an environment that oneDNN reads when it starts."""
    sys.stdout.flush()
    environment = {**os.environ, **machine.SAFE_ISA}
    os.execve(sys.executable, [sys.executable, "-m", "tilewise", *words], environment)
