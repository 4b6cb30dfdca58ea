"""Gluon kernels for Hopper GPUs (H100, H200): prefill of 16-bit tensors with every option of position and score."""

from __future__ import annotations

from functools import cache
from typing import Any

from ...core.plan import OtherDevice, Plan
from ...core.problem import Problem
from ...core.tensors import Tensors
from ..gpu.target import target_of, triton_refusal
from .fwd import config

TESTED_TRITON = (3, 6)  # Gluon changes from version to version


def supports(problem: Problem) -> str | None:
    p = problem
    if p.device.type != "cuda" or target_of(p.device).arch != 90:
        return OtherDevice("runs on Hopper GPUs")
    return triton_refusal(TESTED_TRITON, TESTED_TRITON) or config.refusal(p)


def declines(problem: Problem) -> str | None:
    """Why the Triton backend is the better choice, if it is: by measurement, see benchmarks/h200/LOG.md, h200 20."""
    return config.slower(problem)


def plan(problem: Problem) -> Plan:
    c = config.config_of(problem)
    return Plan(
        problem,
        backend="hopper",
        kernel="prefill, warp-specialised",
        tile=(64 * c.consumers, c.BN),
        notes=config.notes(problem, c),
    )


def run(plan: Plan, tensors: Tensors) -> None:
    _launch().launcher_of(plan)(tensors)


def bind(plan: Plan, tensors: Tensors) -> Any:
    from ..gpu.kernel import by_address

    return by_address(_launch().launcher_of(plan), tensors)


@cache
def _launch() -> Any:
    """The launches, imported with the first call, and Triton with them."""
    from .fwd import launch

    return launch
