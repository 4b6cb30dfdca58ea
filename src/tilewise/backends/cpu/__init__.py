"""The CPU backend: Numba kernels with explicit vector code. Any call whose tensors are on the CPU."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core import host
from ...core.kv_store import Store, Writer
from ...core.machines import Machine
from ...core.plan import OtherDevice, Plan, Unproven
from ...core.problem import (
    CascadeProblem,
    Problem,
    WriteProblem,
    family_of,
    no_alibi_by_tree,
    no_dropout_by_tree,
    no_mods_by_tree,
    other_formats,
)
from ...core.tensors import BackwardTensors, SharedPrefix, Tensors


def supports(problem: Problem | WriteProblem) -> str | None:
    if (reason := serves(problem.device)) is not None:
        return reason
    from .codegen.dtypes import STORED

    if (reason := other_formats(problem, STORED)) is not None or isinstance(problem, WriteProblem):
        return reason
    return no_alibi_by_tree(problem) or no_mods_by_tree(problem) or no_dropout_by_tree(problem)


supports_write = supports


def takes_shared(problem: Problem) -> bool:
    """Whether `k_shared` is read in place."""
    return serves(problem.device) is None


def serves(device: torch.device) -> str | None:
    return unusable() if device.type == "cpu" else OtherDevice(f"the tensors are on {device.type}")


@cache
def unusable() -> str | None:
    """Why the kernels cannot be compiled or run here; None if they can."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install numba)"
    try:
        import numba  # noqa: F401

        from .isa import missing
    except Exception as error:  # a NumPy or LLVM of the wrong version: ImportError, OSError, SystemError, ...
        return f"numba cannot be imported ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return missing()


def family(problem: Problem) -> str:
    from . import config

    return family_of(problem, config.is_decode(problem))


def unproven(problem: Problem) -> Unproven | None:
    """What has not run on such a CPU: docs/platforms.md."""
    from .isa import machine

    if machine() == "aarch64":
        return Unproven("the kernels for AArch64 have run under emulation only", taken=True)
    return None


def proof_facts(device: torch.device) -> dict[str, str] | None:
    """What a proof of these kernels holds for; None where they cannot run."""
    if serves(device) is not None:
        return None
    from . import isa

    return {"device": host.cpu_name(), **isa.facts()}


def plan(problem: Problem) -> Plan:
    from . import launch  # Numba is imported by the first call, not by the package

    return launch.prepare(problem)


def run(plan: Plan, tensors: Tensors) -> None:
    from . import launch

    launch.run(plan, tensors)


def supports_backward(problem: Problem) -> str | None:
    return supports(problem)


def plan_backward(problem: Problem) -> Plan:
    from . import backward

    return backward.prepare(problem)


def run_backward(plan: Plan, tensors: BackwardTensors) -> None:
    from . import backward

    backward.run(plan, tensors)


def run_cascade(shared_plan: Plan, plan: Plan, tensors: Tensors, shared: SharedPrefix) -> None:
    from . import cascade

    cascade.run(shared_plan, plan, tensors, shared)


def cascade_gain(problem: CascadeProblem, rows: np.ndarray, tokens: int) -> float:
    from . import config

    return config.cascade_gain(problem, rows, tokens)


def writer(k: Store, v: Store, wrap: int) -> Writer:
    from .kv_write import Append

    return Append(k, v, wrap)


def machines() -> dict[str, Machine]:
    from . import other_cpus

    return other_cpus.machines()


def compile_loop(loop: Callable[..., Any]) -> Callable[..., Any]:
    """A plain loop over NumPy arrays, compiled and cached on disk by a digest of its file."""
    import numba

    from ...core.private.numba import keep_in
    from .kernel_cache import CachedLoop

    stamp = hashlib.sha256(Path(loop.__code__.co_filename).read_bytes()).hexdigest()
    function: Any = numba.njit(nogil=True)(loop)
    keep_in(function, CachedLoop(loop.__name__, stamp))  # Numba's own needs a folder in the package or at home
    return function


def bind(plan: Plan, tensors: Tensors) -> Any:
    from . import launch

    p = plan.problem
    if p.rules.q_offset == "rows":
        return None  # a bound launch does not check offsets
    return launch.bind(plan, tensors)
