"""Kernels whose signature is made from the aggregate of their arguments, so that arguments are listed once."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def kernel_of(name: str, arguments: Any, body: Any, plain_ints: Sequence[str]) -> Any:
    """The kernel that packs its arguments into one value for `body`, which its partitions share.

    The last argument, S, is known at compile time. Kernels are not compiled anew for `plain_ints` that are 1 or
    multiples of 16. Triton compiles from source text, which is registered where `inspect` looks for it.
    """
    names = arguments.NAMES
    assert names[-1] == "S"
    assert set(plain_ints) <= set(names)
    text = f"def {name}({', '.join(names[:-1])}, S: gl.constexpr):\n    body(Arguments({', '.join(names)}))\n"
    file = f"<{body.__module__}.{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = {"gl": gl, "body": body, "Arguments": arguments, "__name__": body.__module__}
    exec(compile(text, file, "exec"), space)
    return gluon.jit(space[name], do_not_specialize=list(plain_ints))
