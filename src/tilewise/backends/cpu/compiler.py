"""Kernels by name: as addresses of C functions, and as functions that Python calls.

The object code of a kernel is in the package (`prebuilt.py`), in the disk cache (`kernel_cache.py`), or compiled here
on first use. `linker.py` loads it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from numba import types

from ...core import forks
from ...core.private.numba import cpu_target, emit_module
from . import prebuilt
from .codegen.bf16_dot import has_bf16
from .codegen.formats import DECODE
from .gemm.amx import PARTS, usable
from .gemm.fixed_point import PARTS as BYTE_PARTS
from .gemm.gemv_sdot import has_sdot
from .gemm.gemv_vnni import has_vnni
from .kernel_cache import CachedKernel, cache_directory, file_lock
from .linker import Kernel, link, load
from .object_code import emit_object, signature

_lock = threading.RLock()
forks.let_finish(sys.modules[__name__], "_lock", threading.RLock)
_kernels: dict[str, Kernel] = {}


def compile_function(fn: Callable[..., Any], name: str, result: Any = types.void) -> Kernel:
    """`result fn(int64, ...)`, compiled or taken from disk."""
    cached = CachedKernel(name)
    key = cached.key(signature(fn, result), cpu_target.target_context.codegen().magic_tuple())
    if (kernel := cached.load(key, lambda code: link(code, name))) is not None:
        return kernel
    with file_lock(cached.file(key)):
        if (kernel := cached.load(key, lambda code: link(code, name))) is not None:
            return kernel  # another process has compiled it meanwhile
        _announce()
        code = emit_object(fn, name, result)
        cached.save(key, code)
        return link(code, name)


def compile_module(build: Callable[[Any, str], None], name: str, stamp: str) -> Any:
    """The engine of the C function `name` that `build(module, name)` prints, compiled or taken from disk by `stamp`."""
    cached = CachedKernel(name, stamp)
    key = cached.key("module", cpu_target.target_context.codegen().magic_tuple())
    if (engine := cached.load(key, load)) is None:
        with file_lock(cached.file(key)):
            if (engine := cached.load(key, load)) is None:
                code = emit_module(build, name)
                cached.save(key, code)
                engine = load(code)
    return engine


@cache
def _announce() -> None:
    print(
        "tilewise: compiling kernels for this CPU, only once; `tilewise warmup` does it in advance",
        file=sys.stderr,
        flush=True,
    )


# The module of each kernel. One of a storage type ("qk f16") is the result of its module's `<name>_function(type)`.
KERNEL_MODULES = {
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
    **dict.fromkeys(("prefill", "prefill_amx", "prefill_dot"), "mainloop.prefill"),
}


def kernel(name: str) -> Kernel:
    """A kernel: `worker`, `decode`, `combine`, `qk f16`, `pv int8`, ...

    Loaded once, even if several threads ask first: code is freed with its `Kernel`, so replacing one would free code
    whose address is in use.
    """
    loaded = _kernels.get(name)
    if loaded is None:
        with _lock:
            loaded = _kernels.get(name)
            if loaded is None:
                loaded = _kernels[name] = prebuilt.load(symbol(name)) or compile_function(*definition(name))
    return loaded


def symbol(name: str) -> str:
    """The symbol of a kernel."""
    return name.replace(" ", "_")


def definition(name: str) -> tuple[Callable[..., Any], str, Any]:
    """A kernel's function, its symbol and the type of its result."""
    what, _, dtype = name.partition(" ")
    module = import_module(f".{KERNEL_MODULES[what]}", __package__)
    fn = getattr(module, f"{what}_function")(dtype) if dtype else getattr(module, what)
    return fn, symbol(name), types.int64 if name == "launch" else types.void


def function(name: str) -> int:
    """The address of a kernel."""
    return kernel(name).address


@cache
def entry(name: str) -> Any:
    """A kernel as a Python callable; it runs without the GIL."""
    return kernel(name).entry


# Everything that a call can need.
KERNELS = [
    *("schedule", "launch", "worker", "thread_main", "combine", "decode", "prefill"),
    *(f"{what} {dtype}" for dtype in DECODE for what in ("qk", "pv")),
    *(f"{what} {dtype}" for dtype in BYTE_PARTS if has_vnni() for what in ("vnni_qk", "vnni_pv")),
    *(f"{what} {dtype}" for dtype in BYTE_PARTS if has_sdot() for what in ("sdot_qk", "sdot_pv")),
    *(("amx_qk", "amx_pv", *(f"prefill_amx {dtype}" for dtype in PARTS)) if usable() else ()),
    *("append", "cascade", "map_rows", "schedule_backward", "backward", "backward selected", "delta"),
    *(("backward bf16", "backward selected bf16", "bf16_qk", "bf16_pv", "qk bf16_dot") if has_bf16() else ()),
    *(("prefill_dot bf16",) if has_bf16() and not usable() else ()),
]


def on_disk() -> tuple[set[str], set[str]]:
    """The symbols of the kernels in the package and in the disk cache."""
    names, target = {symbol(name) for name in KERNELS}, prebuilt.target()
    brought = set() if target is None else {file.stem for file in (prebuilt.FOLDER / target).glob("*.o")}
    kept = {file.name.partition(".")[0] for file in cache_directory().glob("*.o")}
    return names & brought, names & kept
