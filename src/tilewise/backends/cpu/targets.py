"""The CPUs for which releases have prebuilt kernels."""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """A CPU that kernels are compiled for: LLVM's triple, its name of the CPU, required features."""

    triple: str
    cpu: str
    features: frozenset[str]


def _target(triple: str, cpu: str, *features: str) -> Target:
    return Target(triple, cpu, frozenset(" ".join(features).split()))


LINUX, ARM_LINUX = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
V3 = "avx avx2 bmi bmi2 cx16 f16c fma lzcnt movbe popcnt sahf sse3 sse4.1 sse4.2 ssse3 xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
TARGETS = {
    "avx2": _target(LINUX, "x86-64-v3", V3),
    "avx512vnni": _target(LINUX, "x86-64-v4", V4, "avx512vnni"),
    "avx512bf16": _target(LINUX, "x86-64-v4", V4, "avx512vnni avx512bf16"),
    "amx": _target(LINUX, "x86-64-v4", V4, "avx512vnni avx512bf16 amx-tile amx-bf16"),
    "neon": _target(ARM_LINUX, "neoverse-n1", "neon fp-armv8 fullfp16 dotprod"),
}
# Features that kernels, or the choice among them, depend on
DECIDES = frozenset(
    "avx2 avx512f avx512bw avx512vl avx512dq avx512vnni avx512bf16 amx-tile amx-bf16 fullfp16 dotprod".split()
)


def machine_of(triple: str) -> str:
    """The architecture of a triple."""
    name = triple.partition("-")[0]
    return {"arm64": "aarch64"}.get(name, name)


def matching(machine: str, features: set[str]) -> str | None:
    """The target with the same kernels as would be compiled for a CPU with these features."""
    for name, target in TARGETS.items():
        same = machine_of(target.triple) == machine and target.features & DECIDES == features & DECIDES
        if same and target.features <= features:
            return name
    return None
