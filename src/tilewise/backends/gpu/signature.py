"""Kernels whose signature is made from the declaration of their arguments, so that arguments are listed once.

Triton compiles source text: what is made here is registered where `inspect` looks for it. The numbers of the mask's
rules are one argument, `rules`, to a kernel's body, and as many as RULE_NUMBERS names in its signature.
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
    """Names as a signature has them."""
    return ", ".join(RULES[1:-1] if name == "rules" else name for name in names)


def kernel_from(head: str, body: str, name: str, sizes: Sequence[str], jit: Any, space: dict[str, Any]) -> Any:
    """The kernel `name` of these source texts, whose globals are `space`. It is not compiled anew for arguments `sizes`
    that are 1 or multiples of 16.
    """
    file, text = f"<{space['__name__']}.{name}>", head + body
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made: dict[str, Any] = {}
    exec(compile(text, file, "exec", dont_inherit=True), space, made)
    return jit(made[name], do_not_specialize=re.findall(r"\w+", listed(sizes)))


def kernel_of(names: Sequence[str], sizes: Sequence[str], jit: Any) -> Callable[[Any], Any]:
    """Makes a kernel of arguments `names`, and S at compile time, of a function of `a` and S: `a.q` is argument `q`.

    Its lines keep their numbers.
    """

    def made(function: Any) -> Any:
        lines, number = inspect.getsourcelines(function)
        at = next(i for i, line in enumerate(lines) if line.startswith("def "))
        body = re.sub(r"\ba\.(\w+)", lambda found: RULES if found[1] == "rules" else found[1], "".join(lines[at + 1 :]))
        head = "\n" * (number + at - 1) + f'def {function.__name__}({listed(names)}, S: "constexpr"):\n'
        return kernel_from(head, body, function.__name__, sizes, jit, function.__globals__)

    return made
