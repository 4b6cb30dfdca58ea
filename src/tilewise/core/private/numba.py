"""Every name of `numba.core`, every private one of llvmlite, and the steps of Numba that are replaced while kernels
compile: functions end as LLVM modules, without wrappers.
"""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from numba import types

from .. import forks
from . import Missing, find

ALL = "0.60 0.68"
SEEN = {
    "numba.core": {
        ALL: """
        base.BaseContext.get_abi_sizeof base._has_loc cgutils codegen.CPUCodeLibrary.finalize
        codegen.CPUCodeLibrary._optimize_final_module codegen.JITCPUCodegen._create_empty_module
        codegen.JITCPUCodegen.set_env compiler.CompileResult._rebuild compiler.CompileResult._reduce compiler.Compiler
        compiler_lock.global_compiler_lock._lock cpu.CPUContext.create_cfunc_wrapper
        cpu.CPUContext.create_cpython_wrapper dispatcher._FunctionCompiler
        event.end_event event.start_event interpreter.peep_hole_delete_with_exit
        interpreter.peep_hole_fuse_dict_add_updates postproc.PostProcessor.run postproc.VariableLifetime
        registry.cpu_target.target_context runtime.nrt.rtsys serialize.dumps transforms.canonicalize_cfg
        types.functions.BaseFunction.get_call_type
        """
    },
    "llvmlite.binding.ffi.lib": {ALL: "_lock._lock"},
    "llvmlite.ir.types": {ALL: "_BaseFloatType._create_instance"},
}
NEEDED = {"finalize", "set_env"}  # of what is replaced; the rest only takes time

cgutils = find("numba.core.cgutils")
cpu_target = find("numba.core.registry.cpu_target")
Compiler = find("numba.core.compiler.Compiler")
BaseContext = find("numba.core.base.BaseContext")
BaseFunction = find("numba.core.types.functions.BaseFunction")
CompileResult = find("numba.core.compiler.CompileResult")
FunctionCompiler = find("numba.core.dispatcher._FunctionCompiler")
VariableLifetime = find("numba.core.postproc.VariableLifetime")
global_compiler_lock = find("numba.core.compiler_lock.global_compiler_lock")
transforms = find("numba.core.transforms")
rtsys = find("numba.core.runtime.nrt.rtsys")

_resolved: dict[Any, Any] = {}

# Whoever compiles holds the second; the first is LLVM's, whose calls also load code.
for path in ("llvmlite.binding.ffi.lib._lock", "numba.core.compiler_lock.global_compiler_lock"):
    if not isinstance(find(f"{path}._lock"), Missing):
        forks.let_finish(find(path), "_lock", threading.RLock)


@cache
def bfloat() -> Any:
    """LLVM's bfloat, which llvmlite lacks."""

    class BFloat(find("llvmlite.ir.types._BaseFloatType")):  # type: ignore[misc]
        def __str__(self) -> str:
            return "bfloat"

    BFloat._create_instance()
    return BFloat()


def emit_module(build: Callable[[Any, str], None], name: str) -> bytes:
    """An object file of the LLVM module that `build` fills: the C function `name`."""
    codegen = cpu_target.target_context.codegen()
    module = codegen._create_empty_module(name)
    build(module, name)
    with global_compiler_lock:
        library = codegen.create_library(name)
        library._final_module.link_in(llvm.parse_assembly(str(module)))
        library._optimize_final_module()
        library._final_module.verify()
        return bytes(codegen._tm.emit_object(library._final_module))


def keep_in(function: Any, cache: Any) -> None:
    """Lets a compiled function keep its code in a cache."""
    function._cache = cache


def pickled(result: Any) -> bytes:
    """The code of a compiled loop."""
    return bytes(find("numba.core.serialize.dumps")(result._reduce()))


def unpickled(code: bytes, context: Any) -> Any:
    """The compiled loop again."""
    rtsys.initialize(context)  # Numba functions that it links to
    return CompileResult._rebuild(context, *pickle.loads(code))


