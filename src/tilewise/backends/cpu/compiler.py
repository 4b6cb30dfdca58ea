"""Kernels by name: as addresses of C functions, and as functions that Python calls.

The object code of a kernel is in the package (`prebuilt.py`), in the disk cache (`kernel_cache.py`), or compiled here
on first use. `linker.py` loads it.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import base, event, interpreter, transforms
from numba.core.codegen import CPUCodeLibrary, JITCPUCodegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import CPUContext
from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined]
from numba.core.postproc import PostProcessor, VariableLifetime
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys
from numba.core.types.functions import BaseFunction

from . import prebuilt
from .codegen.formats import DECODE
from .codegen.numba_ops import OPTIONS, KernelCompiler
from .gemm.amx import PARTS, usable
from .gemm.fixed_point import PARTS as BYTE_PARTS
from .gemm.gemv_sdot import has_sdot
from .gemm.gemv_vnni import has_vnni
from .gemm.gradient import has_bf16
from .kernel_cache import Kept, alone, cache_directory
from .linker import ENTRY, Kernel, link

_lock = threading.RLock()
_resolved: dict[Any, Any] = {}
_kernels: dict[str, Kernel] = {}


def compile_function(fn: Callable[..., Any], name: str, result: Any = types.void) -> Kernel:
    """`result fn(int64, ...)`, compiled or taken from disk."""
    kept = Kept(name)
    key = kept.key(_signature(fn, result), cpu_target.target_context.codegen().magic_tuple())
    if (kernel := kept.load(key, lambda code: link(code, name))) is not None:
        return kernel
    with alone(kept.file(key)):
        if (kernel := kept.load(key, lambda code: link(code, name))) is not None:
            return kernel  # another process has compiled it meanwhile
        _announce()
        code = object_code(fn, name, result)
        kept.save(key, code)
        return link(code, name)


def _signature(fn: Callable[..., Any], result: Any) -> Any:
    return result(*[types.int64] * len(inspect.signature(fn).parameters))


def object_code(fn: Callable[..., Any], name: str, result: Any = types.void) -> bytes:
    """An object file that defines the C function `name` and its Python entry, and nothing else."""
    signature, fn.__qualname__ = _signature(fn, result), name
    with modules_only():
        compiled = _FunctionCompiler(fn, cpu_target, OPTIONS, {}, KernelCompiler).compile(
            signature.args, signature.return_type
        )
        library, context = compiled.library, cpu_target.target_context
        library._final_module.link_in(llvm.parse_assembly(str(entry_module(context, compiled.fndesc, name))))
        link_callees(library, library._final_module)
        library._optimize_final_module()
    module = library._final_module
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name not in (name, name + ENTRY):
            value.linkage = "private"
    module.verify()
    return library.codegen._tm.emit_object(module)


def link_callees(library: Any, module: Any) -> None:
    """Links all direct and indirect callees of a function into a module, once each. None calls Numba's runtime."""
    left, seen = [library], {library, rtsys.library}
    while left:
        for called in left.pop()._linking_libraries:
            if called not in seen:
                seen.add(called)
                left.append(called)
                module.link_in(shared(called))


def shared(library: Any) -> Any:
    """A copy of a library's module, to be linked into others."""
    module = library._final_module.clone()
    for function in module.functions:
        if not function.is_declaration:
            function.linkage = "linkonce_odr"
    return module


def entry_module(context: Any, fndesc: Any, name: str) -> ir.Module:
    """A module with `name`, a C function of int64, and `name.entry`, its METH_FASTCALL wrapper (stable ABI)."""
    module = context.create_module(name)
    i64, pointer = ir.IntType(64), ir.IntType(8).as_pointer()
    count, has_result = len(fndesc.argtypes), fndesc.restype != types.void
    callee = ir.Function(
        module, context.call_conv.get_function_type(fndesc.restype, fndesc.argtypes), fndesc.llvm_func_name
    )
    kernel = ir.Function(module, ir.FunctionType(i64 if has_result else ir.VoidType(), [i64] * count), name)
    builder = ir.IRBuilder(kernel.append_basic_block())
    # Kernels raise nothing: the status is 0.
    _, value = context.call_conv.call_function(
        builder, callee, fndesc.restype, fndesc.argtypes, kernel.args, attrs=("noinline",)
    )
    builder.ret(value) if has_result else builder.ret_void()

    def python(called: str, result: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [a.type for a in args])
        known = module.globals.get(called)
        return builder.call(known if known is not None else ir.Function(module, kind, called), args)

    entry = ir.Function(module, ir.FunctionType(pointer, [pointer, pointer.as_pointer(), i64]), name + ENTRY)
    builder = ir.IRBuilder(entry.append_basic_block())
    with builder.if_then(builder.icmp_signed("!=", entry.args[2], i64(count)), likely=False):
        python("PyErr_BadArgument", ir.IntType(32))
        builder.ret(pointer(None))
    numbers = [
        python("PyLong_AsLongLong", i64, builder.load(builder.gep(entry.args[1], [i64(i)]))) for i in range(count)
    ]
    for number in numbers:
        with (
            builder.if_then(builder.icmp_signed("==", number, i64(-1)), likely=False),
            builder.if_then(builder.icmp_unsigned("!=", python("PyErr_Occurred", pointer), pointer(None))),
        ):
            builder.ret(pointer(None))
    state = python("PyEval_SaveThread", pointer)  # releases the GIL
    done = builder.call(kernel, numbers)
    python("PyEval_RestoreThread", ir.VoidType(), state)
    builder.ret(python("PyLong_FromLongLong", pointer, done if has_result else i64(0)))
    return module


