"""Arguments of Gluon kernels, declared once as an aggregate, from which signatures are made."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate
from triton.language.core import base_value

from ..gpu.signature import RULES, kernel_from, listed


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def held(value: Any) -> Any:
    """A value that an aggregate can hold: what is known at compile time, None too, is wrapped."""
    return value if isinstance(value, base_value) else gl.constexpr(value)


class Size:
    """The annotation of integers for whose values kernels are not compiled anew."""


def declared(cls: Any) -> Any:
    """An aggregate of these fields, in order: the one list of a kernel's arguments. Any may be None (there is nothing),
    or a number that is known at compile time; the last is S, which always is.
    """
    kinds = dict(cls.__annotations__)
    names = tuple(kinds)
    assert names[-1] == "S"

    @gluon.constexpr_function  # type: ignore[untyped-decorator]
    def init(self: Any, *values: Any) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(self, name, held(value))

    cls.__annotations__ = dict.fromkeys(names, object)
    cls.__init__ = init
    made = aggregate(cls)
    made.NAMES = names
    made.SIZES = tuple(name for name, kind in kinds.items() if kind is Size)
    return made


def gluon_kernel(arguments: Any) -> Any:
    """Makes a kernel of declared `arguments` of a function that takes them as one value, which its partitions share."""
    packed = ", ".join(RULES if name == "rules" else name for name in arguments.NAMES)

    def made(function: Any) -> Any:
        head = f'def {function.__name__}({listed(arguments.NAMES)}: "constexpr"):\n'
        space = {"body": gluon.jit(function), "Arguments": arguments, "__name__": function.__module__}
        body = f"    body(Arguments({packed}))\n"
        return kernel_from(head, body, function.__name__, arguments.SIZES, gluon.jit, space)

    return made
