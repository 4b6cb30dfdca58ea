"""Random calls against the float64 oracle: how many, by which seeds, and the largest error for each dtype.

    python benchmarks/cpu/random_calls.py --cases 10000 --jobs 2 --json benchmarks/records/cpu/random_calls.json
    python benchmarks/cpu/random_calls.py --device cuda --backend triton --cases 500 --jobs 12 --seconds 500 --json FILE

Case `n` is drawn by seed `n` (`tilewise.testing.drawing`): form, sizes (0 among them), dtypes, strides and options,
the ends of their ranges among them; then the same shapes with one option changed; and what is around the calls: a
default device, a default dtype, autocast. Both are called with a poisoned output and judged, then twice each and the
first twice again, as a program would, by which they are remembered: the bits must be the same. A case that a backend
named cannot serve is not counted.

An error is given as a share of its bound, which is 2 (with softcap 3) times that of torch's own arithmetic and an ulp;
the largest error of a case is divided by its least bound. The cases run in `--jobs` processes; one that dies is a
failure of its case. The record is written every 10 cases and at the end: after `--cases`, after `--seconds`, or when
it is stopped; the next run goes on from there. It exits with 1 if any case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from tilewise import Unsupported
from tilewise.testing.case import Case
from tilewise.testing.check import Mismatch, check_repeats
from tilewise.testing.drawing import Seeded, draw_case, draw_change
from tilewise.tools.bench.machine import describe

DRAWS = 4  # inputs on which torch's own error is taken, as in the random tests
EVERY = 10  # cases from one writing of the record to the next
# What a backend is for, so that few cases are drawn in vain; and few head dims, each of which is compiled.
LIMITS: dict[str, dict[str, Any]] = {
    "hopper": {"forms": ("dense", "varlen"), "dtypes": ("f16", "bf16"), "head_dims": (64, 128, 256), "most": 300},
    "triton": {"head_dims": (40, 64, 128, 256), "most": 300},
}
WIDEST_FLOAT32 = 64  # on `triton`, where wider float32 kernels take longest to compile


def fitted(case: Case, backend: str | None) -> Case:
    """The case without what the backend refuses, or what takes long to compile."""
    if backend == "hopper":
        strides = case.strides if case.strides == "permuted" else ""  # others break 16 bytes
        return replace(case, k="", v="", strides=strides, scale=case.scale and abs(case.scale))
    if backend == "triton" and case.dtype == "f32":
        return replace(case, D=min(case.D, WIDEST_FLOAT32), Dv=min(case.Dv, WIDEST_FLOAT32))
    return case


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def surroundings(device: str) -> dict[str, Callable[[], Any]]:
    return {
        "nothing": contextlib.nullcontext,
        "default device meta": lambda: torch.device("meta"),
        "default dtype float64": lambda: default_dtype(torch.float64),
        "autocast": lambda: torch.autocast(torch.device(device).type, dtype=torch.bfloat16),
        "inference mode": torch.inference_mode,
    }


def drawn(seed: int, backend: str | None) -> tuple[Case, Case, str]:
    """The case of a seed, its change, and the name of what is around the calls."""
    chooser = Seeded(seed)
    case = draw_case(chooser, **LIMITS.get(backend or "", {}))
    change = draw_change(chooser, case)
    return fitted(case, backend), fitted(change, backend), chooser.pick(list(surroundings("cpu")))


@dataclass(frozen=True)
class Outcome:
    """Of one case. `share` is its largest error as a share of the bound."""

    seed: int
    dtype: str = "failed"
    around: str = "failed"
    share: float = 0.0
    error: str = ""
    unsupported: bool = False


def run(seed: int, backend: str | None, device: str) -> Outcome:
    case, change, around = drawn(seed, backend)
    try:
        verdict = check_repeats(case, change, backend, device, DRAWS, surroundings(device)[around])
    except Unsupported:
        return Outcome(seed, unsupported=True)
    except Mismatch as error:
        return Outcome(seed, error=str(error))
    except Exception as error:
        return Outcome(seed, error=f"{type(error).__name__}: {error}")
    share = verdict.error / verdict.bound if verdict.bound else float(verdict.error > 0)
    return Outcome(seed, case.dtype, around, share)


def serve(pipe: Connection, backend: str | None, device: str, threads: int) -> None:
    """A process: a seed comes, its outcome goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(run(pipe.recv(), backend, device))


