"""Works, the ways to do them, and how long each takes: all ways of a work are interleaved.

A time is the median over rounds, by CUDA events. So a card that slows down under load slows every way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tilewise.backends.gpu.driver import check

Way = Callable[[], Any]
REPEATS = 3  # calls between two events
WARM = 0.2  # seconds of all ways, interleaved, before the first round counts


@dataclass
class Work:
    """One row of a table: its name, its ways, and what turns a time into a rate."""

    name: str
    flops: float = 0.0
    bytes: float = 0.0
    ways: dict[str, Callable[[], list[Way]]] = field(default_factory=dict)  # each makes calls, one for each input set
    graph: bool = False
    check: bool = True


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def make_calls(work: Work) -> dict[str, list[Way]]:
    """The ways of a work that run, each checked against the first."""
    calls: dict[str, list[Way]] = {}
    want = None
    for name, make in work.ways.items():
        try:
            ways = make()
            got = ways[0]()
            torch.cuda.synchronize()
        except Exception as error:  # a peer without this kernel, or a launch that does not fit
            print(f"  {work.name} / {name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
            continue
        if want is None:
            want = got.float()
        elif work.check and not torch.allclose(got.float().reshape(want.shape), want, atol=3e-2, rtol=3e-2):
            print(f"  {work.name} / {name}: WRONG by {(got.float() - want).abs().max():.3g}", flush=True)
            continue
        calls[name] = ways
    return calls


def graphed(ways: list[Way]) -> Way:
    """All calls of a way in one CUDA graph, held with it: the graph has the addresses of their tensors, and no more."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for way in ways:
            way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for way in ways:
            way()

    def replay(held: list[Way] = ways) -> None:
        graph.replay()

    return replay


def seconds(runs: dict[str, Way], rounds: int, budget: float) -> dict[str, float]:
    """The time of each: the median over rounds in which all are interleaved; after `budget` seconds no more rounds.

    Each round begins with another one, so that none always comes after the same one.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    warm = time.perf_counter() + WARM
    while runs and time.perf_counter() < warm:
        for run in runs.values():
            run()
        torch.cuda.synchronize()
    start = time.perf_counter()
    names = list(runs)
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            run = runs[name]
            run()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            for _ in range(REPEATS):
                run()
            events[1].record()
            torch.cuda.synchronize()
            times[name].append(events[0].elapsed_time(events[1]) * 1e-3 / REPEATS)
        if time.perf_counter() - start > budget:
            break
    return {name: sorted(ts)[len(ts) // 2] for name, ts in times.items()}


def measure(work: Work, rounds: int, budget: float) -> dict[str, float]:
    """Seconds of each way of a work."""
    runs: dict[str, Way] = {}
    counts: dict[str, int] = {}
    for name, ways in make_calls(work).items():
        try:
            runs[name], counts[name] = (graphed(ways), len(ways)) if work.graph else (ways[0], 1)
        except Exception as error:
            print(f"  {work.name} / {name}: no graph: {str(error).splitlines()[0][:100]}", flush=True)
    return {name: t / counts[name] for name, t in seconds(runs, rounds, budget).items()}


def ceilings() -> dict[str, float]:
    """What the card does at best, in the same run."""
    a, b = randn(8192, 8192), randn(8192, 8192)
    x = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    y = torch.empty_like(x)
    amounts = {
        "matmul TFLOPS": (lambda: a @ b, 2 * 8192**3 / 1e12),
        "copy TB/s": (lambda: y.copy_(x), 8 * x.numel() / 1e12),
        "read TB/s": (lambda: x.sum(), 4 * x.numel() / 1e12),
    }
    return {name: amount / seconds({name: run}, 10, 5)[name] for name, (run, amount) in amounts.items()}


def show(work: Work, times: dict[str, float]) -> str:
    parts = []
    for name, t in times.items():
        if work.bytes:
            parts.append(f"{name} {t * 1e6:.1f}us {work.bytes / t / 1e12:.2f}")
        elif t < 1e-3:
            parts.append(f"{name} {t * 1e3:.3f}ms {work.flops / t / 1e12:.0f}")
        else:
            parts.append(f"{name} {work.flops / t / 1e12:.0f}")
    return f"{work.name}: " + " | ".join(parts)


@dataclass
class KernelAlone:
    """A kernel of a call, launched by itself: each time with the same memory."""

    name: str
    compiled: Any
    run: Callable[[], None]


def kernels_alone(launcher: Any, tensors: Any) -> list[KernelAlone]:
    """The kernels of a launcher's only program, in their order, after the whole call has run in the same memory."""
    for _ in range(2):  # recorded, then replayed
        launcher(tensors)
    (program,) = launcher.recorded.values()
    addresses = [*program.memory][: program.sources]
    workspace = torch.zeros(max(1, program.workspace_bytes), dtype=torch.uint8, device=program.device)
    addresses += [workspace.data_ptr()] * (program.workspace_bytes > 0)
    addresses += [addresses[source] + offset for source, offset in program.derived]

    def run(kernels: Any, keep: Any = (workspace, tensors)) -> None:
        stream = torch.cuda.current_stream(program.device).cuda_stream
        program.pack(program.memory, 0, *addresses)
        for move, at in program.maps:
            move(addresses[at])
        for kernel in kernels:
            kernel.config.stream = program.stream = stream
            check(program.launch(*kernel.arguments), "launched")

    run(program.kernels)
    return [KernelAlone(x.compiled.metadata.name, x.compiled, partial(run, [x])) for x in program.kernels]
