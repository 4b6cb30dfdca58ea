"""Triton's interpreter with less to do: imported first in a process of its own.

A launch replaces the functions of `triton.language` by interpreted ones, and so does every call of a device function,
by looking through all members of the language again. Within a launch once is enough for each set of modules.
"""

from triton.runtime.interpreter import InterpretedFunction, InterpreterError, _patch_lang, tl

_replaced = set()  # of this launch
_run = InterpretedFunction.run


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


InterpretedFunction.run, InterpretedFunction.__call__ = run, call
