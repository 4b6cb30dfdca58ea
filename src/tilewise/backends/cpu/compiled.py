"""Compiles the kernels on first use and keeps them on disk; what comes out are addresses of C functions, and functions
for Python.

The kept code is found by a fingerprint of these sources and of the versions of Numba and LLVM, so it is never stale;
Numba adds the host's CPU to it. Several processes may compile at once: files are put in place whole.
"""

# mypy: ignore-errors
from __future__ import annotations

import hashlib
import sys
import threading
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import numba
from numba import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache, _CacheLocator
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import _FunctionCompiler
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys

from ...places import cache_home
from .amx import PARTS, usable
from .simd import CODES
from .whole import PARTS as WHOLE
from .whole import has_vnni

_lock = threading.RLock()
OPTIONS = {"error_model": "numpy", "nogil": True}


def cache_directory() -> Path:
    """Where compiled kernels are kept."""
    return cache_home() / f"cpu-{fingerprint()}"


@cache
def fingerprint() -> str:
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {sys.version_info[:2]}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


class _Locator(_CacheLocator):
    """Tells Numba to keep our code where we say, valid for as long as it is there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_cache_path(self) -> str:
        return str(cache_directory())

    def get_source_stamp(self) -> str:
        return fingerprint()

    def get_disambiguator(self) -> str:
        return self.name

    def ensure_cache_path(self) -> None:
        cache_directory().mkdir(parents=True, exist_ok=True)


def _cache_of(fn, name: str):
    class Impl(CompileResultCacheImpl):
        def __init__(self, py_func) -> None:
            self._locator = _Locator(name)
            self._lineno = 0
            self._filename_base = name

    class Cache(FunctionCache):
        _impl_class = Impl

        def _index_key(self, sig, codegen):
            return sig, codegen.magic_tuple()  # a closure's contents are in the name and the fingerprint

        def load_overload(self, sig, target_context):
            """As Numba's, without importing what it compiles with, SciPy among it, which takes a third of a second."""
            with self._guard_against_spurious_io_errors():
                return self._load_overload(sig, target_context)

    return Cache(fn)


class Kernel(NamedTuple):
    """A compiled function: the address of a C function, and one that Python calls.

    That one takes its numbers from Python itself. (`begin` of 8 numbers and 8 keys took 1.9 us so, by ctypes 3.0.)
    """

    address: int
    entry: Any
    library: Any  # the code is freed with the object


def compile_function(fn, name: str, arguments: int) -> Kernel:
    """`void fn(int64, ...)`, compiled or taken from disk."""
    fn.__qualname__ = name  # the linker knows functions by it: code kept by several processes may not share one
    if not any(cache_directory().glob(f"{name}.*.nbc")):
        _announce()
    signature, kept = types.void(*[types.int64] * arguments), _cache_of(fn, name)
    try:
        kept._impl.locator.ensure_cache_path()
    except OSError:
        kept = NullCache()  # no place to keep it: compile every time
    with optimised_once(name):
        result = kept.load_overload(signature, cpu_target.target_context)
        if result is None:
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
        rtsys.initialize(cpu_target.target_context)  # functions of Numba's that kept code is linked with
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
    """A kernel: `work`, `walk_direct`, `merge`, `dots f16`, `adds int8`, ..."""
    with _lock:
        from . import append, attend, direct, packed, pair, straight, straight_tiles, tiled, whole

        what, _, kind = name.partition(" ")
        if what == "walk_tiles":
            return compile_function(tiled.walk_function(PARTS[kind]), f"{what}_{kind}", 3)
        if kind:
            home = whole if what.startswith("whole") else straight
            make, arguments = (home.dots_function, 12) if what.endswith("dots") else (home.adds_function, 11)
            return compile_function(make(kind), f"{what}_{kind}", arguments)
        homes = {"append": append, "walk_direct": direct, "walk_packed": packed, "pair": pair, "list_places": pair}
        homes |= {"tile_dots": straight_tiles, "tile_adds": straight_tiles}
        home = homes.get(name, attend)
        return compile_function(getattr(home, name), name, ARGUMENTS.get(name, 2))


def function(name: str) -> int:
    """The address of a kernel."""
    return kernel(name).address


def entry(name: str):
    """A kernel as something to call; the interpreter's lock is released meanwhile."""
    return kernel(name).entry


ARGUMENTS = {"team": 1, "walk_direct": 3, "walk_packed": 3, "begin": 10, "tile_dots": 10, "tile_adds": 10}
# Everything that a call can need.
ALL = [
    *("list_items", "begin", "work", "team", "merge", "walk_direct", "walk_packed"),
    *(f"{what} {kind}" for kind in CODES for what in ("dots", "adds")),
    *(f"{what} {kind}" for kind in WHOLE if has_vnni() for what in ("whole_dots", "whole_adds")),
    *(("tile_dots", "tile_adds", *(f"walk_tiles {kind}" for kind in PARTS)) if usable() else ()),
    *("append", "pair", "list_places"),
]
