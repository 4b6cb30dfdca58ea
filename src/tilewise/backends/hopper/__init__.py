"""Gluon kernels for Hopper GPUs (H100, H200), 16-bit tensors: prefill with every option of position and score, and a
backward pass."""

from __future__ import annotations

from functools import cache
from typing import Any

from ...core.plan import OtherDevice, Plan
from ...core.problem import Problem
from ...core.tensors import BackwardTensors, Tensors
from ..gpu.target import target_of, triton_refusal
from .bwd import config as bwd_config
from .fwd import config

TESTED_TRITON = (3, 6)  # Gluon changes from version to version


def supports(problem: Problem) -> str | None:
    return _machine_refusal(problem) or config.refusal(problem)


def supports_backward(problem: Problem) -> str | None:
    return _machine_refusal(problem) or bwd_config.refusal(problem)


def _machine_refusal(problem: Problem) -> str | None:
    if problem.device.type != "cuda" or target_of(problem.device).arch != 90:
        return OtherDevice("runs on Hopper GPUs")
    return triton_refusal(TESTED_TRITON, TESTED_TRITON)


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


def plan_backward(problem: Problem) -> Plan:
    s = bwd_config.spec_of(problem)
    return Plan(
        problem,
        backend="hopper",
        kernel="backward, warp-specialised",
        tile=(s.BM, bwd_config.BN),
        workspace_bytes=bwd_config.workspace_bytes(problem, s),
        notes=("dQ added in the order of key blocks",) if s.deterministic else ("dQ added in any order",),
    )


def run(plan: Plan, tensors: Tensors) -> None:
    _launch().launcher_of(plan)(tensors)


def bind(plan: Plan, tensors: Tensors) -> Any:
    from ..gpu.kernel import by_address

    return by_address(_launch().launcher_of(plan), tensors)


def run_backward(plan: Plan, tensors: BackwardTensors) -> None:
    _backward_launch().bound_to(plan)(tensors)


@cache
def _launch() -> Any:
    """The launches, imported with the first call, and Triton with them."""
    from .fwd import launch

    return launch


@cache
def _backward_launch() -> Any:
    from .bwd import launch

    return launch
