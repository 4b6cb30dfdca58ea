"""The errors a caller can meet."""

from __future__ import annotations

import copyreg
from typing import Any


class InvalidArgument(ValueError):
    """An argument is wrong: the message names it, what was given, what is expected and, if there is one, the remedy."""

    def __init__(self, argument: str, given: object, expected: str, remedy: str = "") -> None:
        self.argument = argument
        # Not by super(): torch.compile(fullgraph=True) could not trace that, and would not say what is wrong.
        self.args = (f"{argument}: got {given}, expected {expected}" + (f"; {remedy}" if remedy else ""),)

    def __reduce__(self) -> tuple[Any, ...]:
        """By its message: exceptions cross between processes, and one that cannot be read ends the reader."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class UnknownKeyword(InvalidArgument, TypeError):
    """A keyword that a function does not have; the message says which was probably meant."""


class Unsupported(NotImplementedError):
    """A backend that was asked for by name cannot serve this call, and nothing else was tried; or ("any") none can."""

    def __init__(self, backend: str, reason: str, remedy: str) -> None:
        self.backend, self.reason, self.remedy = backend, reason, remedy
        who = "no backend can" if backend == "any" else f"backend {backend!r} cannot"
        self.args = (f"{who} serve this call: {reason}; {remedy}",)  # not by super(), and read again, as above

    __reduce__ = InvalidArgument.__reduce__


class CacheFull(RuntimeError):
    """A cache has no room for what was to be appended; nothing has been written."""


def no_double_backward() -> Unsupported:
    remedy = "leave out create_graph=True, or take torch's own attention (its math backend) there"
    return Unsupported("any", "there are no gradients of gradients (double backward)", remedy)
