"""The machine that this process runs on."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """The name of its CPU."""
    for line in read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def read(path: str | Path) -> str:
    """A file's text; empty if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
