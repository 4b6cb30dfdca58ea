"""Functions that `torch.compile` leaves as they are: it breaks its graph there, and they run as in eager code.

A cache keeps its lengths and tables in NumPy and changes them at every step. Traced, each length would be another
graph, and the first use of a Numba loop would be traced too. `torch.compiler.disable` says the same, but importing what
it needs takes a second, which a program that never compiles should not wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound=type)
REASON = "a tilewise cache keeps its lengths in Python: its methods run outside graphs, and not with fullgraph=True"


def eager(cls: Class) -> Class:
    """All methods and properties of a class that have no leading underscore, and all that they call."""
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and isinstance(function, FunctionType):
            eager_function(function)
    return cls


def eager_function(function: Any, reason: str = REASON) -> Any:
    """One function, and all that it calls."""
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason  # not traced as part of a caller
    if _skip is not None:  # nor by itself, when the caller's graph has ended
        _skip(function.__code__)
    return function


def _skipper() -> Callable[[CodeType], None] | None:
    """What tells torch to run a function and all that it calls as they are; None if this torch has no such thing."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not all(hasattr(frames, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")):
        return None
    skip = frames._FrameAction.SKIP
    return lambda code: frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


_skip = _skipper()
