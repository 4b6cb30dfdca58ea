"""Times several calls on a GPU, interleaved, by events on its own clock.

Short calls are captured in a CUDA graph, so that kernels are timed and not Python; host overhead is measured
separately. A call may have several sets of inputs, used in turn, so that a KV cache is read from memory and not from
L2.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...core.private.torch import gpu_sleep
from .measure import LEAST_ROUNDS, MOST_ROUNDS, Call, Timing, interleaved, summary, waiting

GRAPH_UNDER = 0.5e-3  # seconds: longer calls hide the host's work
LEAST_TURN = 1e-3  # seconds of work between two events
BACKLOG = 400_000  # cycles, about 0.2 ms: the GPU waits until the host has queued a turn


@dataclass(frozen=True, slots=True)
class Turn:
    """What is timed at once: `count` calls."""

    run: Call
    count: int
    is_graph: bool


def interleaved_on_gpu(candidates: Sequence[Sequence[Call]], budget: float) -> list[tuple[Timing, bool]]:
    """Times each candidate (a call for each set of inputs) for about `budget` seconds; also whether it was a graph."""
    turns = [prepare(calls) for calls in candidates]
    times: list[list[float]] = [[] for _ in turns]
    start, rounds = time.perf_counter(), 0
    while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and time.perf_counter() - start < budget):
        for turn, durations in zip(turns, times, strict=True):
            durations.append(seconds(turn.run) / turn.count)
        rounds += 1
    return [(summary(durations, turn.count), turn.is_graph) for durations, turn in zip(times, turns, strict=True)]


def prepare(calls: Sequence[Call]) -> Turn:
    """A turn of whole passes over `calls`, of at least `LEAST_TURN` seconds."""
    for call in calls:  # compiles
        call()
    once = seconds(lambda: [call() for call in calls])
    repeats = max(1, min(200, math.ceil(LEAST_TURN / once)))

    def passes() -> None:
        for _ in range(repeats):
            for call in calls:
                call()

    if once / len(calls) < GRAPH_UNDER:
        with suppress(RuntimeError):  # some libraries cannot be captured
            return Turn(captured(passes), repeats * len(calls), is_graph=True)
    return Turn(passes, repeats * len(calls), is_graph=False)


def seconds(run: Call) -> float:
    """The time of one run on the GPU's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    gpu_sleep(BACKLOG)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def captured(run: Call) -> Call:
    """The same work as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a library's set-up on its first call must not be captured
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def ceilings(
    device: torch.device, dtype: torch.dtype, budget: float, size: int = 8192, read: int = 4 * 2**30
) -> dict[str, Any]:
    """The speeds that bound attention here: reading memory, and products of large matrices in `dtype`."""
    square = torch.randn(size, size, device=device, dtype=dtype)
    buffer = torch.ones(read // 4, device=device)
    calls: list[Call] = [lambda: buffer.sum(), lambda: square @ square]
    if device.type == "cuda":
        (reading, _), (product, _) = interleaved_on_gpu([[call] for call in calls], budget)
    else:
        reading, product = interleaved([waiting(call, device) for call in calls], budget)
    return {
        "read_bytes": float(buffer.nbytes),
        "read_gb_per_s": buffer.nbytes / reading.seconds / 1e9,
        "read_spread": reading.spread,
        "matmul_size": float(size),
        "matmul_dtype": str(dtype).removeprefix("torch."),
        "matmul_gflop_per_s": 2 * size**3 / product.seconds / 1e9,
        "matmul_spread": product.spread,
    }
