"""Functions that `torch.compile` does not trace: the graph breaks there, and they run eagerly.

A cache keeps its lengths and tables in NumPy and changes them at every step. Traced, each length would make another
graph, and the first use of a Numba loop would be traced too. This is `torch.compiler.disable` without its imports,
which take a second.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound=type)
REASON = "a tilewise cache keeps its lengths in Python: its methods run outside graphs, and not with fullgraph=True"


def eager(cls: Class) -> Class:
    """Class decorator: public methods and properties, and all that they call, run eagerly."""
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and isinstance(function, FunctionType):
            eager_function(function)
    return cls


def eager_function(function: Any, reason: str = REASON) -> Any:
    """The function, and all that it calls, runs eagerly."""
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason  # not inlined into a caller's graph
    if _skip is not None:  # nor traced by itself after the graph break
        _skip(function.__code__)
    return function


def _skipper() -> Callable[[CodeType], None] | None:
    """A function that makes Dynamo skip a code object and all that it calls; None if this torch cannot."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not all(hasattr(frames, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")):
        return None
    skip = frames._FrameAction.SKIP
    return lambda code: frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


_skip = _skipper()
