"""The CPU backend: Numba kernels with explicit vector code. Any call whose tensors are on the CPU."""

from __future__ import annotations

import importlib.util
from typing import Any

from ...plan import OtherDevice, Plan
from ...problem import Problem
from ...tensors import Shared, Tensors


def supports(problem: Problem) -> str | None:
    if problem.device.type != "cpu":
        return OtherDevice(f"the tensors are on {problem.device.type}")
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install numba)"
    from .host import missing

    return missing()


def plan(problem: Problem) -> Plan:
    from . import launch  # Numba is imported by the first call, not by the package

    return launch.prepare(problem)


def run(plan: Plan, tensors: Tensors) -> None:
    from . import launch

    launch.run(plan, tensors)


def run_pair(shared_plan: Plan, plan: Plan, tensors: Tensors, shared: Shared) -> None:
    from . import pair

    pair.run(shared_plan, plan, tensors, shared)


def bind(plan: Plan, tensors: Tensors) -> Any:
    from . import repeat

    return repeat.bind(plan, tensors)


bind_quantised = bind  # which takes scales too
