"""What a proof of GPU kernels holds for: the GPU, its driver and the compiler."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from functools import cache

import torch

from ...core.host import read
from .target import plans_for_another, target_of, triton_version

DRIVER_WAIT = 10  # seconds for nvidia-smi: with a broken driver it may hang


def facts(device: torch.device) -> dict[str, str] | None:
    """None for a device that is no GPU, and for a machine that is not here."""
    if device.type != "cuda" or plans_for_another() or not torch.cuda.is_available():
        return None
    target = target_of(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "gpu": f"{target.gpu}, {target.processors} processors",
        "driver": driver_version() or "unknown",
        "triton": triton_version(),
    }


@cache
def driver_version() -> str | None:
    """The version of the GPU's driver; None if it cannot be found."""
    if torch.version.hip is not None:
        loaded = read("/sys/module/amdgpu/version").strip()  # of AMD's own module; that of Linux has no version
        return f"{loaded or platform.release()}, HIP {torch.version.hip}"
    if found := re.search(r"Kernel Module.*?\s(\d[\d.]+)\s", read("/proc/driver/nvidia/version")):
        return found[1]
    try:
        return by_nvidia_smi()
    except (OSError, subprocess.SubprocessError):
        return None


def by_nvidia_smi() -> str | None:
    """The version of NVIDIA's driver, or what nvidia-smi says is wrong with it; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_WAIT)
    text = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return text[0] if text else None
