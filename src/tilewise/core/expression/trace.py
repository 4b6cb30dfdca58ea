"""The front end: calls a user's function once on cells, under a mode of torch that sees every operation on tensors.

The function is plain Python with torch operations. The score and the indices are 0-d tensors without memory; whatever
else it touches is a captured tensor. Python decisions on cells have no expression and are refused in words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ...errors import InvalidArgument
from ..private.torch import without_modes
from .arrays import Array, Untraceable, kind_of_dtype, scalar
from .build import as_node, cast
from .lowering import DUNDER, LOWER, SAME_AS
from .node import INPUTS, Node, in_order, load, source
from .text import renumbered

SIGNATURES = {"score_mod": ("s", "b", "h", "q", "k"), "mask_mod": ("b", "h", "q", "k")}
WORDS = {"score_mod": "score_mod(score, b, h, q_idx, kv_idx)", "mask_mod": "mask_mod(b, h, q_idx, kv_idx)"}
# Functions that make tensors of numbers: called as they are.
FACTORIES = ("tensor", "as_tensor", "scalar_tensor", "arange", "zeros", "ones", "full", "eye", "linspace", "empty")
# What says something about a tensor, not its values.
PROPERTIES = ("size", "dim", "numel", "nelement", "ndimension", "stride", "is_floating_point", "is_complex", "__len__",
              "__hash__", "get_device", "is_contiguous", "element_size", "__repr__")  # fmt: skip
READS = ("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__iter__", "tolist",
         "nonzero", "equal", "is_nonzero", "__array__", "numpy")  # fmt: skip
GETTERS = ("T", "mT", "data", "H", "mH")  # attributes that are tensors
PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Trace:
    """What a function computes, and the tensors that it read, in the order of the loads' numbers."""

    root: Node
    tensors: tuple[torch.Tensor, ...]
    made: tuple[bool, ...]  # whether the function made this tensor of numbers itself


def trace(function: Callable[..., Any], name: str) -> Trace:
    """The expression of a `score_mod` or `mask_mod`; `InvalidArgument` with the user's line if it has none."""
    names = SIGNATURES[name]
    mode = _Mode()
    with without_modes():  # of a tracer that records operations, or makes tensors of its own
        cells = [mode.cell(x) for x in names]
    try:
        with without_modes(), mode:
            result = function(*cells)
        node = as_node(result) if isinstance(result, (bool, int, float)) else mode.array(result).node()
    except Untraceable as error:
        want = f"operations that kernels have: {WORDS[name]}"
        raise InvalidArgument(name, mode.where(error), want, error.remedy) from None
    except TypeError as error:
        if "positional argument" in str(error) or "required keyword" in str(error):
            raise InvalidArgument(name, str(error), WORDS[name]) from None
        raise
    if name == "mask_mod" and node.kind == "float":
        raise InvalidArgument(name, "a function that returns floats", f"{WORDS[name]} -> bool", "True = attend")
    root = cast(node, "bool" if name == "mask_mod" else "float")
    used = sorted({int(x.args[0]) for x in in_order(root) if x.op == "load"})  # type: ignore[arg-type]
    root = renumbered(root, {old: new for new, old in enumerate(used)})
    return Trace(root, tuple(mode.captured[n] for n in used), tuple(mode.made[n] for n in used))


class _Mode(TorchFunctionMode):
    """Lowers each torch function as it is called. Tensors stand for the arrays in `arrays`, by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: dict[int, Array] = {}
        self.kept: list[torch.Tensor] = []  # so that identities stay unique
        self.captured: list[torch.Tensor] = []
        self.made: list[bool] = []
        self.factory: set[int] = set()  # tensors that the function made
        self.line = ""

    def cell(self, name: str) -> torch.Tensor:
        dtype = torch.float32 if INPUTS[name] == "float" else torch.int32
        return self.tensor(scalar(source(name), dtype))

    def tensor(self, array: Array) -> torch.Tensor:
        """A tensor without memory that stands for an array."""
        x = torch.empty(array.shape, dtype=array.dtype, device="meta")
        self.arrays[id(x)] = array
        self.kept.append(x)
        return x

    def array(self, x: Any) -> Array:
        if not isinstance(x, torch.Tensor):
            raise Untraceable(f"a {type(x).__name__} as the result", "return a tensor")
        if (known := self.arrays.get(id(x))) is not None:
            return known
        return self.capture(x)

    def capture(self, x: torch.Tensor) -> Array:
        """A tensor that the function reads: the next number."""
        if x.layout is not torch.strided or x.is_nested or x.is_quantized:
            raise Untraceable(f"a captured tensor of layout {x.layout}", "a plain tensor")
        kind = kind_of_dtype(x.dtype)
        own = id(x) in self.factory
        if own and x.ndim == 0:
            value = x.item()
            array = scalar(cast(value, kind), x.dtype)
        else:
            number = len(self.captured)
            self.captured.append(x)
            self.made.append(own)
            array = Array(tuple(x.shape), x.dtype, lambda indices: load(number, indices, kind))
        self.arrays[id(x)] = array
        self.kept.append(x)
        return array

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            attribute = getattr(func.__self__, "__name__", "")
            if attribute not in GETTERS:
                return func(*args, **kwargs)
            name = "detach" if attribute == "data" else attribute
        elif name in PROPERTIES:
            return func(*args, **kwargs)
        if name in READS:
            self.refuse(f"a value read by Python ({name.strip('_')})", _reads(name))
        name = DUNDER.get(name, name.strip("_")) if name.startswith("__") else name.removeprefix("special_")
        if name.endswith("_") or name in ("setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior", "set_data"):
            self.refuse(f"{name.rstrip('_')} in place", "give the result a name of its own")
        if name in FACTORIES and not _tensors(args):
            x = func(*args, **kwargs)
            self.factory.add(id(x))
            self.kept.append(x)
            return x
        lower = LOWER.get(SAME_AS.get(name, name))
        if lower is None:
            return self.refuse(f"torch.{name}", "")
        kwargs.pop("out", None)
        try:
            return self.tensor(lower(*map(self.lowered, args), **{k: self.lowered(x) for k, x in kwargs.items()}))
        except Untraceable as error:
            self.line = self.line or user_line()
            raise error
        except TypeError as error:  # an argument that the lowering does not have
            self.refuse(f"torch.{name} in this form ({error})", "")

    def lowered(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self.array(x)
        if isinstance(x, (tuple, list)) and any(isinstance(y, torch.Tensor) for y in x):
            return type(x)(map(self.lowered, x))
        return x.item() if isinstance(x, np.generic) else x

    def refuse(self, what: str, remedy: str) -> Any:
        self.line = user_line()
        raise Untraceable(what, remedy)

    def where(self, error: Untraceable) -> str:
        return f"{error.what}{f' at {self.line}' if self.line else ''}"


def _tensors(args: Any) -> bool:
    return any(isinstance(x, torch.Tensor) or (isinstance(x, (tuple, list)) and _tensors(x)) for x in args)


def _reads(name: str) -> str:
    if name == "__bool__":
        return "torch.where(condition, x, y) in place of `if`, & | ~ in place of and, or, not, torch.maximum of max"
    return "a function of indices and scores is compiled, not called for each cell: torch's functions, not Python's"


def user_line() -> str:
    """Where in the user's file the operation stands that is being traced."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        module = frame.f_globals.get("__name__", "")
        if not (module == "torch" or module.startswith(("torch.", "tilewise.core.expression"))):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
