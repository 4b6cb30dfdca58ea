"""The GPU as this backend sees it: a compiler of texts and a number of cores.

On a Mac that is `torch.mps`. The tests put a stand-in here, which compiles the same text and runs it over CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.plan import OtherDevice
from ...errors import Unsupported

TYPICAL_CORES = 10  # where torch does not say


@dataclass
class Device:
    """Compiled texts are kept with it, by text."""

    compile_shader: Callable[[str], Any]
    cores: int
    kind: str = "mps"  # the type of its tensors' device
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    def kernel(self, name: str, text: str, threads: int) -> Any:
        """A kernel of a text, compiled once; one that cannot have so many threads is refused."""
        kernel = self.kept.get(text)
        if kernel is None:
            kernel = getattr(self.compile_shader(text), name)
            most = kernel.max_threads_per_threadgroup
            if most < threads:
                reason = f"this GPU allows kernel {name} {most} threads a threadgroup, it needs {threads}"
                raise Unsupported("metal", reason, "use backend='torch', and please report this")
            self.kept[text] = kernel
        return kernel


_stand_in: Device | None = None
_mps: Device | None = None


def current() -> Device:
    """The stand-in, if there is one, else this machine's GPU."""
    global _mps
    if _stand_in is not None:
        return _stand_in
    if _mps is None:
        _mps = Device(torch.mps.compile_shader, mps_cores())
    return _mps


def mps_cores() -> int:
    count = getattr(torch.backends.mps, "get_core_count", None)
    return int(count()) if count is not None else TYPICAL_CORES


def why_not(kind: str) -> str | None:
    """Why tensors on a device of this type cannot be served here."""
    if _stand_in is not None:
        return None if kind == _stand_in.kind else f"runs on {_stand_in.kind} tensors here"
    if kind != "mps":
        return OtherDevice("runs on Apple GPUs")
    if not hasattr(torch.mps, "compile_shader"):
        return "needs torch 2.7 or newer, which has torch.mps.compile_shader"
    return None


@contextmanager
def stand_in(compile_shader: Callable[[str], Any], cores: int = TYPICAL_CORES, kind: str = "cpu") -> Iterator[Device]:
    """Runs kernels by another compiler of texts, over tensors of another device. Plans are forgotten on both sides."""
    global _stand_in
    from ...dispatch import call_cache, planner

    before = _stand_in
    try:
        _stand_in = Device(compile_shader, cores, kind)
        planner.choose.cache_clear()
        call_cache.forget()
        yield _stand_in
    finally:
        _stand_in = before
        planner.choose.cache_clear()
        call_cache.forget()
