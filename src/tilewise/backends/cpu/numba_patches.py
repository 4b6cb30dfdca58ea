"""Numba with some of its steps replaced while kernels are compiled: functions end as LLVM modules, without wrappers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from numba import types
from numba.core import base, event, interpreter, transforms
from numba.core.codegen import CPUCodeLibrary, JITCPUCodegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import CPUContext
from numba.core.postproc import PostProcessor, VariableLifetime
from numba.core.runtime.nrt import rtsys
from numba.core.types.functions import BaseFunction

_resolved: dict[Any, Any] = {}


@contextmanager
def modules_only() -> Iterator[None]:
    """Within this context Numba stops at LLVM modules.

    It would link every function with its callees, optimise and generate code: six times for one that is called through
    five others. A kernel contains all of them, and is the only one that is needed.
    """
    resolve, size_of, collects = BaseFunction.get_call_type, base.BaseContext.get_abi_sizeof, gc.isenabled()

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

    patches = [
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
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
        gc.disable()  # Numba makes many small objects that live to the end
        try:
            for owner, name, function in patches:
                setattr(owner, name, function)
            yield
        finally:
            for owner, name, function in originals:
                setattr(owner, name, function)
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
