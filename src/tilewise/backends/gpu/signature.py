"""Kernels whose signature is generated from the declaration of their arguments, so that arguments are listed once.

Triton compiles source text: generated source is registered where `inspect` looks for it. The numbers of the mask's
rules are one argument, `rules`, in a kernel's body, and one for each of RULE_NUMBERS in its signature.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import re
from collections.abc import Callable, Sequence
from functools import cache
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
    return function_from(head + body, name, jit, space, do_not_specialize=re.findall(r"\w+", listed(sizes)))


def function_from(text: str, name: str, jit: Any, space: dict[str, Any], **options: Any) -> Any:
    """The function `name` of a text, compiled by `jit`. Texts with the same name have files of their own."""
    file = f"<{space['__name__']}.{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made: dict[str, Any] = {}
    exec(compile(text, file, "exec", dont_inherit=True), space, made)
    return jit(made[name], **options)


def kernel_of(names: Sequence[str], sizes: Sequence[str], jit: Any) -> Callable[[Any], Any]:
    """Turns a function of `a` and S into a kernel with arguments `names` and a compile-time S: `a.q` is argument `q`.

    Line numbers are kept. `a.captured` is a tuple of captured tensors, none unless the kernel is made for some
    (`with_captured`).
    """

    def made(function: Any) -> Any:
        lines, number = inspect.getsourcelines(function)
        at = next(i for i, line in enumerate(lines) if line.startswith("def "))

        @cache
        def kernel(ranks: tuple[int, ...]) -> Any:
            """The kernel for captured tensors of these ranks."""
            entries = captured_names(ranks)
            own = [name for entry in entries for name in entry]
            sizes_of = [*sizes, *(name for entry in entries for name in entry[1::2])]
            tuples = {"rules": RULES, "captured": f"({''.join(f'{name}, ' for name in own)})"}
            body = re.sub(r"\ba\.(\w+)", lambda found: tuples.get(found[1], found[1]), "".join(lines[at + 1 :]))
            head = f'def {function.__name__}({listed([*names, *own])}, S: "constexpr"):\n'
            head = "\n" * (number + at - 1) + head
            return kernel_from(head, body, function.__name__, sizes_of, jit, function.__globals__)

        own = kernel(())
        own.with_captured = kernel
        return own

    return made


def captured_names(ranks: Sequence[int]) -> list[list[str]]:
    """The arguments of captured tensors of these ranks: of each a pointer, then size and stride of each dim."""
    return [[f"C{n}", *(f"C{n}_{x}{dim}" for dim in range(rank) for x in "ns")] for n, rank in enumerate(ranks)]
