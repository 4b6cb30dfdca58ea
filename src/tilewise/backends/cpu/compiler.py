"""Compiles the kernels on first use and keeps them on disk; what comes out are addresses of C functions, and functions
for Python. `kernel_cache.py` is the disk.
"""

# mypy: ignore-errors
from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from numba import types
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import _FunctionCompiler
from numba.core.registry import cpu_target

from .codegen.vector import CODES
from .gemm.amx import PARTS, usable
from .gemm.gemv_vnni import PARTS as WHOLE
from .gemm.gemv_vnni import has_vnni
from .kernel_cache import KernelCache

_lock = threading.RLock()
OPTIONS = {"error_model": "numpy", "nogil": True}


class Kernel(NamedTuple):
    """A compiled function: the address of a C function, and one that Python calls.

    That one takes its numbers from Python itself. (`relaunch` of 8 numbers and 8 keys took 1.9 us so, by ctypes 3.0.)
    """

    address: int
    entry: Any
    library: Any  # the code is freed with the object


def compile_function(fn, name: str, arguments: int) -> Kernel:
    """`void fn(int64, ...)`, compiled or taken from disk."""
    fn.__qualname__ = name  # the linker knows functions by it: code kept by several processes may not share one
    signature, kept = types.void(*[types.int64] * arguments), KernelCache(name)
    with optimised_once(name):
        # Without `refresh` of the context, which imports what Numba compiles with, SciPy among it: a third of a second.
        result = kept.load_overload(signature, cpu_target.target_context)
        if result is None:
            _announce()
            compiler = _FunctionCompiler(fn, cpu_target, OPTIONS, {}, Compiler)
            result = compiler.compile(signature.args, signature.return_type)
            kept.save_overload(signature, result)
    address = result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name)
    return Kernel(address, result.entry_point, result.library)


@contextmanager
def optimised_once(name: str):
    """Leaves helpers as they are until the kernel `name`, which holds all of them, is optimised.

    Numba optimises every function together with all that it calls: one that is called through five others six times.
    """
    with global_compiler_lock:  # no other thread compiles meanwhile
        optimise = CPUCodeLibrary._optimize_final_module

        def optimise_kernel(library) -> None:
            if library.name == name:
                optimise(library)

        CPUCodeLibrary._optimize_final_module = optimise_kernel
        try:
            yield
        finally:
            CPUCodeLibrary._optimize_final_module = optimise


@cache
def _announce() -> None:
    print(
        "tilewise: compiling kernels for this CPU, once; `tilewise warmup` does it ahead", file=sys.stderr, flush=True
    )


@cache
def kernel(name: str) -> Kernel:
    """A kernel: `worker`, `decode`, `combine`, `qk f16`, `pv int8`, ..."""
    with _lock:
        from . import cascade, kv_write, scheduler
        from .gemm import gemv_amx, gemv_fp32, gemv_vnni
        from .mainloop import decode, epilogue, prefill, prefill_amx

        what, _, kind = name.partition(" ")
        if what == "prefill_amx":
            return compile_function(prefill_amx.prefill_function(PARTS[kind]), f"{what}_{kind}", 3)
        if kind:
            home = gemv_vnni if what.startswith("vnni") else gemv_fp32
            make, arguments = (home.qk_function, 12) if what.endswith("qk") else (home.pv_function, 11)
            return compile_function(make(kind), f"{what}_{kind}", arguments)
        homes = {
            "append": kv_write,
            "decode": decode,
            "prefill": prefill,
            "cascade": cascade,
            "map_rows": cascade,
        }
        homes |= {"amx_qk": gemv_amx, "amx_pv": gemv_amx, "combine": epilogue}
        home = homes.get(name, scheduler)
        return compile_function(getattr(home, name), name, ARGUMENTS.get(name, 2))


def function(name: str) -> int:
    """The address of a kernel."""
    return kernel(name).address


def entry(name: str):
    """A kernel as something to call; the interpreter's lock is released meanwhile."""
    return kernel(name).entry


ARGUMENTS = {"thread_main": 1, "decode": 3, "prefill": 3, "relaunch": 10, "amx_qk": 10, "amx_pv": 10}
# Everything that a call can need.
ALL = [
    *("schedule", "relaunch", "worker", "thread_main", "combine", "decode", "prefill"),
    *(f"{what} {kind}" for kind in CODES for what in ("qk", "pv")),
    *(f"{what} {kind}" for kind in WHOLE if has_vnni() for what in ("vnni_qk", "vnni_pv")),
    *(("amx_qk", "amx_pv", *(f"prefill_amx {kind}" for kind in PARTS)) if usable() else ()),
    *("append", "cascade", "map_rows"),
]
