"""Features of the CPU that kernels are compiled for: this machine's, or the one that Numba is set to."""

from __future__ import annotations

import hashlib
import platform

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import config

from .targets import machine_of


def machine() -> str:
    """The architecture that kernels are compiled for, by LLVM's name."""
    return machine_of(llvm.get_process_triple())


def cpu_features() -> set[str]:
    """The CPU's features, by LLVM's names."""
    configured = getattr(config, "CPU_FEATURES", None)
    if configured is None:
        # LLVM lists no features of a Mac's CPU, but knows them by its name.
        mac = {"neon", "dotprod"} if (platform.system(), platform.machine()) == ("Darwin", "arm64") else set()
        return mac | {name for name, available in llvm.get_host_cpu_features().items() if available}
    return {name[1:] for name in configured.split(",") if name.startswith("+")}


def missing() -> str | None:
    """Why this CPU cannot run the kernels; None if it can."""
    lacks = {"fma", "f16c"} - cpu_features()
    if machine() == "x86_64" and lacks:
        return f"this CPU has no {' and no '.join(name.upper() for name in sorted(lacks))}"
    return None


def host_width() -> int:
    """Floats in a vector register."""
    features = cpu_features()
    if features >= {"avx512f", "avx512bw", "avx512vl"}:
        return 16
    return 8 if "avx2" in features else 4


def facts() -> dict[str, str]:
    """The CPU that kernels are compiled for, and the compiler."""
    features = hashlib.sha256(" ".join(sorted(cpu_features())).encode()).hexdigest()[:8]
    name = getattr(config, "CPU_NAME", None) or llvm.get_host_cpu_name()
    return {"cpu": f"{name}, features {features}", "numba": numba.__version__, "llvmlite": llvmlite.__version__}
