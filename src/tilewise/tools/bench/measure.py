"""Times several calls interleaved in one loop, so that a change in the machine's speed affects all of them."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

Call = Callable[[], object]
Clock = Callable[[], float]

LEAST_ROUNDS = 3
MOST_ROUNDS = 300
MOST_BLOCKS = 5
# Seconds. Shorter calls are repeated within a turn, since a single one is noisy. A turn counts as its median, which is
# closer to a plain loop than its mean (benchmarks/cpu/by_hand.py).
LEAST_TURN = 2e-2
# Seconds of warm-up calls at the start of such a turn: after another call's turn threads sleep and caches are cold. (A
# pause before each turn would slow its calls: an idle core is slower.)
WARM = 6e-3


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call."""

    seconds: float  # the best of the blocks' medians
    median: float  # of all rounds
    spread: float  # between the quartiles of all rounds, as a share of the median
    rounds: int
    repeats: int = 1  # calls in each round's turn


def interleaved(
    calls: Sequence[Call],
    budget: float,
    most: int = MOST_ROUNDS,
    clock: Clock = time.perf_counter,
) -> list[Timing]:
    """Times `calls` in rounds A, B, A, B ... for about `budget` seconds, at least three rounds.

    The rounds are cut into blocks; each call's time is the best of its blocks' medians. The median leaves out single
    disturbances, the best block those that last.
    """
    repeats = [_warm_up(call, clock) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    with _no_collection():
        start, rounds = clock(), 0
        while rounds < LEAST_ROUNDS or (rounds < most and clock() - start < budget):
            for call, count, seconds in zip(calls, repeats, times, strict=True):
                seconds.append(_turn(call, count, clock))
            rounds += 1
    return [summary(seconds, count) for seconds, count in zip(times, repeats, strict=True)]


def waiting(call: Call, device: torch.device) -> Call:
    """The call; on an accelerator without events, with a synchronisation after it."""
    if device.type == "cpu":
        return call

    def waited() -> None:
        call()
        torch.accelerator.synchronize(device)

    return waited


def least_times(calls: Mapping[str, Call], seconds: float) -> dict[str, float]:
    """The minimum time of each call, interleaved for so many seconds: robust on a busy machine."""
    least, end = dict.fromkeys(calls, math.inf), time.perf_counter() + seconds
    while math.inf in least.values() or time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def summary(times: Sequence[float], repeats: int = 1) -> Timing:
    """The `Timing` of one call's rounds, in order."""
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [median] * 3
    best = min(statistics.median(block) for block in blocks(times))
    return Timing(best, median, (high - low) / median if median else 0.0, len(times), repeats)


def blocks(times: Sequence[float]) -> list[Sequence[float]]:
    """`times` cut into up to five blocks of at least three, if there are that many."""
    count = max(1, min(MOST_BLOCKS, len(times) // LEAST_ROUNDS))
    edges = [round(i * len(times) / count) for i in range(count + 1)]
    return [times[a:b] for a, b in pairwise(edges)]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _warm_up(call: Call, clock: Clock) -> int:
    """Calls twice (the first may compile); returns how many calls make a turn."""
    call()
    start = clock()
    call()
    seconds = clock() - start
    return max(1, min(1000, math.ceil(LEAST_TURN / seconds))) if seconds > 0 else 1000


def _turn(call: Call, count: int, clock: Clock) -> float:
    """The median of `count` calls, after warm-up calls."""
    end = clock() + WARM
    while count > 1 and clock() < end:
        call()
    times = []
    for _ in range(count):
        start = clock()
        call()
        times.append(clock() - start)
    return statistics.median(times)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turns the garbage collector off, which would add its time to some call."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
