"""The device that kernels are planned and compiled for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache

import torch

# KiB of shared memory that a program may have, by compute capability; others have what consumer GPUs have.
SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 101: 227, 103: 227}
LEAST_SHARED_KIB = 99
AMD_SHARED_KIB = 64
PROCESSORS = 132  # of an H200; the interpreter plans as for one


@dataclass(frozen=True)
class Target:
    """A GPU as the heuristics see it."""

    vendor: str  # "nvidia", "amd" or "interpreter"
    arch: int  # compute capability of NVIDIA's GPUs (90 for an H200); 0 for others
    processors: int  # streaming multiprocessors, compute units
    shared_memory: int  # bytes that a program may have
    registers: int = 1 << 16  # of a processor, 32 bits each

    @property
    def name(self) -> str:
        """Device type and size, as tuned tiles are kept by."""
        return f"sm{self.arch}x{self.processors}" if self.ptx else f"{self.vendor}x{self.processors}"

    @property
    def ptx(self) -> bool:
        """Whether kernels may use NVIDIA's assembly."""
        return self.vendor == "nvidia"

    # What architectures differ in. No other file compares their numbers, but for a backend of one alone (hopper).

    def at_least(self, arch: int) -> bool:
        """Whether this is a GPU of NVIDIA's of this compute capability or a newer one."""
        return self.ptx and self.arch >= arch

    @property
    def refusal(self) -> str | None:
        """Why Triton's kernels do not run here, if they do not."""
        return "needs compute capability 8.0 (Ampere) or newer" if self.ptx and not self.at_least(80) else None

    @property
    def converts_int8(self) -> bool:
        """Whether PTX converts bytes to float16 in pairs."""
        return self.at_least(80)

    @property
    def converts_fp8(self) -> bool:
        return self.at_least(89)

    @property
    def warpgroup_mma(self) -> bool:
        """Whether products of 64 rows or more read both operands from shared memory: Hopper and Blackwell."""
        return 90 <= self.arch < 120

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel may start before the one that it waits for has ended."""
        return self.at_least(90)

    @property
    def shares_wide_values(self) -> bool:
        """Whether two programs share the value columns of D=512."""
        return self.at_least(90) or not self.ptx

    @property
    def prefill_rows(self) -> int:
        """Rows of a tile at most: Triton 3.6 cannot compile every masked loop over 64 and more for Blackwell."""
        return 32 if self.at_least(100) else 128

    @property
    def decode_rows(self) -> int:
        """The same in decode, whose loops compile for sm_120."""
        return 32 if 100 <= self.arch < 120 else 64


def nvidia(arch: int, processors: int = PROCESSORS) -> Target:
    """A GPU of NVIDIA's by compute capability."""
    return Target("nvidia", arch, processors, SHARED_KIB.get(arch, LEAST_SHARED_KIB) << 10)


# The interpreter has no limits; tiles are those of an H200.
INTERPRETER = Target("interpreter", 0, PROCESSORS, SHARED_KIB[90] << 10)


@cache
def target_of(device: torch.device) -> Target:
    """The target of a device; any that is no GPU is for the interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    count = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip is not None:
        return Target("amd", 0, count, AMD_SHARED_KIB << 10)
    major, minor = torch.cuda.get_device_capability(device)
    return nvidia(10 * major + minor, count)


@cache
def triton_version() -> str:
    """Triton's version; "" where it is not installed."""
    if importlib.util.find_spec("triton") is None:
        return ""
    try:
        return importlib.metadata.version("triton")  # without an import, which takes a while
    except importlib.metadata.PackageNotFoundError:
        return str(importlib.import_module("triton").__version__)


def triton_refusal(least: tuple[int, int], most: tuple[int, int] | None = None) -> str | None:
    """Why the installed Triton does not do for kernels that need versions `least` to `most`, if it does not."""
    version = triton_version()
    if not version:
        return "Triton is not installed"
    words = version.split(".")
    known = tuple(int(word) for word in words[:2] if word.isdigit())
    if len(known) < 2 or known < least or (most is not None and known > most):
        wanted = f"{least[0]}.{least[1]}" + (" or newer" if most is None else f" to {most[0]}.{most[1]}")
        return f"needs Triton {wanted.replace(f' to {least[0]}.{least[1]}', '')}, and {version} is installed"
    return None
