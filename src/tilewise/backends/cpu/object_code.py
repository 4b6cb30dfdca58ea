"""Compiles a Python function to an object file, by Numba and LLVM."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from ...core.private.numba import compile_linked
from .codegen.numba_ops import OPTIONS, KernelCompiler
from .linker import ENTRY


def signature(fn: Callable[..., Any], result: Any) -> Any:
    """Of a kernel: all its arguments are int64."""
    return result(*[types.int64] * len(inspect.signature(fn).parameters))


def emit_object(fn: Callable[..., Any], name: str, result: Any = types.void) -> bytes:
    """An object file that defines the C function `name` and its Python entry, and nothing else."""
    kind, fn.__qualname__ = signature(fn, result), name
    module, emit = compile_linked(
        fn, kind, OPTIONS, KernelCompiler, lambda context, fndesc: entry_module(context, fndesc, name)
    )
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name not in (name, name + ENTRY):
            value.linkage = "private"
    module.verify()
    return emit(module)


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
