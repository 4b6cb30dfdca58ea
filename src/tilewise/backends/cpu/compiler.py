"""Compiles the kernels on first use and keeps them on disk; what comes out are addresses of C functions, and functions
for Python. `kernel_cache.py` is the disk.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from numba import types
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]
from numba.core.registry import cpu_target

from .codegen.formats import DECODE
from .gemm.amx import PARTS, usable
from .gemm.gemv_sdot import has_sdot
from .gemm.gemv_vnni import PARTS as BYTE_PARTS
from .gemm.gemv_vnni import has_vnni
from .gemm.gradient import has_bf16
from .kernel_cache import KernelCache

_lock = threading.RLock()
OPTIONS = {"error_model": "numpy", "nogil": True}


class Kernel(NamedTuple):
    """A compiled function: the address of a C function, and one that Python calls, which takes its numbers itself.

    ctypes would convert them one by one: see cpu 14 in benchmarks/cpu/LOG.md.
    """

    address: int
    entry: Any
    library: Any  # the code is freed with the object


def compile_function(fn: Callable[..., Any], name: str, result: Any = types.void) -> Kernel:
    """`result fn(int64, ...)`, compiled or taken from disk."""
    fn.__qualname__ = name  # the linker knows functions by it: code kept by several processes may not share one
    signature, kept = result(*[types.int64] * len(inspect.signature(fn).parameters)), KernelCache(name)
    with optimised_once(name):
        # Without `refresh` of the context, which imports what Numba compiles with, SciPy among it: a third of a second.
        compiled = kept.load_overload(signature, cpu_target.target_context)
        if compiled is None:
            _announce()
            compiler = _FunctionCompiler(fn, cpu_target, OPTIONS, {}, Compiler)
            compiled = compiler.compile(signature.args, signature.return_type)
            kept.save_overload(signature, compiled)
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)
    return Kernel(address, compiled.entry_point, compiled.library)


@contextmanager
def optimised_once(name: str) -> Iterator[None]:
    """Leaves helpers as they are until the kernel `name`, which holds all of them, is optimised.

    Numba optimises every function together with all that it calls: one that is called through five others six times.
    """
    with global_compiler_lock:  # no other thread compiles meanwhile
        optimise = CPUCodeLibrary._optimize_final_module

        def optimise_kernel(library: Any) -> None:
            if library.name == name:
                optimise(library)

        CPUCodeLibrary._optimize_final_module = optimise_kernel  # type: ignore[method-assign]
        try:
            yield
        finally:
            CPUCodeLibrary._optimize_final_module = optimise  # type: ignore[method-assign]


@cache
def _announce() -> None:
    print(
        "tilewise: compiling kernels for this CPU, once; `tilewise warmup` does it ahead", file=sys.stderr, flush=True
    )


# Where each kernel is written. One of a storage type ("qk f16") is what its module's `<name>_function(type)` returns.
HOMES = {
    **dict.fromkeys(("schedule", "launch", "worker", "thread_main"), "scheduler"),
    **dict.fromkeys(("cascade", "map_rows"), "cascade"),
    **dict.fromkeys(("qk", "pv"), "gemm.gemv_fp32"),
    **dict.fromkeys(("amx_qk", "amx_pv"), "gemm.gemv_amx"),
    **dict.fromkeys(("bf16_qk", "bf16_pv"), "gemm.gemv_bf16"),
    **dict.fromkeys(("vnni_qk", "vnni_pv"), "gemm.gemv_vnni"),
    **dict.fromkeys(("sdot_qk", "sdot_pv"), "gemm.gemv_sdot"),
    **dict.fromkeys(("backward", "schedule_backward", "delta"), "mainloop.backward"),
    "append": "kv_write",
    "combine": "mainloop.epilogue",
    "decode": "mainloop.decode",
    **dict.fromkeys(("prefill", "prefill_amx"), "mainloop.prefill"),
}


@cache
def kernel(name: str) -> Kernel:
    """A kernel: `worker`, `decode`, `combine`, `qk f16`, `pv int8`, ..."""
    with _lock:
        what, _, dtype = name.partition(" ")
        home = import_module(f".{HOMES[what]}", __package__)
        fn = getattr(home, f"{what}_function")(dtype) if dtype else getattr(home, what)
        return compile_function(fn, name.replace(" ", "_"), types.int64 if name == "launch" else types.void)


def function(name: str) -> int:
    """The address of a kernel."""
    return kernel(name).address


@cache
def entry(name: str) -> Any:
    """A kernel as something to call; the interpreter's lock is released meanwhile."""
    return kernel(name).entry


# Everything that a call can need.
ALL = [
    *("schedule", "launch", "worker", "thread_main", "combine", "decode", "prefill"),
    *(f"{what} {dtype}" for dtype in DECODE for what in ("qk", "pv")),
    *(f"{what} {dtype}" for dtype in BYTE_PARTS if has_vnni() for what in ("vnni_qk", "vnni_pv")),
    *(f"{what} {dtype}" for dtype in BYTE_PARTS if has_sdot() for what in ("sdot_qk", "sdot_pv")),
    *(("amx_qk", "amx_pv", *(f"prefill_amx {dtype}" for dtype in PARTS)) if usable() else ()),
    *("append", "cascade", "map_rows", "schedule_backward", "backward", "delta"),
    *(("backward bf16", "bf16_qk", "bf16_pv") if has_bf16() else ()),
]
