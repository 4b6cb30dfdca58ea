"""What a function captures: its tensors, and a key that changes with anything else that its trace depends on.

The bytecode names the globals, cells and attributes that a function reads. Each is looked up at every call: a number
becomes part of the key, a tensor only by its shape, dtype and device, a function by its code and what it captures in
turn. A function made anew with equal code and captures has the same key. What cannot be described (an object of a class
of the user's that is passed on whole) makes the function untraceable by key: it is traced at each call.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

SIMPLE = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, slice, type(...)})
IMMUTABLE = ("torch", "math", "builtins", "functools", "operator", "tilewise")  # packages that users do not change
CALLED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, type(torch.relu))
MOST = 64  # elements of a captured list or dict
HIDES = ("__import__", "eval", "exec", "globals", "locals", "vars")  # read what no bytecode names
DEEPEST = 8  # functions in functions
MISSING = "missing"
CELL, GLOBAL, OWN = 0, 1, 2
Path = tuple[int, Any, tuple[str, ...]]  # where it begins, with what, and the attributes that follow


class NoKey(Exception):
    """The function captures something that no key describes."""


_paths: dict[types.CodeType, tuple[Path, ...]] = {}


class Captures:
    """The tensors that a function captures, each once, and its key; None if it has none."""

    __slots__ = ("_numbers", "_parts", "key", "tensors")

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._parts: list[Any] = [name]
        self.key: tuple[Any, ...] | None = None
        try:
            self._add(function, 0)
            self.key = tuple(self._parts)
            hash(self.key)
        except (NoKey, TypeError):
            self.key = None

    def _add(self, x: Any, depth: int) -> None:
        kind = type(x)
        parts = self._parts
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            number = self._numbers.get(id(x))
            if number is None:
                number = self._numbers[id(x)] = len(self.tensors)
                self.tensors.append(x)
                parts += x.shape, x.dtype, x.device
            parts.append(number)
        elif kind in SIMPLE:
            parts += kind, x.hex() if kind is float else x
        elif depth > DEEPEST:
            raise NoKey
        elif kind is types.FunctionType:
            self._add_function(x, None, depth)
        elif kind is types.MethodType:
            self._add_function(x.__func__, x.__self__, depth)
        elif kind is tuple or kind is list:
            if len(x) > MOST:
                raise NoKey
            parts += kind, len(x)
            for y in x:
                self._add(y, depth + 1)
        elif kind is dict:
            self._add([*x.keys(), *x.values()], depth + 1)
        elif kind is functools.partial:
            self._add((x.func, x.args, x.keywords), depth + 1)
        elif isinstance(x, torch.nn.Module):
            self._add_module(x, depth)
        elif isinstance(x, (*CALLED, types.ModuleType, type)):
            parts.append(x)
        elif depth == 0 and callable(x):
            self._add_function(kind.__call__, x, depth)
        else:
            raise NoKey

    def _add_function(self, function: Any, own: Any, depth: int) -> None:
        if type(function) is not types.FunctionType or depth > DEEPEST:
            raise NoKey
        code = function.__code__
        paths = _paths.get(code)
        if paths is None:
            paths = _paths[code] = tuple(_paths_of(code))
        self._parts.append(code)
        for begin, at, attributes in paths:
            if begin == CELL:
                try:
                    x = function.__closure__[at].cell_contents  # type: ignore[index]
                except ValueError:  # a cell without contents yet
                    x = MISSING
            elif begin == GLOBAL:
                x = function.__globals__.get(at, MISSING)  # missing: a builtin
            elif own is None:  # not a method: its first argument is a cell
                continue
            else:
                x = own
            if x is torch or x is MISSING:
                if x is MISSING and begin == GLOBAL and at in HIDES:
                    raise NoKey
                continue
            if attributes:
                x = _follow(x, attributes)
            elif x is own and begin == OWN:
                raise NoKey  # an object that is used whole
            if x is not function:
                self._add(x, depth + 1)
        if function.__defaults__:
            self._add(function.__defaults__, depth + 1)
        if function.__kwdefaults__:
            self._add(function.__kwdefaults__, depth + 1)

    def _add_module(self, module: torch.nn.Module, depth: int) -> None:
        """A layer of torch, which is called whole: all that it holds."""
        if depth == 0:
            self._add_function(type(module).forward, module, depth)
            return
        if not type(module).__module__.startswith("torch."):
            raise NoKey
        self._parts.append(type(module))
        for name, x in vars(module).items():
            if type(x) in SIMPLE or (type(x) is dict and x):
                self._add(name, depth + 1)
                self._add(x, depth + 1)


def _follow(x: Any, attributes: tuple[str, ...]) -> Any:
    """An attribute of an attribute, as far as there are objects: a tensor's or a number's are its own."""
    for name in attributes:
        kind = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter or kind in SIMPLE:
            return x
        if kind is types.ModuleType and x.__name__.partition(".")[0] in IMMUTABLE:
            return MISSING
        x = getattr(x, name, MISSING)
    return x


def _paths_of(code: types.CodeType) -> list[Path]:
    """The paths that a function's code reads, and the functions that it defines."""
    found: dict[Path, None] = {}
    start: tuple[int, Any] | None = None
    attributes: list[str] = []

    def end() -> None:
        if start is not None:
            found[(*start, tuple(attributes))] = None

    own = code.co_varnames[0] if code.co_argcount else None
    for step in dis.get_instructions(code):
        op = step.opname
        if op in ("LOAD_ATTR", "LOAD_METHOD") and start is not None:
            attributes.append(step.argval)
            continue
        end()
        start, attributes = None, []
        if op in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE") and step.argval in code.co_freevars:
            start = CELL, code.co_freevars.index(step.argval)
        elif op in ("LOAD_GLOBAL", "LOAD_NAME"):
            start = GLOBAL, step.argval
        elif op == "IMPORT_NAME" and step.argval.partition(".")[0] not in IMMUTABLE:
            found[(GLOBAL, "__import__", ())] = None
        elif op.startswith("LOAD_FAST"):
            loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)  # Python 3.13 loads two at once
            if own in loaded[:-1]:
                found[(OWN, None, ())] = None
            if own == loaded[-1]:
                start = OWN, None
    end()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            for begin, at, names in _paths_of(inner):
                if begin == CELL and inner.co_freevars[at] in code.co_freevars:
                    found[(CELL, code.co_freevars.index(inner.co_freevars[at]), names)] = None
                elif begin == GLOBAL:
                    found[(begin, at, names)] = None
    return list(found)
