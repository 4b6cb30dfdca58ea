"""`tilewise tune`: finds the fastest tiles of the Triton kernels on this GPU, for the shapes of known models.

Every tile that fits is timed on every shape, interleaved, so that a GPU that slows down affects all. The best are kept
in a JSON file, which later calls read (`backends/triton/tuned.py`); it is rewritten after each shape.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..backends.gpu.target import target_of
from ..backends.triton import config, tuned
from ..backends.triton.spec import Config
from ..core.atomic_write import check_target
from ..core.options import Options
from ..core.plan import Plan
from ..validation import calls
from ..validation.calls import Call
from .models import MODELS
from .workloads import WORKLOADS, Inputs, Workload, make_inputs, of_layer

INTERRUPTED = 130  # a shell's exit status after Ctrl-C
CLEARLY = 0.98  # of the time of the heuristics' tile: smaller gains are noise, and are not kept
ROUNDS = 7
PROMPT = 8192

# The seconds of a call with each tile; None for one that does not fit.
Timer = Callable[[Call, Sequence[Config]], list[float | None]]


def cases(quick: bool = False) -> list[Workload]:
    """The shapes of the demo; unless `quick`, also longer prompts, and a prompt and the next token of every layer of
    every known model.
    """
    if quick:
        return list(WORKLOADS)
    prompts = [case.q_len > 1 and not case.lengths for case in WORKLOADS]
    known = [
        replace(case, q_len=PROMPT, kv_len=PROMPT) if long else case
        for case, long in zip(WORKLOADS, prompts, strict=True)
    ]
    for model in MODELS.values():
        for layer in model.layers:
            for rows, what in ((PROMPT, "prompt"), (1, "token")):
                known.append(of_layer(layer, f"{model.name} {layer.name} {what}", rows, PROMPT))
    return known


def tune(device: torch.device, quick: bool = False, to: Path | None = None, timer: Timer | None = None) -> int:
    """Times all tiles and writes the file; returns the exit status."""
    check_target("--json", to)
    file, timer = to or tuned.path(), timer or time_on_gpu
    table = tuned.read(file)
    todo, done, seen = cases(quick), 0, set[str]()
    try:
        for case in todo:
            call = _checked(make_inputs(case, device, torch.bfloat16))
            key = tuned.key_of(call.problem, target_of(device))
            if key in seen:  # the same shape as an earlier one, as Qwen3's and Llama's
                done += 1
                continue
            seen.add(key)
            result = search(call, timer)
            done += 1
            if result.tile is None:
                table.pop(key, None)
            else:
                table[key] = result.tile
            tuned.write(file, table)
            print(f"{done:2} of {len(todo)}  {case.name:24} {result}", flush=True)
    except KeyboardInterrupt:
        print(f"Interrupted. {done} of {len(todo)} shapes are done and kept in {file}", file=sys.stderr)
        return INTERRUPTED
    print(f"kept in {file}")
    return 0


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The result for one shape: its best tile, or None if the heuristics' tile is as good."""

    tile: Config | None
    seconds: float
    own: Config
    own_seconds: float
    tried: int

    def __str__(self) -> str:
        own = f"{name_of(self.own)} {self.own_seconds * 1e6:.1f} us"
        if self.tile is None:
            return f"stays at {own}, {self.tried} tried"
        return f"{name_of(self.tile)} {self.seconds * 1e6:.1f} us for {own}, {self.tried} tried"


def name_of(c: Config) -> str:
    return f"{c.BM}x{c.BK} w{c.warps} s{c.stages}"


def search(call: Call, timer: Timer) -> TuneResult:
    """The best tile for a call; among equals the first. The heuristics' own is the first of all."""
    device = call.problem.device
    tiles = tuned.candidates(call.problem, target_of(device))
    launches = [config.config_of(call.problem, target_of(device), c) for c in tiles]
    timed = [(s, c) for s, c in zip(timer(call, launches), tiles, strict=True) if s is not None]
    own_seconds = next((s for s, c in timed if c is tiles[0]), float("inf"))
    seconds, best = min(timed, key=lambda pair: pair[0])
    kept = None if seconds > CLEARLY * own_seconds else best
    return TuneResult(kept, seconds, tiles[0], own_seconds, len(timed))


def _checked(x: Inputs) -> Call:
    options = Options(**x.options)
    if x.block_table is not None:
        assert x.lengths is not None
        return calls.paged(x.q, x.k, x.v, x.block_table, x.lengths, options)
    return calls.dense(x.q, x.k, x.v, replace(options, kv_lengths=x.lengths))


def time_on_gpu(call: Call, launches: Sequence[Config]) -> list[float | None]:
    """The median times over interleaved rounds, by CUDA events."""
    from ..backends.triton.launch import Launcher

    runs: list[Launcher | None] = []
    for c in launches:
        plan = Plan(call.problem, "triton", "", (c.BM // c.pack, c.BK))
        bound: Launcher | None = Launcher(plan.problem, c, target_of(call.problem.device))
        try:
            assert bound is not None
            bound(call.tensors)
            torch.cuda.synchronize()
        except Exception as error:  # does not compile, or needs more shared memory than there is
            if "out of resource" not in str(error) and "PassManager" not in str(error):
                raise
            bound = None
        runs.append(bound)
    times: list[list[float]] = [[] for _ in launches]
    for _ in range(ROUNDS):
        for bound, of_bound in zip(runs, times, strict=True):
            if bound is None:
                continue
            bound(call.tensors)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(3):
                bound(call.tensors)
            end.record()
            torch.cuda.synchronize()
            of_bound.append(start.elapsed_time(end) * 1e-3 / 3)
    return [statistics.median(of_bound) if of_bound else None for of_bound in times]
