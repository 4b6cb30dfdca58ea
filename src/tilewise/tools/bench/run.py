"""Runs suites: times and checks every case and its peers, then prints tables and writes files."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...core.atomic_write import check_target, write_or_rescue
from ...errors import InvalidArgument
from ..progress import Screen
from . import cpu_suite, grid, machine, measure_gpu, page, plot, precompile, report
from .peers import OURS, installed
from .record import Cell, Record
from .scaling import growth_table
from .suites import SUITES, Scope, Task, scale
from .tables import tables
from .targets import Row, outcomes, row_table

INTERRUPTED = 130  # a shell's exit status after Ctrl-C
WRONG = 1
BUDGETS = {
    "cpu": (1.0, 0.2),
    "cuda": (0.2, 0.08),
    "mps": (0.5, 0.2),
}  # seconds for each candidate of a case, and if it must be quick
DTYPES = cpu_suite.DTYPES
# One compiles for each case, which takes tens of seconds on a CPU; the other takes 50 times as long as the rest.
SLOW_PEERS = {"flex": "it compiles again for each case", "mlx": "it is slow on a CPU"}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of the command line."""

    words: Sequence[str]  # the command line itself, for the record and for a restart
    suites: Sequence[str]  # "cpu" alone, "scale" alone, or names of `SUITES`
    device: str = "cpu"
    dtype: str = ""  # f32 on a CPU, bf16 on a GPU
    quick: bool = False
    peers: Sequence[str] | None = None  # all that are installed
    jobs: int | None = None
    json: Path | None = None
    html: Path | None = None
    plot: Path | None = None


def bench(options: BenchOptions) -> int:
    """Measures, prints the tables and writes the files; returns the exit status.

    Ctrl-C ends the measuring, not the report. The status is 1 if a result is wrong or a case fails; a bar that is
    missed is a result.
    """
    check(options)
    check_files(options.json, options.html, options.plot)
    half_sdpa = options.device != "cpu" or not _is_half(options) or _ensure_half_sdpa(options.words)

    def keep(data: Mapping[str, Any]) -> None:
        """Called after each case, so that a killed process loses only the last one."""
        if options.json is not None:
            with suppress(OSError):  # it is tried again at the end
                report.write_json(options.json, data, rescue=False)

    record = (_cpu if "cpu" in options.suites else _models)(options, half_sdpa, keep)
    if options.json is not None:
        report.write_json(options.json, record.as_data())
    _print(_tables(record))
    _write(record, options.html, options.plot)
    if not record.about["complete"]:
        return INTERRUPTED
    return WRONG if record.wrong else 0


def show(file: Path, html: Path | None = None, picture: Path | None = None) -> int:
    """Prints the tables of a record in a file, or writes its page and picture."""
    check_files(None, html, picture)
    record = Record.read(file)
    try:
        shown = _tables(record)
        _write(record, html, picture)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # names and results that are not there
        what = f"a JSON file of `tilewise bench`, whole: {error} is missing or of another kind"
        raise InvalidArgument("record", str(file), what) from error
    if html is None and picture is None:
        _print(shown)
    return 0


def _tables(record: Record) -> list[list[str]]:
    shown = [report.heading(record.about), *tables(record)]
    if record.rows:
        shown += [row_table(record), cpu_suite.workspace_line(record)]
    return [*shown, growth_table(record)] if record.about.get("suite") == "scale" else shown


def _print(shown: Sequence[Sequence[str]]) -> None:
    print("\n\n".join("\n".join(lines) for lines in shown if lines), flush=True)


def _write(record: Record, html: Path | None, picture: Path | None) -> None:
    if html is not None:
        write_or_rescue(html, page.page(record))
    if picture is not None:
        plot.draw(record, picture)


def check_files(json: Path | None, html: Path | None, picture: Path | None) -> None:
    """Refuses files that cannot be written, before anything is measured."""
    for option, file in (("--json", json), ("--html", html), ("--plot", picture)):
        check_target(option, file)
    if picture is not None:
        plot.check_name(picture)


