"""Functions that `torch.compile` does not trace: the graph breaks there, and they run eagerly.

A cache keeps its lengths and tables in NumPy and changes them at every step. Traced, each length would make another
graph, and the first use of a Numba loop would be traced too. This is `torch.compiler.disable` without its imports,
which take a second.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

from .private.torch import mark_eager

Class = TypeVar("Class", bound=type)
REASON = (
    "a tilewise cache keeps its lengths in Python: torch.compile breaks the graph at its methods, "
    "and fails with fullgraph=True"
)


def eager(cls: Class) -> Class:
    """Class decorator: public methods and properties, and all that they call, run eagerly."""
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and isinstance(function, FunctionType):
            eager_function(function)
    return cls


def eager_function(function: Any, reason: str = REASON) -> Any:
    """The function, and all that it calls, runs eagerly."""
    mark_eager(function, reason)
    return function
