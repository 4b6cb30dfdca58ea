"""Runs tasks: times all candidates for a case, interleaved, and checks each against the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ... import TileMap
from ..workloads import Inputs, make_inputs
from . import machine
from .measure import Call, Timing, interleaved, waiting
from .measure_gpu import interleaved_on_gpu
from .oracle import MOST_ERROR, oracle_errors
from .peers import OURS, Candidate, find, tried
from .record import Cell, TimedResult
from .suites import Task

SLOW = 1.5  # seconds: a peer that takes longer is timed by one call
PAST_L2 = 256 * 2**20  # bytes of K and V; larger than any GPU's L2 cache
MOST_SETS = 8
MAP_TILE = (128, 128)


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how long cases are timed, and which peers."""

    device: torch.device
    dtype: torch.dtype
    budget: float  # seconds for each candidate of a case
    peers: Sequence[str]

    def time(self, candidates: Sequence[Sequence[Call]]) -> list[tuple[Timing, str]]:
        """Each candidate's time and a note."""
        budget = self.budget * len(candidates)
        if self.device.type == "cuda":
            return [
                (timing, "" if is_graph else "eager") for timing, is_graph in interleaved_on_gpu(candidates, budget)
            ]
        calls = [waiting(calls[0], self.device) for calls in candidates]
        return [(timing, "") for timing in interleaved(calls, budget)]


@torch.no_grad()
def measure(task: Task, bench: Bench) -> Cell:
    """One case by every candidate that can compute it."""
    case = task.case
    sets = [make_inputs(case, bench.device, bench.dtype, seed) for seed in range(_sets(task, bench.device))]
    x = sets[0]
    if task.tile_map:
        sets = [_mapped(x) for x in sets]
    plan = sets[0].plan()
    assert plan.cost is not None
    candidates = [_candidates(task, x, bench.peers) for x in sets]
    memory = machine.taken_by(candidates[0][0].call, bench.device) if task.memory and candidates[0][0].call else None
    refused: dict[str, str] = {}
    kept: list[int] = []
    outputs = []
    slow: dict[int, float] = {}  # candidates that are timed by one call
    for number, candidate in enumerate(candidates[0]):
        start = time.perf_counter()
        out, reason = tried(candidate)
        if out is not None and _is_slow(candidate, start, bench):
            start = time.perf_counter()
            _called(candidate)()  # the first call may have compiled
            if _is_slow(candidate, start, bench):
                slow[number] = time.perf_counter() - start
        if out is None:
            if candidate.name == OURS:
                raise RuntimeError(reason)
            refused[candidate.name] = reason
        else:
            kept.append(number)
            outputs.append(out)
    errors = oracle_errors(x, outputs)
    del outputs
    again = [number for number in kept if number not in slow]
    timed = dict(zip(again, bench.time([[_called(of_set[n]) for of_set in candidates] for n in again]), strict=True))
    timed |= {number: (Timing(took, took, 0.0, 1), "once") for number, took in slow.items()}
    results = tuple(
        TimedResult(candidates[0][number].name, timed[number][0], error, timed[number][1])
        for number, error in zip(kept, errors, strict=True)
    )
    return Cell(
        group=group_of(task),
        name=case.name,
        metric=task.metric,
        ways=results,
        refused=refused,
        x=task.x,
        allowed=MOST_ERROR[bench.dtype],
        flops=plan.cost.flops,
        bytes=plan.cost.bytes_moved,
        workspace=int(plan.workspace_bytes),
        plan=plan.summary(),
        cells=plan.cost.cells,
        tiles=plan.cost.tiles.mixed + plan.cost.tiles.full,
        memory=None if memory is None else max(memory, int(plan.workspace_bytes)),  # which may be cached
    )


def group_of(task: Task) -> str:
    return task.group if task.suite == "scale" else f"{task.suite}: {task.group}"


def _candidates(task: Task, x: Inputs, peers: Sequence[str]) -> list[Candidate]:
    """Our call, our other forms, then the peers'."""
    ours = [Candidate(OURS, x.attend)]
    if x.block_table is not None:
        ours.append(Candidate(f"{OURS}, contiguous", _contiguous(x).attend))
    return [*ours, *find(task.case, x, peers)]


def _is_slow(candidate: Candidate, start: float, bench: Bench) -> bool:
    return bench.device.type == "cpu" and candidate.name != OURS and time.perf_counter() - start > SLOW


def _called(candidate: Candidate) -> Callable[[], torch.Tensor]:
    assert candidate.call is not None
    return candidate.call


def _contiguous(x: Inputs) -> Inputs:
    """The same paged cache as contiguous rows."""
    assert x.block_table is not None
    table = x.block_table.clamp_min(0).long()
    k, v = (pages[table].flatten(1, 2).transpose(1, 2).contiguous() for pages in (x.k, x.v))
    return replace(x, k=k, v=v, block_table=None)


def _mapped(x: Inputs) -> Inputs:
    return replace(x, options={**x.options, "tile_map": TileMap.from_mask(x.options["mask"], MAP_TILE)})


def _sets(task: Task, device: torch.device) -> int:
    """Several sets of inputs, for a GPU whose L2 would hold one."""
    if device.type != "cuda" or task.metric != "bytes":
        return 1
    case = task.case
    keys = sum(case.lengths) or case.kv_len * case.batch
    size = 2 * keys * case.kv_heads * (case.head_dim + (case.value_dim or case.head_dim))
    return max(1, min(MOST_SETS, -(-PAST_L2 // size)))