def check(options: BenchOptions) -> None:
    """Checks the options before anything is measured."""
    for alone in ("cpu", "scale"):
        if alone in options.suites and len(options.suites) > 1:
            raise InvalidArgument("--suite", ",".join(options.suites), f"{alone} alone: its report has another form")
    if "cpu" in options.suites:
        if options.device != "cpu":
            raise InvalidArgument("--device", options.device, "cpu, for the suite of that name", "try --suite models")
        for option, value in (("--dtype", options.dtype), ("--peers", options.peers)):
            if value:
                raise InvalidArgument(option, str(value), "no value: the suite cpu sets its own")
    for name in options.peers or ():
        if why := installed()[name]:
            raise InvalidArgument("--peers", name, "libraries that are here", why)


def _is_half(options: BenchOptions) -> bool:
    return "cpu" in options.suites or options.dtype in ("bf16", "f16")


class Item(NamedTuple):
    """One case of a suite, to be measured."""

    group: str
    name: str
    metric: str
    x: float | None
    measure: Callable[[], Cell]


def _cpu(options: BenchOptions, half_sdpa: bool, keep: Callable[[Mapping[str, Any]], None]) -> Record:
    """The suite with bars."""
    sizes, notes = cpu_suite.sizes_here()
    if os.environ.items() >= machine.SAFE_ISA.items():
        notes.append(
            "SDPA in bf16 and f16 ran with ONEDNN_MAX_CPU_ISA as shown: without it, oneDNN's AMX products end "
            "the process here (MKL's, which SDPA uses for bf16, do not)"
        )
    if not half_sdpa:
        notes.append("SDPA in bf16 and f16 crashes here, even without AMX: those cases are left out")
    budget = cpu_suite.QUICK_BUDGET if options.quick else cpu_suite.BUDGET
    items = [
        Item(case.row, case.name, case.metric, None, partial(cpu_suite.measure, case, budget))
        for case in cpu_suite.cases(sizes, options.quick)
        if half_sdpa or not case.needs_half_sdpa
    ]
    about = _about(options, torch.device("cpu"), notes)

    def ceilings(screen: Screen) -> None:
        with torch.no_grad():
            about["ceilings"] = machine.ceilings(sizes.read, sizes.matrix, budget)

    def describe_cell(cell: Cell) -> str:
        assert cell.ours is not None
        return f"{cpu_suite.row_of(cell.group).describe(cell.over_peer)}, error {cell.ours.error:.1e}"

    return _measure(items, about, budget, ceilings, describe_cell, keep, cpu_suite.ROWS)


def _models(options: BenchOptions, half_sdpa: bool, keep: Callable[[Mapping[str, Any]], None]) -> Record:
    """The suites of models, or the scaling suite."""
    device = torch.device(options.device)
    kind = options.dtype or {"cuda": "bf16", "mps": "f16"}.get(device.type, "f32")
    scope = Scope(device.type == "cuda", options.quick)
    named = {**SUITES, "scale": scale}
    tasks = [task for suite in options.suites for task in named[suite](scope)]
    libraries = installed()
    left_out: dict[str, str] = {}
    if options.peers is None and (options.quick or device.type == "cpu"):
        left_out = {name: f"left out: {why}; --peers names it" for name, why in SLOW_PEERS.items()}
    if not half_sdpa:
        left_out |= dict.fromkeys(("sdpa", "flex"), "crashes here in bf16 and f16")
    libraries = {**libraries, **{name: why for name, why in left_out.items() if libraries[name] is None}}
    peers = [name for name in (libraries if options.peers is None else options.peers) if libraries[name] is None]
    about = _about(options, device, []) | {"dtype": kind, "peers": libraries}
    full, short = BUDGETS[device.type]
    run = grid.Bench(device, DTYPES[kind], short if options.quick else full, peers)

    def measure(task: Task) -> Cell:
        try:
            return grid.measure(task, run)
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def prepare(screen: Screen) -> None:
        about["ceilings"] = _ceilings(run, options.quick)
        if device.type == "cuda":
            screen.print("compiles what is not yet kept")
            precompile.precompile(tasks, device, run.dtype, peers, options.jobs or precompile.default_jobs(device))

    items = [Item(grid.group_of(t), t.case.name, t.metric, t.x, partial(measure, t)) for t in tasks]
    return _measure(items, about, run.budget, prepare, _result, keep)


