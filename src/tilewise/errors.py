"""Errors that callers may want to catch."""

from __future__ import annotations

import copyreg
from typing import Any


class InvalidArgument(ValueError):
    """A wrong argument. The message names it, what was given, what was expected and, if there is one, the remedy."""

    def __init__(self, argument: str, given: object, expected: str, remedy: str = "") -> None:
        self.argument = argument
        # Not by super(): torch.compile(fullgraph=True) cannot trace that, and would hide the message.
        self.args = (f"{argument}: got {given}, expected {expected}" + (f"; {remedy}" if remedy else ""),)

    def __reduce__(self) -> tuple[Any, ...]:
        """By its message: exceptions are sent between processes, and one that cannot be unpickled ends the reader."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class UnexpectedArgument(InvalidArgument, TypeError):
    """An argument that the function does not have; the message names the one that was probably meant."""

    def __init__(self, argument: str, given: str, hint: str, function: str) -> None:
        self.argument = argument
        self.args = (f"{argument}: {given}; " + (f"{hint}; " if hint else "") + f"help({function}) lists all",)


class Unsupported(NotImplementedError):
    """The backend given by name cannot serve this call, and no other was tried; or, with backend "any", none can."""

    def __init__(self, backend: str, reason: str, remedy: str) -> None:
        self.backend, self.reason, self.remedy = backend, reason, remedy
        who = "no backend can" if backend == "any" else f"backend {backend!r} cannot"
        self.args = (f"{who} serve this call: {reason}; {remedy}",)  # not by super(), and pickled, as above

    __reduce__ = InvalidArgument.__reduce__


class CacheFull(RuntimeError):
    """A cache has no room for the new tokens; nothing has been written."""


def no_double_backward() -> Unsupported:
    remedy = "leave out create_graph=True, or call tilewise.attention on gathered tensors"
    return Unsupported("any", "over several ranks there are no gradients of gradients (double backward)", remedy)
