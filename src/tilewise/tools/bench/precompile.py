"""Compiles the kernels of GPU cases in parallel processes: compiling is most of a benchmark's time on a GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

import torch

from ..workloads import make_inputs
from .peers import find
from .suites import Task

NEED_COMPILING = ("flex",)


def precompile(
    tasks: Sequence[Task], device: torch.device, dtype: torch.dtype, peers: Sequence[str], jobs: int
) -> None:
    """Runs every case once, in `jobs` processes, so that its kernels are in the disk cache."""
    jobs = min(len(tasks), jobs)
    if jobs < 2:
        return
    slow = [peer for peer in peers if peer in NEED_COMPILING]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for part in [pool.submit(run_once, tasks[i::jobs], str(device), dtype, slow) for i in range(jobs)]:
            part.result()


def default_jobs(device: torch.device) -> int:
    """Processes to compile with; a CPU's kernels are few and kept."""
    return min(12, os.cpu_count() or 1) if device.type == "cuda" else 1


@torch.no_grad()
def run_once(tasks: Sequence[Task], device: str, dtype: torch.dtype, peers: Sequence[str]) -> None:
    """Runs each case once, by ours and the peers that compile. Failures are reported later, when it is measured."""
    warnings.simplefilter("ignore")
    for task in tasks:
        with suppress(Exception):
            x = make_inputs(task.case, torch.device(device), dtype)
            x.attend()
            for candidate in find(task.case, x, peers):
                if candidate.call is not None:
                    candidate.call()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
