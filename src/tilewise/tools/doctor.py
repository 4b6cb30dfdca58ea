"""`tilewise doctor`: what this machine has, which backends can run on it, and why the others cannot.

Every probe is guarded: broken drivers and half-installed libraries are what it has to report.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..backends.gpu.facts import by_nvidia_smi
from ..compat.discovery import too_old
from ..core import host, private
from ..core.extras import install_line
from .bench import machine
from .doctor_backends import backends, guarded

PACKAGES = ("tilewise", "torch", "triton", "numba", "llvmlite", "numpy", "mlx", "rich", "matplotlib", "transformers")
LIBRARIES = {  # other libraries: package and module
    "flash-attn": "flash_attn",
    "flash-attn 3": "flash_attn_interface",
    "flashinfer": "flashinfer",
    "xformers": "xformers",
}
CPU_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "asimd",
)


def doctor(as_json: bool = False) -> int:
    """Prints the findings; always 0."""
    facts = examine()
    print(json.dumps(facts, indent=1, default=str) if as_json else "\n".join(lines(facts)))
    return 0


def examine() -> dict[str, Any]:
    """All findings as plain data; a failed probe is {"error": why}."""
    probes: dict[str, Callable[[], Any]] = {
        "versions": _versions,
        "system": _system,
        "cpu": _cpu,
        "gpus": _gpus,
        "backends": backends,
        "private_names": _private_names,
        "libraries": _libraries,
        "files": _files,
    }
    return {name: guarded(probe) for name, probe in probes.items()}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    if machine.version_of("transformers") and (reason := too_old(versions["transformers"])):
        versions["transformers"] += f": {reason}; {install_line('hf')}"
    return versions


def _version(name: str) -> str:
    return machine.version_of(name) or "not installed"


def _system() -> dict[str, str]:
    return {"system": platform.platform(), "machine": platform.machine(), "executable": sys.executable}


def _cpu() -> dict[str, Any]:
    import torch

    flags = {
        word
        for line in host.read("/proc/cpuinfo").splitlines()
        if line[:5] in ("flags", "Featu")
        for word in line.split()
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": host.cpu_name(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "run_by": guarded(_threads),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "vector_floats": guarded(machine.vector_width),
        "last_cache_mib": machine.last_cache() // 2**20,
        "memory_available_gib": round(machine.memory_available() / 2**30, 1),
    }


def _threads() -> str:
    from ..backends.cpu.threads import describe

    return describe()


def _gpus() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"torch_cuda": torch.version.cuda, "torch_hip": torch.version.hip, "devices": []}
    facts["driver"] = guarded(by_nvidia_smi)
    facts["apple"] = guarded(_apple)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            facts["devices"].append({
                "name": of.name,
                "capability": f"{of.major}.{of.minor}",
                "processors": of.multi_processor_count,
                "free_gib": round(free / 2**30, 1),
                "total_gib": round(total / 2**30, 1),
            })  # fmt: skip
    return facts


def _apple() -> str | None:
    """The GPU of a Mac."""
    import torch

    if not torch.backends.mps.is_available():
        return None
    name, cores = torch.backends.mps.get_name(), torch.backends.mps.get_core_count()
    return f"{name}, {cores} cores"


def _private_names() -> dict[str, Any]:
    """By library, what it lacks of the names that tilewise uses although no version promises them."""
    return {name: guarded(lambda name=name: _absent(name)) for name in private.FILES}  # type: ignore[misc]


def _absent(library: str) -> str:
    version, (module, user) = _version("triton" if library == "Gluon" else library), private.FILES[library]
    if not version[0].isdigit():
        return version
    lacks = private.absent(importlib.import_module(module).SEEN, version)
    return f"{'; '.join(lacks)}: {user} may fail" if lacks else "all there"


def _libraries() -> dict[str, str]:
    return {name: _version(name) if _is_there(module) else "not installed" for name, module in LIBRARIES.items()}


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _files() -> dict[str, Any]:
    from ..core.cache_home import cache_home

    home = cache_home()
    parent = next(folder for folder in (home, *home.parents) if folder.exists())
    files = {file: file.stat().st_size for file in home.rglob("*") if file.is_file()}

    def mib(*starts: str) -> float:
        return round(
            sum(n for file, n in files.items() if file.relative_to(home).parts[0].startswith(starts)) / 2**20, 1
        )

    return {
        "cache": str(home),
        "writable": parent.is_dir() and os.access(parent, os.W_OK | os.X_OK),
        "size_mib": mib(""),
        "of_it_cpu_kernels_mib": mib("cpu-"),
        "of_it_models_mib": mib("models"),
        "tuned_tiles": (home / "tuned.json").exists(),
    }


def lines(facts: Mapping[str, Any]) -> list[str]:
    """The findings as text."""
    text = []
    for section in ("versions", "system", "cpu", "gpus"):
        text += [section, *_facts(facts[section]), ""]
    text.append("backends, best first")
    backends = facts["backends"]
    for name, of in backends.items() if "error" not in backends else ():
        if of.get("usable"):
            text.append(f"  {name:10} usable on {of['device']}" + (f", {of['kernels']}" if "kernels" in of else ""))
            text += [f"  {'':10} {of[name]}" for name in ("records", "proof") if name in of]
        else:
            text.append(f"  {name:10} not usable: {of.get('reason') or of.get('error')}")
            if of.get("remedy"):
                text.append(f"  {'':10} remedy: {of['remedy']}")
    text += [f"  error: {backends['error']}"] if "error" in backends else []
    for section in ("private_names", "libraries", "files"):
        text += ["", section.replace("_", " "), *_facts(facts[section])]
    return text


def _facts(facts: Mapping[str, Any]) -> list[str]:
    shown = []
    for name, value in facts.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            shown += [f"  {', '.join(f'{k} {v}' for k, v in item.items())}" for item in value]
        else:
            words = " ".join(map(str, value)) if isinstance(value, list) else value
            shown.append(f"  {name.replace('_', ' '):22} {'none' if words in (None, '') else words}")
    return shown
