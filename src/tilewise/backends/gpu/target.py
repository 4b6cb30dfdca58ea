"""The device that kernels are planned and compiled for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch

from ...core.machines import Machine, within

# KiB of shared memory that a program may have, by compute capability; others have as much as consumer GPUs.
SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 101: 227, 103: 227}
LEAST_SHARED_KIB = 99
# A card of each compute capability that kernels are compiled for, and its SMs.
CARDS = {
    80: ("A100", 108), 86: ("RTX 30, A10", 82), 89: ("RTX 40, L40", 128), 90: ("H100, H200", 132), 100: ("B200", 148),
    103: ("B300", 160), 120: ("RTX 50", 170), 121: ("GB10", 48),
}  # fmt: skip


class Amd(NamedTuple):
    """Properties of an AMD architecture."""

    wave: int  # threads of a wave
    shared_kib: int  # LDS of a program
    units: int  # compute units of a card
    widest: int  # largest head dim whose forward kernels do not spill
    widest_backward: int
    card: str


# AMD architectures that kernels are compiled for.
AMD = {
    "gfx90a": Amd(64, 64, 104, 576, 576, "MI200"), "gfx942": Amd(64, 64, 304, 576, 576, "MI300"),
    "gfx950": Amd(64, 160, 256, 576, 576, "MI350"), "gfx1100": Amd(32, 64, 96, 128, 0, "RX 7900"),
    "gfx1200": Amd(32, 64, 32, 256, 128, "RX 9060"), "gfx1201": Amd(32, 64, 64, 256, 128, "RX 9070"),
}  # fmt: skip
MEASURED = (90,)  # compute capabilities of GPUs on which tiles were chosen by time
PROCESSORS = 132  # SMs of an H200; the interpreter plans as for one


@dataclass(frozen=True)
class Target:
    """A GPU as the heuristics see it."""

    vendor: str  # "nvidia", "amd" or "interpreter"
    arch: int  # compute capability of NVIDIA's GPUs (90 for an H200); 0 for others
    processors: int  # streaming multiprocessors, compute units
    shared_memory: int  # bytes that a program may have
    registers: int = 1 << 16  # of an SM, 32 bits each
    gfx: str = ""  # AMD's name of the architecture
    wave: int = 32  # threads of a warp

    @property
    def name(self) -> str:
        """Device type and size, for the keys of tuned tiles."""
        return f"sm{self.arch}x{self.processors}" if self.ptx else f"{self.gfx or self.vendor}x{self.processors}"

    @property
    def ptx(self) -> bool:
        """Whether kernels may use inline PTX."""
        return self.vendor == "nvidia"

    # Differences between architectures. No other file compares `arch`, except a backend for a single one (hopper).

    def at_least(self, arch: int) -> bool:
        """Whether this is an NVIDIA GPU of this compute capability or a newer one."""
        return self.ptx and self.arch >= arch

    @property
    def refusal(self) -> str | None:
        """Why Triton's kernels do not run here, if they do not."""
        if self.amd and self.gfx not in AMD:
            return f"its kernels are compiled for {', '.join(AMD)}, and this GPU is {self.gfx or 'unknown'}"
        if self.ptx and not self.at_least(80):
            lacks = ": Turing has no bfloat16 products" if self.arch == 75 else ""
            return f"needs compute capability 8.0 (Ampere) or newer{lacks}"
        return None

    def too_wide(self, wide: int, backward: bool) -> str | None:
        """Why heads of this dim are not served, if they are not."""
        if not self.amd or self.gfx not in AMD:
            return None
        of = AMD[self.gfx]
        most, what = (of.widest_backward, "gradients") if backward else (of.widest, "heads")
        if wide <= most:
            return None
        return f"{what} of head dim {wide} do not fit the registers of {self.gfx}" + f", {most} do" * (most > 0)

    def lacks_registers(self, float32: bool, formats: Collection[str]) -> str | None:
        """Why float32 products, or K and V in these formats, are not served, if they are not.

        RDNA computes a float32 product as six of bfloat16, and gfx1100 has no registers to dequantise fp8 or nibbles.
        """
        if self.rdna and float32:
            return f"float32 products do not fit the registers of {self.gfx}"
        if self.gfx == "gfx1100" and (found := sorted({"fp8_e4m3", "int4", "codebook4"}.intersection(formats))):
            return f"{' and '.join(found)} do not fit the registers of {self.gfx}, int8 does"
        return None

    @property
    def gpu(self) -> str:
        """The architecture's name, as in docs/platforms.md."""
        return f"sm_{self.arch}" if self.ptx else self.gfx or self.vendor

    @property
    def measured(self) -> bool:
        """Whether tiles were chosen by measurement; elsewhere they are by register use as compiled."""
        return self.vendor == "interpreter" or self.arch in MEASURED

    @property
    def amd(self) -> bool:
        return self.vendor == "amd"

    @property
    def rdna(self) -> bool:
        """AMD's graphics cards: waves of 32, and MMA of 16-bit types only."""
        return self.amd and self.wave == 32

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

    def precision(self, tf32: bool) -> str:
        """Triton's `input_precision` of float32 products; `tf32`: the accuracy of TF32 is enough.

        AMD's CDNA multiplies float32 natively, RDNA in bfloat16 parts.
        """
        if self.amd:
            return "ieee" if not self.rdna else "bf16x3" if tf32 else "bf16x6"
        return "tf32" if tf32 else "bf16x6"

    @property
    def most_stages(self) -> int:
        """Most pipeline stages of a loop: AMD's have one in shared memory and one in registers."""
        return 2 if self.amd else 8

    @property
    def most_warps(self) -> int:
        """Most warps of a program: with more than 4, CDNA's waves share the registers of a SIMD."""
        return 4 if self.amd and not self.rdna else 8

    @property
    def least_columns(self) -> int:
        """Fewest columns of a product: AMD's matrix instructions have 16."""
        return 16 if self.amd else 8

    def most_registers(self, float32: bool) -> int:
        """Registers per thread that a tile's output and scores may take. The others are for the rest of a step:
        float32 products need more of them (h200 24), and RDNA's hold operands twice.
        """
        if self.rdna:
            return 48 if float32 else 80
        return 128 if float32 or self.amd else 176

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel may start before the one that it waits for has ended (programmatic dependent launch)."""
        return self.at_least(90)

    @property
    def reads_operands(self) -> bool:
        """Whether MMA operands are loaded to registers, for which tiles leave room: NVIDIA's GPUs before Hopper."""
        return self.ptx and not self.at_least(90)

    @property
    def shares_wide_values(self) -> bool:
        """Whether two programs divide the value columns of D=512."""
        return self.at_least(90) or not self.ptx

    @property
    def prefill_rows(self) -> int:
        """Most rows of a prefill tile: Triton 3.6 cannot compile every masked loop over 64 and more for Blackwell."""
        return 32 if self.at_least(100) else 128

    @property
    def large_backward_tiles(self) -> bool:
        """Whether the backward pass uses tiles of 64 rows and more: only Hopper's MMA leaves registers for them, since
        it reads operands from shared memory. Ampere would spill, and Triton 3.6 cannot compile each for Blackwell.
        """
        return self.at_least(90) and not self.at_least(100)

    @property
    def decode_rows(self) -> int:
        """Most rows of a decode tile; decode loops compile for sm_120."""
        return 32 if 100 <= self.arch < 120 else 64