def compile_linked(
    fn: Any, kind: Any, options: dict[str, Any], pipeline: Any, entry: Callable[[Any, Any], Any]
) -> tuple[Any, Callable[[Any], bytes]]:
    """The optimised LLVM module of a function of type `kind`, with what it calls and the module that `entry` makes of
    Numba's context and the function's description; and what makes an object file of a module.
    """
    with modules_only():
        compiled = FunctionCompiler(fn, cpu_target, options, {}, pipeline).compile(kind.args, kind.return_type)
        library, context = compiled.library, cpu_target.target_context
        library._final_module.link_in(llvm.parse_assembly(str(entry(context, compiled.fndesc))))
        link_callees(library, library._final_module)
        library._optimize_final_module()
    return library._final_module, library.codegen._tm.emit_object


@contextmanager
def modules_only() -> Iterator[None]:
    """Within this context Numba stops at LLVM modules.

    It would link every function with its callees, optimise and generate code: six times for one that is called through
    five others. A kernel contains all of them, and is the only one that is needed.
    """
    resolve, size_of, collects = BaseFunction.get_call_type, BaseContext.get_abi_sizeof, gc.isenabled()

    def finalize(library: Any) -> None:
        def with_callees() -> Any:
            module = linkable(library)
            link_callees(library, module)
            return module

        library._finalized = True
        library._get_module_for_linking = with_callees  # Numba may need them later: others use `max` too

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

    def process(processor: Any, *_: Any, **__: Any) -> None:
        """The post-processing that later passes need. No variable lifetimes: nothing is deleted or yielded here."""
        function = processor.func_ir
        function.blocks = transforms.canonicalize_cfg(function.blocks)
        function.variable_lifetime, function.generator_info = VariableLifetime(function.blocks), None

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def unchanged(function: Any) -> Any:
        return function

    patches = {
        "numba.core.codegen.CPUCodeLibrary.finalize": finalize,
        "numba.core.types.functions.BaseFunction.get_call_type": resolve_once,
        "numba.core.cpu.CPUContext.create_cfunc_wrapper": nothing,  # for Numba's own functions, such as `max`
        "numba.core.cpu.CPUContext.create_cpython_wrapper": nothing,
        "numba.core.base.BaseContext.get_abi_sizeof": size_once,
        "numba.core.base._has_loc": cache(find("numba.core.base._has_loc")),  # it inspects a signature
        "numba.types.Record.__repr__": types.Type.__repr__,  # it formats all fields, at every pass, for event listeners
        "numba.core.event.start_event": nothing,  # at every LLVM call
        "numba.core.event.end_event": nothing,
        "numba.core.codegen.JITCPUCodegen.set_env": nothing,  # for code in Numba's own engine
        "numba.core.postproc.PostProcessor.run": process,  # after every pass
        "numba.core.interpreter.peep_hole_delete_with_exit": unchanged,  # for `with`, which kernels do not use
        "numba.core.interpreter.peep_hole_fuse_dict_add_updates": unchanged,  # for dicts
    }
    with global_compiler_lock:  # no other thread compiles meanwhile
        originals = []
        for path, function in patches.items():
            owner, _, name = path.rpartition(".")
            if not isinstance(original := find(path), Missing):
                originals.append((find(owner), name, original, function))
            elif name in NEEDED:
                original()
        gc.disable()  # Numba makes many small objects that live to the end
        try:
            for owner, name, _, function in originals:
                setattr(owner, name, function)
            yield
        finally:
            for owner, name, original, _ in originals:
                setattr(owner, name, original)
            if collects:
                if gc.get_freeze_count() == 0:  # moves them to the oldest generation, which is rarely scanned
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()


def link_callees(library: Any, module: Any) -> None:
    """Links all direct and indirect callees of a function into a module, once each. None calls Numba's runtime."""
    left, seen = [library], {library, rtsys.library}
    while left:
        for called in left.pop()._linking_libraries:
            if called not in seen:
                seen.add(called)
                left.append(called)
                module.link_in(linkable(called))


def linkable(library: Any) -> Any:
    """A copy of a library's module, to be linked into others."""
    module = library._final_module.clone()
    for function in module.functions:
        if not function.is_declaration:
            function.linkage = "linkonce_odr"
    return module