class Worker:
    """A process that has one seed at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, end = spawn.Pipe()
        threads = max(1, torch.get_num_threads() // args.jobs)
        self.process: SpawnProcess = spawn.Process(
            target=serve, args=(end, args.backend, args.device, threads), daemon=True
        )
        self.process.start()
        end.close()
        self.seed = -1

    def give(self, seed: int) -> None:
        self.seed = seed
        with contextlib.suppress(ConnectionError):  # `take` tells of a process that is dead
            self.pipe.send(seed)

    def take(self) -> Outcome:
        try:
            found: Outcome = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return Outcome(self.seed, error=f"the process died, exit status {self.process.exitcode}")
        return found

    def end(self) -> None:
        self.process.terminate()
        self.process.join()


def outcomes(todo: Iterator[int], wanted: Callable[[int], bool], args: argparse.Namespace) -> Iterator[Outcome]:
    """Outcomes as they come, of seeds of `todo` as long as one more is `wanted` beside those under way."""
    deadline = time.monotonic() + args.seconds if args.seconds else None
    busy: dict[Connection, Worker] = {}
    idle = [Worker(args) for _ in range(args.jobs)]
    try:
        while True:
            while idle and wanted(len(busy)):
                worker = idle.pop()
                worker.give(next(todo))
                busy[worker.pipe] = worker
            left = None if deadline is None else deadline - time.monotonic()
            if not busy or (left is not None and left <= 0):
                return
            for pipe in wait(list(busy), left):
                assert isinstance(pipe, Connection)
                worker = busy.pop(pipe)
                found = worker.take()
                idle.append(worker if worker.process.is_alive() else Worker(args))
                yield found
    finally:
        for worker in [*busy.values(), *idle]:
            worker.end()


def fresh(args: argparse.Namespace) -> dict[str, Any]:
    command = f"python benchmarks/cpu/random_calls.py --device {args.device}"
    command += f" --backend {args.backend}" if args.backend else ""
    return describe(f"{command} --cases {args.cases} --jobs {args.jobs}", torch.device(args.device)) | {
        "what": "random calls against the float64 oracle",
        "backend": args.backend or "the best that can",
        "seeds": [args.seed, args.seed],
        "unfinished": [],
        "cases": 0,
        "calls": 0,
        "unsupported": 0,
        "seconds": 0.0,
        "by_dtype": {},
        "around": {},
        "failures": [],
    }


def seeds_left(record: dict[str, Any]) -> Iterator[int]:
    """Those that were under way when the last run ended, then new ones. Each is `unfinished` until it is noted."""
    yield from list(record["unfinished"])
    while True:
        seed = record["seeds"][1]
        record["seeds"][1] += 1
        record["unfinished"].append(seed)
        yield seed


def note(record: dict[str, Any], found: Outcome, backend: str | None) -> None:
    record["unfinished"].remove(found.seed)
    if found.unsupported:
        record["unsupported"] += 1
        return
    record["cases"] += 1
    record["calls"] += 8
    record["around"][found.around] = record["around"].get(found.around, 0) + 1
    worst = record["by_dtype"].setdefault(found.dtype, {"cases": 0, "largest_error_of_bound": 0.0})
    worst["cases"] += 1
    worst["largest_error_of_bound"] = max(worst["largest_error_of_bound"], round(found.share, 4))
    if found.error:
        case, change, around = drawn(found.seed, backend)
        text = f"{case}; then {change}; around: {around}"
        record["failures"].append({"seed": found.seed, "case": text, "error": found.error})
        print(f"seed {found.seed}: {text}\n  {found.error}", flush=True)


def save(record: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(record, indent=1, default=str) + "\n")
        draft.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, help="after which no case is waited for")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", help="the best that can, unless it is named")
    parser.add_argument("--json", type=Path, help="the record; a run that was stopped goes on from it")
    args = parser.parse_args()
    record = json.loads(args.json.read_text()) if args.json and args.json.exists() else fresh(args)
    record.setdefault("unfinished", [])
    started, done = time.perf_counter() - record["seconds"], record["cases"]
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        for found in outcomes(seeds_left(record), lambda busy: bool(record["cases"] + busy < args.cases), args):
            note(record, found, args.backend)
            if record["cases"] % EVERY == 0 and not found.unsupported:
                record["seconds"] = round(time.perf_counter() - started, 1)
                save(record, args.json)
                left = record["seconds"] / record["cases"] * (args.cases - record["cases"]) / 60
                progress = f"{record['cases']} of {args.cases}, {len(record['failures'])} failed"
                print(f"{progress}, {left:.0f} min left", flush=True)
    except KeyboardInterrupt:
        print("stopped")
    record["seconds"] = round(time.perf_counter() - started, 1)
    save(record, args.json)
    print(json.dumps(record["by_dtype"], indent=1), f"{record['cases'] - done} cases now", sep="\n")
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
