"""Kernels whose signature is generated from the declaration of their arguments, so that arguments are listed once.

Triton compiles source text: generated source is registered where `inspect` looks for it. The numbers of the mask's
rules are one argument, `rules`, in a kernel's body, and one for each of RULE_NUMBERS in its signature.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Sequence
from typing import Any

from ...core.mask_rules import RULE_NUMBERS

RULES = f"({', '.join(RULE_NUMBERS)})"


def listed(names: Sequence[str]) -> str:
    """Argument names as a signature lists them."""
    return ", ".join(RULES[1:-1] if name == "rules" else name for name in names)


def kernel_from(head: str, body: str, name: str, sizes: Sequence[str], jit: Any, space: dict[str, Any]) -> Any:
    """The kernel `name` from the source `head + body`, with globals `space`. It is not specialised for arguments
    `sizes` that are 1 or multiples of 16.
    """
    file, text = f"<{space['__name__']}.{name}>", head + body
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made: dict[str, Any] = {}
    exec(compile(text, file, "exec", dont_inherit=True), space, made)
    return jit(made[name], do_not_specialize=re.findall(r"\w+", listed(sizes)))


def kernel_of(names: Sequence[str], sizes: Sequence[str], jit: Any) -> Callable[[Any], Any]:
    """Turns a function of `a` and S into a kernel with arguments `names` and a compile-time S: `a.q` is argument `q`.

    Line numbers are kept.
    """

    def made(function: Any) -> Any:
        lines, number = inspect.getsourcelines(function)
        at = next(i for i, line in enumerate(lines) if line.startswith("def "))
        body = re.sub(r"\ba\.(\w+)", lambda found: RULES if found[1] == "rules" else found[1], "".join(lines[at + 1 :]))
        head = "\n" * (number + at - 1) + f'def {function.__name__}({listed(names)}, S: "constexpr"):\n'
        return kernel_from(head, body, function.__name__, sizes, jit, function.__globals__)

    return made
