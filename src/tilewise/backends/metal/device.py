"""The GPU as this backend sees it: a shader compiler and a number of cores.

On a Mac that is `torch.mps`. The tests use a stand-in, which compiles the same source and runs it on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...core.machines import Machine, within
from ...core.plan import OtherDevice
from ...errors import Unsupported

TYPICAL_CORES = 10  # where torch does not say


@dataclass
class Device:
    """A GPU, with its compiled kernels cached by source."""

    compile_shader: Callable[[str], Any]
    cores: int
    kind: str = "mps"  # the type of its tensors' device
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    def kernel(self, name: str, text: str, threads: int) -> Any:
        """The kernel `name` of a source, compiled once; refused if it cannot have that number of threads."""
        kernel = self.kept.get(text)
        if kernel is None:
            kernel = getattr(self.compile_shader(text), name)
            most = kernel.max_threads_per_threadgroup
            if most < threads:
                reason = f"this GPU allows kernel {name} {most} threads a threadgroup, it needs {threads}"
                raise Unsupported("metal", reason, "use backend='torch', and please report this")
            self.kept[text] = kernel
        return kernel


# Apple's chips that calls can be planned for without having one: cores of their GPUs.
CHIPS = {"apple-m1": 8, "apple-m2": 10, "apple-m3": 10, "apple-m4": 10, "apple-m3-max": 40, "apple-m4-max": 40}
_other: ContextVar[Device | None] = ContextVar("device", default=None)
stand_in: Device | None = None  # set by tests (`tests/helpers/metal_sim.py`)
_mps: Device | None = None


def current() -> Device:
    """The stand-in, if there is one, else this machine's GPU."""
    global _mps
    if (other := _other.get()) is not None:
        return other
    if stand_in is not None:
        return stand_in
    if _mps is None:
        _mps = Device(torch.mps.compile_shader, mps_cores())
    return _mps


def mps_cores() -> int:
    count = getattr(torch.backends.mps, "get_core_count", None)
    return int(count()) if count is not None else TYPICAL_CORES


def why_not(kind: str) -> str | None:
    """Why tensors on a device of this type cannot be served here."""
    if _other.get() is not None:
        return None if kind == "mps" else OtherDevice("runs on Apple GPUs")
    if stand_in is not None:
        return None if kind == stand_in.kind else f"runs on {stand_in.kind} tensors here"
    if kind != "mps":
        return OtherDevice("runs on Apple GPUs")
    if not hasattr(torch.mps, "compile_shader"):
        return "needs torch 2.7 or newer, which has torch.mps.compile_shader"
    return None


@contextmanager
def planning_for(cores: int) -> Iterator[None]:
    """Plans as for a GPU with `cores` cores, in this thread; nothing is compiled."""

    def none(text: str) -> None:
        raise AssertionError("this plan was made for another machine")

    token = _other.set(Device(none, cores))
    try:
        yield
    finally:
        _other.reset(token)


def machines() -> dict[str, Machine]:
    return {
        name: Machine(f"GPU of {cores} cores", "mps", within(partial(planning_for, cores)))
        for name, cores in CHIPS.items()
    }
