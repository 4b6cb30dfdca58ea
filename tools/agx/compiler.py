"""One text through clang and Mesa's compiler for the M1: what its driver prints of the code."""

import re
from dataclasses import dataclass
from pathlib import Path

from agx import packages
from agx.translate import ENTRY

CLANG = (
    "clang-22 -x clcpp -cl-std=CLC++2021 -target spirv64 -O2 -c -w -Wno-c++11-narrowing "
    "-Xclang -finclude-default-header -Xclang -fdeclare-opencl-builtins "
    "-cl-ext=+cl_khr_fp16,+cl_khr_subgroups,+cl_khr_subgroup_shuffle -D__opencl_c_subgroups=1 -I/build"
).split()
# The shim is a kernel driver that does nothing: the compiler takes it for an M1.
HOST = "/lib64/ld-linux-x86-64.so.2 --preload /usr/lib/x86_64-linux-gnu/libasahi_noop_drm_shim.so /build/host".split()
ENVIRONMENT = {"RUSTICL_ENABLE": "asahi", "MESA_SHADER_CACHE_DISABLE": "true"}
# The driver compiles helpers of its own before.
_STATISTICS = re.compile(
    r"CS shader: (\d+) instrs, .*?(\d+) code size, (\d+) gprs, .*?(\d+) threads, .*?(\d+):(\d+) spills:fills"
)


@dataclass(frozen=True)
class Code:
    """Of a kernel's machine code: 256 half registers at most; threads that a GPU core can have at a time."""

    instructions: int
    bytes: int
    half_registers: int
    threads: int
    spills: int
    fills: int
    scheduled: bool  # Mesa's scheduler fails on some texts, which then keep the order of the source


def prepare() -> None:
    packages.unpack()
    here = Path(__file__).parent
    for name in ("metal.h", "host.c"):
        (packages.WORK / name).write_text((here / name).read_text())
    traits = (here.parent / "mslsim/include/mslsim/traits.h").read_text()
    (packages.WORK / "traits.h").write_text(_with_spaces(traits))
    _checked(packages.inside(["clang-22", "-O1", "/build/host.c", "-o", "/build/host", "-l:libOpenCL.so.1"]))


def _with_spaces(traits: str) -> str:
    """The simulator's traits of types, which know no address spaces."""
    one = "template <class T> using remove_addrspace_t = remove_cv_t<T>;"
    assert one in traits
    private = """
template <class T> struct remove_addrspace { typedef T type; };
template <class T> struct remove_addrspace<__private T> { typedef T type; };
template <class T> using remove_addrspace_t = typename remove_addrspace<remove_cv_t<T>>::type;
"""
    return traits.replace('#include "types.h"', "").replace(one, private)


def compile_text(text: str) -> Code | str:
    """Of a text in C++ for OpenCL; or how Mesa failed: very large kernels trip over its own assertions."""
    (packages.WORK / "kernel.clcpp").write_text(text)
    _checked(packages.inside([*CLANG, "/build/kernel.clcpp", "-o", "/build/kernel.spv"]))
    said = ""
    for scheduled in (True, False):
        debug = "shaderdb" if scheduled else "shaderdb,nosched"
        done = packages.inside([*HOST, "/build/kernel.spv", ENTRY], ENVIRONMENT | {"AGX_MESA_DEBUG": debug})
        said = done.stdout + done.stderr
        found = _STATISTICS.findall(said)
        if done.returncode == 0 and found:
            instructions, size, registers, threads, spills, fills = map(int, found[-1])
            return Code(instructions, size, registers, threads, spills, fills, scheduled)
    return " ".join(said.rpartition(" M1 (")[2].split()[2:])[:200]


def _checked(done) -> None:  # type: ignore[no-untyped-def]
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, done.args[6:9]))}: {done.stderr[:6000]}")
