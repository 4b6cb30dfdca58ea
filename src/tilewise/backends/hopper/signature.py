"""Structs of Gluon kernels, and kernel signatures generated from structs of arguments."""

from __future__ import annotations

import inspect
from typing import Any

from ..gpu.gluon import aggregate, base_value, gl, gluon
from ..gpu.signature import RULES, kernel_from, listed


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def as_constexpr(value: Any) -> Any:
    """A value that an aggregate can hold: compile-time values, None included, are wrapped."""
    return value if isinstance(value, base_value) else gl.constexpr(value)


class Size:
    """The annotation of integer arguments for whose values kernels are not specialised."""


def struct(cls: Any) -> Any:
    """An aggregate constructed from values in the order of its fields. A kernel's arguments are listed once, in one.

    A field `object` may be None (absent), or a compile-time number. A base class's fields come after its own.
    """
    kinds = {name: kind for each in cls.__mro__ for name, kind in inspect.get_annotations(each).items()}

    @gluon.constexpr_function  # type: ignore[untyped-decorator]
    def init(self: Any, *values: Any) -> None:
        for name, value in zip(kinds, values, strict=True):
            setattr(self, name, as_constexpr(value))

    # Without base classes: since Triton 3.8 those of an aggregate must be aggregates.
    methods = {name: x for each in reversed(cls.__mro__[:-1]) for name, x in vars(each).items() if name[:2] != "__"}
    fields = {name: object if kind is Size else kind for name, kind in kinds.items()}
    own = {"__init__": init, "__annotations__": fields, "__module__": cls.__module__, "__doc__": cls.__doc__}
    made = aggregate(type(cls.__name__, (), methods | own))
    made.NAMES = tuple(kinds)
    made.SIZES = tuple(name for name, kind in kinds.items() if kind is Size)
    return made


def gluon_kernel(arguments: Any) -> Any:
    """Makes a kernel with declared `arguments` from a function that takes them as one value, shared by its partitions.

    The last, S, is a compile-time argument.
    """
    assert arguments.NAMES[-1] == "S"
    packed = ", ".join(RULES if name == "rules" else name for name in arguments.NAMES)

    def made(function: Any) -> Any:
        head = f'def {function.__name__}({listed(arguments.NAMES)}: "constexpr"):\n'
        space = {"body": gluon.jit(function), "Arguments": arguments, "__name__": function.__module__}
        body = f"    body(Arguments({packed}))\n"
        return kernel_from(head, body, function.__name__, arguments.SIZES, gluon.jit, space)

    return made