def _about(options: BenchOptions, device: torch.device, notes: list[str]) -> dict[str, Any]:
    return {
        "suite": ",".join(options.suites),
        "quick": options.quick,
        **machine.describe(f"tilewise {shlex.join(options.words)}", device),
        "notes": [*notes, *machine.load_notes()],
    }


def _measure(
    items: Sequence[Item],
    about: dict[str, Any],
    budget: float,
    prepare: Callable[[Screen], None],
    describe_cell: Callable[[Cell], str],
    keep: Callable[[Mapping[str, Any]], None],
    rows: Sequence[Row] = (),
) -> Record:
    """Measures all cases; calls `keep` with the record after each. Ctrl-C ends it."""
    cells: list[Cell] = []
    start = time.perf_counter()

    def record() -> Record:
        ended = {"complete": len(cells) == len(items), "seconds": time.perf_counter() - start}
        return Record({**about, **ended}, cells, outcomes(rows, cells))

    with Screen(len(items) + 1, sys.stderr) as screen:
        try:
            screen.print(f"{len(items)} cases, {report.rough_time(budget * len(items))} at least")
            screen.step("ceilings of this machine")
            prepare(screen)
            begun = time.perf_counter()
            for number, item in enumerate(items, 1):
                screen.step(f"{item.group}, {item.name}")
                try:
                    cell = item.measure()
                    words = describe_cell(cell)
                except Exception as error:  # such as out of memory; other cases go on
                    reason = (str(error) or type(error).__name__).splitlines()[0]
                    cell = Cell(item.group, item.name, item.metric, (), {OURS: reason}, item.x)
                    words = f"FAILED: {reason}"
                cells.append(cell)
                left = report.left_text(number, len(items), time.perf_counter() - begun)
                screen.print(f"[{number}/{len(items)}] {item.group}, {item.name}: {words}{left}")
                keep(record().as_data())
        except KeyboardInterrupt:
            about["notes"].append(f"interrupted: {len(cells)} of {len(items)} cases done")
    return record()


def _result(cell: Cell) -> str:
    assert cell.ours is not None
    beside = (
        "no peer" if cell.ratio is None else f"{report.ratio_text(cell.ratio, False)} as fast as {cell.peers[0].name}"
    )
    return f"{report.time_text(cell.ours.timing.seconds)}, {beside}, error {cell.ours.error:.1e}"


def _ceilings(run: grid.Bench, quick: bool) -> dict[str, Any]:
    budget = cpu_suite.QUICK_BUDGET if quick else cpu_suite.BUDGET / 2
    with torch.no_grad():
        if run.device.type != "cpu":
            sizes = {} if run.device.type == "cuda" else {"size": 4096, "read": 2**30}  # memory is shared with others
            return measure_gpu.ceilings(run.device, run.dtype, budget / 2, **sizes)
        here, _ = cpu_suite.sizes_here()
        return machine.ceilings(here.read, here.matrix, budget)


def _ensure_half_sdpa(words: Sequence[str]) -> bool:
    """Whether SDPA works in bf16 and f16; restarts without AMX if that makes it work."""
    if machine.sdpa_survives():
        return True
    if os.environ.items() >= machine.SAFE_ISA.items() or not machine.sdpa_survives(machine.SAFE_ISA):
        return False
    print(f"SDPA in bf16 or f16 crashes here; restarting with {machine.SAFE_ISA}", file=sys.stderr, flush=True)
    _restart(words)
    return False


def _restart(words: Sequence[str]) -> None:
    """Restarts this command (exec) with an environment that turns oneDNN's AMX off."""
    sys.stdout.flush()
    environment = {**os.environ, **machine.SAFE_ISA}
    os.execve(sys.executable, [sys.executable, "-m", "tilewise", *words], environment)
