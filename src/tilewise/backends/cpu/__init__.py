"""The CPU backend: Numba kernels with explicit vector code. Any call whose tensors are on the CPU."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

from ...core.plan import OtherDevice, Plan
from ...core.problem import Problem
from ...core.tensors import Shared, Tensors


def supports(problem: Problem) -> str | None:
    if problem.device.type != "cpu":
        return OtherDevice(f"the tensors are on {problem.device.type}")
    if (reason := unusable()) is not None:
        return reason
    from .codegen.dtypes import STORED

    return problem.unread(STORED)


@cache
def unusable() -> str | None:
    """Why the kernels cannot be compiled or run here, if they cannot."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install numba)"
    try:
        import numba  # noqa: F401

        from .isa import missing
    except Exception as error:  # a NumPy or LLVM that does not fit: ImportError, OSError, SystemError, ...
        return f"numba cannot be imported ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return missing()


def plan(problem: Problem) -> Plan:
    from . import launch  # Numba is imported by the first call, not by the package

    return launch.prepare(problem)


def run(plan: Plan, tensors: Tensors) -> None:
    from . import launch

    launch.run(plan, tensors)


def run_pair(shared_plan: Plan, plan: Plan, tensors: Tensors, shared: Shared) -> None:
    from . import cascade

    cascade.run(shared_plan, plan, tensors, shared)


def bind(plan: Plan, tensors: Tensors) -> Any:
    from . import launch

    return launch.bind(plan, tensors)


bind_quantised = bind  # which takes scales too