def nvidia(arch: int, processors: int = PROCESSORS) -> Target:
    """An NVIDIA GPU by compute capability."""
    return Target("nvidia", arch, processors, SHARED_KIB.get(arch, LEAST_SHARED_KIB) << 10)


def amd(gfx: str, processors: int = 0) -> Target:
    """An AMD GPU by the name of its architecture; an unknown one is given as little as any has."""
    known = AMD.get(gfx, AMD["gfx1100"])
    return Target("amd", 0, processors or known.units, known.shared_kib << 10, gfx=gfx, wave=known.wave)


def gpu_machines() -> dict[str, Machine]:
    """GPUs that calls can be planned for without having one."""
    cards = {f"sm_{arch}": (nvidia(arch, count), card) for arch, (card, count) in CARDS.items()}
    cards |= {gfx: (amd(gfx), of.card) for gfx, of in AMD.items()}
    return {name: Machine(card, "cuda", within(partial(planning_for, of))) for name, (of, card) in cards.items()}


# The interpreter has no limits; tiles are those of an H200.
INTERPRETER = Target("interpreter", 0, PROCESSORS, SHARED_KIB[90] << 10)


_other: ContextVar[Target | None] = ContextVar("target", default=None)


@contextmanager
def planning_for(target: Target) -> Iterator[None]:
    """Plans as for this GPU, in this thread. The caller keeps such plans apart from those for the machine's own."""
    token = _other.set(target)
    try:
        yield
    finally:
        _other.reset(token)


def plans_for_another() -> bool:
    """Whether this thread plans for a machine that is not here."""
    return _other.get() is not None


def target_of(device: torch.device) -> Target:
    """The target of a device; the interpreter for any that is not a GPU."""
    return _other.get() or _own(device)


@cache
def _own(device: torch.device) -> Target:
    if device.type != "cuda":
        return INTERPRETER
    of = torch.cuda.get_device_properties(device)
    count = of.multi_processor_count
    if torch.version.hip is not None:
        return amd(str(getattr(of, "gcnArchName", "")).partition(":")[0], count)
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
