"""Plans for other CPUs. The target of kernels is fixed when this package is imported, so another process makes the
plan: it is told that its CPU is the other one, and compiles nothing.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from ...core.machines import Choose, Machine
from ...core.plan import Plan
from ...core.problem import Problem
from ...errors import Unsupported
from .targets import TARGETS, machine_of


class Cpu(NamedTuple):
    """A CPU that plans can be made for."""

    about: str
    target: str  # of `targets.py`
    cache: int  # bytes of a core's L2 cache


CPUS = {
    "avx2": Cpu("x86-64-v3: Haswell, Zen 2 and 3", "avx2", 512 << 10),
    "avx512": Cpu("AVX-512 with VNNI: Ice Lake", "avx512vnni", 1 << 20),
    "avx512bf16": Cpu("AVX-512 with BF16: Zen 4 and 5, Cooper Lake", "avx512bf16", 1 << 20),
    "amx": Cpu("AMX: Sapphire Rapids and newer", "amx", 2 << 20),
    "neon": Cpu("AArch64 with NEON: Graviton, Ampere, Apple", "neon", 1 << 20),
}
CHILD = """
import pickle, sys
name, problem, backend, threads = pickle.load(sys.stdin.buffer)
from tilewise.backends.cpu import other_cpus
sys.stdout.buffer.write(pickle.dumps(other_cpus.planned_as(name, problem, backend, threads)))
"""


def machines() -> dict[str, Machine]:
    def asked(name: str) -> Any:
        return lambda own, problem, backend, threads: plan_on(name, problem, backend, threads)

    return {name: Machine(cpu.about, "cpu", asked(name)) for name, cpu in CPUS.items()}


@lru_cache(maxsize=256)  # a process takes seconds to start
def plan_on(name: str, problem: Problem, backend: str | None, threads: int | None) -> Plan:
    """The plan of a problem on a CPU by name."""
    request = pickle.dumps((name, problem, backend, threads))
    done = subprocess.run([sys.executable, "-c", CHILD], input=request, capture_output=True)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()
        raise Unsupported("cpu", f"no plan for {name}: {reason[-1] if reason else 'the process ended'}", "plan on it")
    answer = pickle.loads(done.stdout)
    if isinstance(answer, Unsupported):
        raise answer
    return answer


def planned_as(name: str, problem: Problem, backend: str | None, threads: int | None) -> Plan | Unsupported:
    """In the other process: the planner's choice on that CPU, without data for launches."""
    from . import isa

    cpu = CPUS[name]
    target = TARGETS[cpu.target]
    has: Any = isa  # modules imported after this see the other CPU
    has.cpu_features = lambda: set(target.features)
    has.machine = lambda: machine_of(target.triple)
    from .codegen import vector

    assert isa.host_width() == vector.W, "the package was imported before"
    from .gemm import amx

    amx.usable = lambda: "amx" in name  # type: ignore[assignment]
    from ...dispatch import planner
    from . import backward, compiler, config, launch

    config.second_level_cache = lambda: cpu.cache  # type: ignore[assignment]
    compiler.function = lambda name: 1  # a dummy address
    for module in (launch, backward):
        module.schedule_items = lambda *args: None  # type: ignore[attr-defined]
    own: Choose = planner.choose_elsewhere
    try:
        return replace(own(problem, backend, threads), detail=None)
    except Unsupported as error:
        return error
