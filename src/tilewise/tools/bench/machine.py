"""The machine that a benchmark ran on, and its limits."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...core.host import cpu_name, read
from .measure import interleaved
from .report import printable

KEPT_VARIABLES = ("ONEDNN_", "DNNL_", "OMP_", "GOMP_", "KMP_", "MKL_", "NUMBA_", "TILEWISE_")
# On some virtual machines oneDNN's AMX products, which torch uses in bfloat16 and float16, crash the process.
SAFE_ISA = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
PROBE = """
import torch
for dtype in (torch.bfloat16, torch.float16):
    for rows in (64, 1):
        q, k = torch.ones(1, 2, rows, 64, dtype=dtype), torch.ones(1, 2, 256, 64, dtype=dtype)
        torch.nn.functional.scaled_dot_product_attention(q, k, k)
"""
MIB = 1024**2


def describe(command: str, device: torch.device | None = None) -> dict[str, Any]:
    """Device, versions, date, command and environment, as plain data; with the GPU if that is the device."""
    return {
        "device": {
            **(gpu(device) if device is not None and device.type == "cuda" else {}),
            "cpu": cpu_name(),
            "architecture": platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "vector_width": vector_width(),
            "last_cache_bytes": last_cache(),
            "memory_available_bytes": memory_available(),
            "load": load(),
        },
        "versions": {
            "python": platform.python_version(),
            "system": platform.system(),
            **{name: version_of(name) for name in ("tilewise", "torch", "triton", "numba", "llvmlite", "numpy")},
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": printable(command),
        "environment": {k: printable(v) for k, v in sorted(os.environ.items()) if k.startswith(KEPT_VARIABLES)},
    }


def gpu(device: torch.device) -> dict[str, Any]:
    """A GPU, its memory and driver."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "gpu_memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda or torch.version.hip,
    }


def ceilings(read_bytes: int, matrix: int, budget: float) -> dict[str, float]:
    """The speeds that bound attention here: reading memory past the caches, and float32 products."""
    buffer, square = read_buffer(read_bytes), torch.ones(matrix, matrix)
    read, product = interleaved([lambda: buffer.sum(), lambda: square @ square], budget)
    return {
        "read_bytes": float(buffer.nbytes),
        "read_gb_per_s": buffer.nbytes / read.seconds / 1e9,
        "read_spread": read.spread,
        "sgemm_size": float(matrix),
        "sgemm_gflop_per_s": 2 * matrix**3 / product.seconds / 1e9,
        "sgemm_spread": product.spread,
    }


@lru_cache(maxsize=1)
def read_buffer(size: int) -> torch.Tensor:
    """The buffer for measuring the read speed; cached, since making it takes longer than reading it."""
    return torch.ones(size // 4)


def sdpa_survives(environment: dict[str, str] | None = None) -> bool:
    """Whether torch's SDPA in bfloat16 and float16 works on this machine; tried in a process that may crash."""
    env = {**os.environ, **(environment or {})}
    return subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True).returncode == 0


def vector_width() -> int | None:
    """Floats in a vector register, as the CPU kernels use it; None without numba."""
    try:
        from ...backends.cpu.codegen import vector
    except ImportError:
        return None
    return vector.W


def last_cache() -> int:
    """Bytes of the last-level cache; 32 MiB if the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = read(path).strip()
        if text[:-1].isdecimal() and text[-1] in "KM":
            sizes.append(int(text[:-1]) * {"K": 1024, "M": MIB}[text[-1]])
    return max(sizes) or 32 * MIB


def memory_available() -> int:
    """Bytes available without swapping; 4 GiB if the system does not say."""
    for line in read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4096 * MIB


def taken_by(call: Callable[[], torch.Tensor], device: torch.device) -> int | None:
    """Peak memory of a call in bytes, without its inputs and output; None if the system does not say."""
    out = call()  # compiles, and allocates cached workspaces
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before - out.nbytes)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
        before = _status("VmRSS")
        call()
        return max(0, _status("VmHWM") - before - out.nbytes)
    except (OSError, KeyError):
        return None


def _status(name: str) -> int:
    """A size in bytes from /proc/self/status."""
    lines = dict(line.split(":", 1) for line in read("/proc/self/status").splitlines())
    return int(lines[name].split()[0]) * 1024


def load() -> float:
    """The load average of the last minute; 0 if the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def load_notes() -> list[str]:
    """Notes for a record if the machine is busy."""
    now = load()
    return [f"the machine was busy: load {now:.1f} at the start"] if now > 0.3 else []


def version_of(name: str) -> str | None:
    """The version of a package that is loaded, which may lie before an installed one, or installed; None without it."""
    if (loaded := getattr(sys.modules.get(name), "__version__", None)) is not None:
        return str(loaded)
    try:
        return version(name)
    except PackageNotFoundError:
        return None
