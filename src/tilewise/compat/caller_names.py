"""Errors of drop-ins name the caller's arguments, not tilewise's."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.compiler import is_compiling

from ..errors import InvalidArgument

P = ParamSpec("P")
T = TypeVar("T")


def caller_names(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator. `names` maps tilewise's argument names to those of the decorated function.

    >>> @caller_names(q="query", scale="factor")
    ... def call():
    ...     raise InvalidArgument("scale", -1, "0 or more, as q")
    >>> call()
    Traceback (most recent call last):
        ...
    tilewise.errors.InvalidArgument: factor: got -1, expected 0 or more, as query
    """
    letters = re.compile(rf"(?<=\bas )({'|'.join(name for name in names if len(name) == 1) or '(?!)'})\b")

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> T:
            if is_compiling():  # torch.compile(fullgraph=True) shows the error as it was raised
                return function(*args, **options)
            try:
                return function(*args, **options)
            except InvalidArgument as error:
                message = letters.sub(lambda name: names[name[0]], error.args[0])
                name = re.match(r"\w*", message)[0]  # type: ignore[index]
                if name in names:
                    error.argument = names[name] + error.argument[len(name) :]
                    message = names[name] + message[len(name) :]
                error.args = (message,)
                raise

        return call

    return decorate
