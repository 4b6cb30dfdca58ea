"""Triton's interpreter with less to do: imported first in a process of its own.

A launch replaces the functions of `triton.language` by interpreted ones, and so does every call of a device function,
by looking through all members of the language again: within a launch once is enough for each set of modules. Sums are
checked for overflow, and what is found is dropped: not here. A type of NumPy is looked up in a table that is made
for it: in one that stays.

And a comparison of two scalars is one bit wide, not as wide as they are: Triton 3.9 takes no mask of another type.
"""

from dataclasses import replace

from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    InterpreterError,
    TensorHandle,
    _get_np_dtype,
    _patch_lang,
    tl,
)

_replaced = set()  # of this launch
_types = {}
_run, _binary_op = InterpretedFunction.run, InterpreterBuilder.binary_op


def run(self, *args, **options):
    _replaced.clear()  # the launch before has put the language back
    return _run(self, *args, **options)


def call(self, *args, **options):
    languages = frozenset(id(x) for x in self.fn.__globals__.values() if x is tl or x is tl.core)
    if languages not in _replaced:
        _patch_lang(self.fn)
        _replaced.add(languages)
    try:
        return self.rewrite()(*args, **options)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


def numpy_type(kind):
    kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
    key = "pointer" if isinstance(kind, tl.pointer_type) else kind.name
    if key not in _types:
        _types[key] = _get_np_dtype(kind)
    return _types[key]


def binary_op(self, lhs, rhs, op):
    found = _binary_op(self, lhs, rhs, op)
    return TensorHandle(found.data, tl.int1) if found.data.dtype == bool else found


InterpretedFunction.run, InterpretedFunction.__call__ = run, call
InterpreterBuilder.binary_op = binary_op
interpreter._get_np_dtype = numpy_type
builder = interpreter.interpreter_builder
assert not builder.options.debug, "then overflow is told"
builder.options = replace(builder.options, sanitize_overflow=False)
