"""Puts kernels that `make wheel` has compiled into the wheel. Without them it is a wheel as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ReadyKernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        made = Path(self.root, "build", "prebuilt")
        if version == "standard" and made.is_dir():  # not an editable install
            build_data["force_include"][str(made)] = "tilewise/backends/cpu/prebuilt"
