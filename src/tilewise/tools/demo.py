"""`tilewise demo`: shapes of known models, each planned, timed against torch's SDPA and checked by the oracle."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from textwrap import fill

import torch

from .. import __version__
from .bench.oracle import MOST_ERROR, oracle_errors
from .bench.peers.sdpa import sdpa, why_not
from .bench.report import time_text
from .progress import Screen
from .workloads import WORKLOADS, Workload, make_inputs

INTERRUPTED = 130  # a shell's exit status after Ctrl-C
WRONG = 1
WIDTH = 100
MOST_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one case. `peer_*` are SDPA's; None if it cannot compute the call."""

    seconds: float
    error: float
    allowed: float
    peer_seconds: float | None = None
    peer_error: float | None = None

    @property
    def is_right(self) -> bool:
        return self.error <= self.allowed  # False for NaN


def demo(device: torch.device, quick: bool = False, seed: int = 0) -> int:
    """Runs every case and prints its result; returns the exit status."""
    # These models run in bfloat16. On a CPU torch is slow in it, and crashes on virtual machines that report AMX
    # without having it.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    cases = [case.shortened(4) for case in WORKLOADS] if quick else list(WORKLOADS)
    results: list[Result] = []
    start = time.perf_counter()
    with Screen(steps=3 * len(cases)) as screen:
        screen.print(_title(device, dtype))
        try:
            for number, case in enumerate(cases, 1):
                screen.print(f"\n[{number}/{len(cases)}] {case.name}: {case.about}\n      {case.shape()}")
                results.append(_run_case(case, device, dtype, quick, seed, screen))
        except KeyboardInterrupt:
            screen.print(f"\nInterrupted. {len(results)} of {len(cases)} cases done, in {time_text(_since(start))}.")
            return INTERRUPTED
        wrong = [case.name for case, result in zip(cases, results, strict=True) if not result.is_right]
        verdict = f"WRONG results in {', '.join(wrong)}" if wrong else f"All {len(cases)} cases are right"
        screen.print(f"\n{verdict}, by the float64 oracle. {time_text(_since(start))} in all.")
    return WRONG if wrong else 0


def _run_case(
    case: Workload, device: torch.device, dtype: torch.dtype, quick: bool, seed: int, screen: Screen
) -> Result:
    screen.step(f"{case.name}: inputs and plan")
    x = make_inputs(case, device, dtype, seed)
    screen.print(fill(f"plan   {x.plan().summary()}", WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 13))

    screen.step(f"{case.name}: oracle")
    refusal = why_not(case)
    calls = [x.attend] if refusal else [x.attend, sdpa(case, x)]
    outputs = [call() for call in calls]  # also a warm-up
    errors = oracle_errors(x, outputs)

    screen.step(f"{case.name}: timing")
    seconds = time_together(calls, device, budget=0.3 if quick else 2.0)
    result = Result(seconds[0], errors[0], MOST_ERROR[dtype])
    if not refusal:
        result = replace(result, peer_seconds=seconds[1], peer_error=errors[1])
    for line in describe(result, refusal):
        screen.print(f"      {line}")
    return result


def time_together(calls: Sequence[Callable[[], object]], device: torch.device, budget: float) -> list[float]:
    """The median time of each call, interleaved, so that a change in the machine's speed affects all of them."""
    times: list[list[float]] = [[] for _ in calls]
    start = time.perf_counter()
    while len(times[0]) < MOST_ROUNDS and (not times[0] or _since(start) < budget):
        for call, seconds in zip(calls, times, strict=True):
            _wait(device)
            begin = time.perf_counter()
            call()
            _wait(device)
            seconds.append(_since(begin))
    return [statistics.median(seconds) for seconds in times]


def describe(result: Result, refusal: str | None) -> list[str]:
    """A result in lines."""
    time_line = f"time   tilewise {time_text(result.seconds):>8}"
    error_line = f"error  tilewise {result.error:8.1e}"
    if result.peer_seconds is None:
        time_line += f"   SDPA no: {refusal}"
    else:
        speed_up = result.peer_seconds / result.seconds
        time_line += f"   SDPA {time_text(result.peer_seconds):>8}   speed-up {speed_up:.2f}x"
        error_line += f"   SDPA {result.peer_error:8.1e}"
    if not result.is_right:
        error_line += f"   WRONG: more than {result.allowed:.0e}"
    return [time_line, error_line]


def _title(device: torch.device, dtype: torch.dtype) -> str:
    names = {"cuda": lambda: torch.cuda.get_device_name(device), "mps": lambda: "an Apple GPU"}
    name = names.get(device.type, lambda: f"{torch.get_num_threads()} CPU threads")()
    kind = str(dtype).removeprefix("torch.")
    return f"tilewise {__version__} on {name}, {kind}, torch {torch.__version__}. Errors are against float64."


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _since(start: float) -> float:
    return time.perf_counter() - start