@contextmanager
def modules_only() -> Iterator[None]:
    """Within this context Numba stops at LLVM modules.

    It would link every function with its callees, optimise and generate code: six times for one that is called through
    five others. A kernel contains all of them, and is the only one that is needed.
    """
    resolve, size_of, collects = BaseFunction.get_call_type, base.BaseContext.get_abi_sizeof, gc.isenabled()

    def finalize(library: Any) -> None:
        def whole() -> Any:
            module = shared(library)
            link_callees(library, module)
            return module

        library._finalized = True
        library._get_module_for_linking = whole  # Numba may need them later: others use `max` too

    def resolve_once(function: Any, context: Any, args: Any, kws: Any) -> Any:
        """Caches the signature of an operation on scalars, which Numba looks up at every use."""
        if kws or not all(isinstance(a, (types.Number, types.Boolean)) for a in args):
            return resolve(function, context, args, kws)
        key = function, args
        if key not in _resolved:
            _resolved[key] = resolve(function, context, args, kws)
        return _resolved[key]

    sizes: dict[str, int] = {}

    def size_once(context: Any, kind: Any) -> int:
        """Caches the size of an LLVM type: Numba asks for it at every variable, and LLVM parses a module to answer."""
        if (name := str(kind)) not in sizes:
            sizes[name] = size_of(context, kind)
        return sizes[name]

    def process(made: Any, *_: Any, **__: Any) -> None:
        """The post-processing that later passes need. No variable lifetimes: nothing is deleted or yielded here."""
        function = made.func_ir
        function.blocks = transforms.canonicalize_cfg(function.blocks)
        function.variable_lifetime, function.generator_info = VariableLifetime(function.blocks), None

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def unchanged(function: Any) -> Any:
        return function

    instead = [
        (CPUCodeLibrary, "finalize", finalize),
        (BaseFunction, "get_call_type", resolve_once),
        (CPUContext, "create_cfunc_wrapper", nothing),  # for Numba's own functions, such as `max`
        (CPUContext, "create_cpython_wrapper", nothing),
        (base.BaseContext, "get_abi_sizeof", size_once),
        (base, "_has_loc", cache(base._has_loc)),  # it inspects a signature
        (types.Record, "__repr__", types.Type.__repr__),  # it formats all fields, at every pass, for event listeners
        (event, "start_event", nothing),  # at every LLVM call
        (event, "end_event", nothing),
        (JITCPUCodegen, "set_env", nothing),  # for code in Numba's own engine
        (PostProcessor, "run", process),  # after every pass
        (interpreter, "peep_hole_delete_with_exit", unchanged),  # for `with`, which kernels do not use
        (interpreter, "peep_hole_fuse_dict_add_updates", unchanged),  # for dicts
    ]
    with global_compiler_lock:  # no other thread compiles meanwhile
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in instead]
        gc.disable()  # Numba makes many small objects that live to the end
        try:
            for owner, name, function in instead:
                setattr(owner, name, function)
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)
            if collects:
                if gc.get_freeze_count() == 0:  # moves them to the oldest generation, which is rarely scanned
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()


@cache
def _announce() -> None:
    print(
        "tilewise: compiling kernels for this CPU, once; `tilewise warmup` does it ahead", file=sys.stderr, flush=True
    )


# The module of each kernel. One of a storage type ("qk f16") is the result of its module's `<name>_function(type)`.
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


def kernel(name: str) -> Kernel:
    """A kernel: `worker`, `decode`, `combine`, `qk f16`, `pv int8`, ...

    Loaded once, even if several threads ask first: code is freed with its `Kernel`, so replacing one would free code
    whose address is in use.
    """
    found = _kernels.get(name)
    if found is None:
        with _lock:
            found = _kernels.get(name)
            if found is None:
                found = _kernels[name] = prebuilt.load(symbol(name)) or compile_function(*definition(name))
    return found


def symbol(name: str) -> str:
    """The symbol of a kernel."""
    return name.replace(" ", "_")


def definition(name: str) -> tuple[Callable[..., Any], str, Any]:
    """A kernel's function, its symbol and the type of its result."""
    what, _, dtype = name.partition(" ")
    home = import_module(f".{HOMES[what]}", __package__)
    fn = getattr(home, f"{what}_function")(dtype) if dtype else getattr(home, what)
    return fn, symbol(name), types.int64 if name == "launch" else types.void


def function(name: str) -> int:
    """The address of a kernel."""
    return kernel(name).address


@cache
def entry(name: str) -> Any:
    """A kernel as a Python callable; it runs without the GIL."""
    return kernel(name).entry


# Everything that a call can need.
ALL = [
    *("schedule", "launch", "worker", "thread_main", "combine", "decode", "prefill"),
    *(f"{what} {dtype}" for dtype in DECODE for what in ("qk", "pv")),
    *(f"{what} {dtype}" for dtype in BYTE_PARTS if has_vnni() for what in ("vnni_qk", "vnni_pv")),
    *(f"{what} {dtype}" for dtype in BYTE_PARTS if has_sdot() for what in ("sdot_qk", "sdot_pv")),
    *(("amx_qk", "amx_pv", *(f"prefill_amx {dtype}" for dtype in PARTS)) if usable() else ()),
    *("append", "cascade", "map_rows", "schedule_backward", "backward", "delta"),
    *(("backward bf16", "bf16_qk", "bf16_pv", "qk bf16_dot") if has_bf16() else ()),
]


def on_disk() -> tuple[set[str], set[str]]:
    """The symbols of the kernels in the package and in the disk cache."""
    names, target = {symbol(name) for name in ALL}, prebuilt.target()
    brought = set() if target is None else {file.stem for file in (prebuilt.FOLDER / target).glob("*.o")}
    kept = {file.name.partition(".")[0] for file in cache_directory().glob("*.o")}
    return names & brought, names & kept
