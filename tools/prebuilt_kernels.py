"""Compiles the CPU kernels for every target that releases bring them for, on any machine: `make wheel` does it.

Each target has a process of its own, in which Numba, and with it the kernels' own choices (vector width, which
instructions), is set to that CPU and not to this one.

    python tools/prebuilt_kernels.py FOLDER [TARGET ...]
"""

from __future__ import annotations

import argparse
import os
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# What kernels may call: Python's stable ABI and the C library.
CALLED = {
    *("PyErr_BadArgument", "PyErr_Occurred", "PyEval_RestoreThread", "PyEval_SaveThread"),
    *("PyLong_AsLongLong", "PyLong_FromLongLong"),
    *("expf", "logf", "memcpy", "memmove", "memset"),
}
MACHINES = {"x86_64": 62, "aarch64": 183}  # of ELF


def symbols(code: bytes) -> tuple[set[str], set[str]]:
    """Names that a 64-bit ELF object defines for others, and those that it wants."""
    start, count = struct.unpack_from("<Q", code, 40)[0], struct.unpack_from("<H", code, 60)[0]
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, start + 64 * i) for i in range(count)]
    defined, wanted = set(), set()
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind == 2:  # the table of symbols; `link` is that of their names
            names = sections[link][4]
            for at in range(offset + 24, offset + size, 24):
                name, info, _, section = struct.unpack_from("<IBBH", code, at)
                text = code[names + name : code.index(b"\0", names + name)].decode()
                if section == 0:
                    wanted.add(text)
                elif info >> 4:
                    defined.add(text)
    return defined, wanted


def check(code: bytes, name: str, machine: str) -> None:
    """An object for that machine, that defines a kernel and calls nothing that may not be there."""
    assert code[:5] == b"\x7fELF\x02", "no 64-bit ELF"
    assert struct.unpack_from("<H", code, 18)[0] == MACHINES[machine], "of another machine"
    defined, wanted = symbols(code)
    assert defined == {name, f"{name}.entry"}, defined
    assert wanted <= CALLED, wanted - CALLED


def make(folder: Path, target: str, names: Sequence[str]) -> None:
    """Kernels of a target, all unless they are named, in a process that is set to it."""
    import llvmlite.binding as llvm

    from tilewise.backends.cpu.targets import TARGETS, machine_of

    triple = TARGETS[target].triple
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = lambda: triple
    from tilewise.backends.cpu.gemm import amx

    amx.usable = lambda: "amx-tile" in TARGETS[target].features
    from tilewise.backends.cpu import compiler, object_code, prebuilt

    size = 0
    for name in names or compiler.KERNELS:
        fn, symbol, result = compiler.definition(name)
        code = object_code.emit_object(fn, symbol, result)
        check(code, symbol, machine_of(triple))
        prebuilt.write(folder, symbol, target, code)
        size += len(code)
    count = len(names or compiler.KERNELS)
    print(f"{target}: {count} kernels, {size / 2**20:.1f} MiB, {time.process_time():.0f} s of a core", flush=True)


def main(folder: str, *targets: str, names: Sequence[str] = ()) -> None:
    from tilewise.backends.cpu.targets import TARGETS

    def run(target: str) -> None:
        chosen = TARGETS[target]
        features = [f"+{name}" for name in sorted(chosen.features)]
        if "avx512f" in chosen.features:  # LLVM's x86-64-v4 would rather take half a vector
            features.append("-prefer-256-bit")
        environment = {**os.environ, "NUMBA_CPU_NAME": chosen.cpu, "NUMBA_CPU_FEATURES": ",".join(features)}
        here = str(Path(__file__).parent)
        code = f"import sys; sys.path[:0] = [{here!r}]; import prebuilt_kernels as r; "
        code += f"r.make(r.Path({folder!r}), {target!r}, {list(names)!r})"
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, targets or TARGETS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("targets", nargs="*", help="all unless they are named")
    words = parser.parse_args()
    main(words.folder, *words.targets)
