"""Gluon kernels for Hopper GPUs (H100, H200): prefill of 16-bit tensors with every option of position and score."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

from ...core.plan import OtherDevice, Plan
from ...core.problem import Problem
from ...core.tensors import Tensors
from ..triton.device import arch_of
from . import heuristics

TESTED = "3.6."


def supports(problem: Problem) -> str | None:
    p = problem
    if p.device.type != "cuda" or arch_of(p.device) != 90:
        return OtherDevice("runs on Hopper GPUs")
    if not _triton_version().startswith(TESTED):
        return f"needs Triton {TESTED}x: Gluon changes from version to version"
    return heuristics.refusal(p)


def declines(problem: Problem) -> str | None:
    """Why the Triton backend is the better choice, if it is: by measurement, see benchmarks/h200/LOG.md, h200 20."""
    return heuristics.slower(problem)


def plan(problem: Problem) -> Plan:
    c = heuristics.config(problem)
    return Plan(
        problem,
        backend="hopper",
        kernel="prefill, warp-specialised",
        tile=(64 * c.consumers, c.BN),
        notes=heuristics.notes(problem, c),
    )


def run(plan: Plan, tensors: Tensors) -> None:
    _launch().bound_to(plan)(tensors)


def bind(plan: Plan, tensors: Tensors) -> Any:
    return _launch().bind(plan, tensors)


@cache
def _triton_version() -> str:
    if importlib.util.find_spec("triton") is None:
        return "none"
    return str(importlib.import_module("triton").__version__)


@cache
def _launch() -> Any:
    """The launches, imported with the first call, and Triton with them."""
    from . import launch

    return launch
