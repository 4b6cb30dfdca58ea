"""The errors a caller can meet."""

from __future__ import annotations


class InvalidArgument(ValueError):
    """An argument is wrong: the message names it, what was given, what is expected and, if there is one, the remedy."""

    def __init__(self, argument: str, given: object, expected: str, remedy: str = "") -> None:
        self.argument = argument
        super().__init__(f"{argument}: got {given}, expected {expected}" + (f"; {remedy}" if remedy else ""))


class UnknownKeyword(InvalidArgument, TypeError):
    """A keyword that a function does not have; the message says which was probably meant."""


class Unsupported(NotImplementedError):
    """A backend that was asked for by name cannot serve this call, and nothing else was tried; or ("any") none can."""

    def __init__(self, backend: str, reason: str, remedy: str) -> None:
        self.backend, self.reason, self.remedy = backend, reason, remedy
        who = "no backend can" if backend == "any" else f"backend {backend!r} cannot"
        super().__init__(f"{who} serve this call: {reason}; {remedy}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        """By what it was made of: exceptions cross between processes."""
        return type(self), (self.backend, self.reason, self.remedy)


class CacheFull(RuntimeError):
    """A cache has no room for what was to be appended; nothing has been written."""


def no_double_backward() -> Unsupported:
    remedy = "leave out create_graph=True, or take torch's own attention (its math backend) there"
    return Unsupported("any", "there are no gradients of gradients (double backward)", remedy)
