"""Kernels whose signature is made from the aggregate of their arguments, so that arguments are listed once."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate
from triton.language.core import base_value

from ...core.mask_rules import RULE_NUMBERS


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def held(value: Any) -> Any:
    """A value that an aggregate can hold: what is known at compile time, None too, is wrapped."""
    return value if isinstance(value, base_value) else gl.constexpr(value)


def declared(cls: Any) -> Any:
    """An aggregate that knows the names of its fields, in order: the one list of a kernel's arguments."""
    names = tuple(cls.__annotations__)
    made = aggregate(cls)
    made.NAMES = names
    return made


def kernel_of(name: str, arguments: Any, body: Any, plain_ints: Sequence[str]) -> Any:
    """The kernel that packs its arguments into one value for `body`, which its partitions share.

    The last argument, S, is known at compile time; `rules`, if there is one, is made of RULE_NUMBERS. Kernels
    are not compiled anew for `plain_ints` that are 1 or multiples of 16. Triton compiles from source text, which is
    registered where `inspect` looks for it.
    """
    names = arguments.NAMES
    assert names[-1] == "S"
    assert set(plain_ints) <= set(names)
    numbers = ", ".join(RULE_NUMBERS)
    taken = ", ".join(numbers if name == "rules" else name for name in names[:-1])
    packed = ", ".join(f"({numbers})" if name == "rules" else name for name in names)
    text = f"def {name}({taken}, S: gl.constexpr):\n    body(Arguments({packed}))\n"
    file = f"<{body.__module__}.{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = {"gl": gl, "body": body, "Arguments": arguments, "__name__": body.__module__}
    exec(compile(text, file, "exec"), space)
    return gluon.jit(space[name], do_not_specialize=[*plain_ints, *(RULE_NUMBERS if "rules" in names else ())])
