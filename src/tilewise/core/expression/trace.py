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
from .build import RANK, as_node, cast
from .lowering import LOWER, as_dtype
from .node import INPUTS, Node, in_order, load, source
from .text import renumbered
from .torch_names import DUNDER, IN_PLACE, SAME_AS
from .views import VIEWS

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
OUTSIDE = "compute it before, and capture the result: it depends on no score and no index"
# What may give a tensor in the memory of another, beside `VIEWS`: neither of the two can then be written in place.
SAME_MEMORY = {"bfloat16", "bool", "contiguous", "cpu", "cuda", "detach", "double", "float", "half", "int", "long",
               "positive", "pos", "to", "type", "type_as"}  # fmt: skip


@dataclass(frozen=True)
class Trace:
    """What a function computes, and the tensors that it read, in the order of the loads' numbers."""

    root: Node
    tensors: tuple[torch.Tensor, ...]
    made: tuple[bool, ...]  # whether the function made this tensor of numbers itself
    detached: tuple[bool, ...]  # whether it detached it: no gradient comes from these loads


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
    captured, made, detached = (tuple(x[n] for n in used) for x in (mode.captured, mode.made, mode.detached))
    return Trace(root, captured, made, detached)  # type: ignore[arg-type]


class _Mode(TorchFunctionMode):
    """Lowers each torch function as it is called. Tensors stand for the arrays in `arrays`, by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: dict[int, Array] = {}
        self.kept: list[torch.Tensor] = []  # so that identities stay unique
        self.captured: list[torch.Tensor] = []
        self.made: list[bool] = []
        self.detached: list[bool] = []
        self.factory: set[int] = set()  # tensors that the function made
        self.views: set[int] = set()  # tensors that may share memory
        self.of_cells: set[int] = set()  # tensors that depend on the score or an index
        self.line = ""

    def cell(self, name: str) -> torch.Tensor:
        dtype = torch.float32 if INPUTS[name] == "float" else torch.int32
        cell = self.tensor(scalar(source(name), dtype))
        self.of_cells.add(id(cell))
        return cell

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

    def capture(self, x: torch.Tensor, detached: bool = False) -> Array:
        """A tensor that the function reads: the next number. A detached one is another tensor."""
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
            self.detached.append(detached)
            array = Array(tuple(x.shape), x.dtype, lambda indices: load(number, indices, kind))
        if not detached:
            self.arrays[id(x)] = array
        self.kept.append(x)
        return array

    def detach(self, x: torch.Tensor) -> torch.Tensor:
        array = self.array(x)
        if array.kind != "float" or id(x) in self.factory:
            return self.tensor(array)
        if not any(x is y for y in self.captured):
            self.refuse("detach() of a result", "detach the captured tensor itself, before it is indexed")
        return self.tensor(self.capture(x, detached=True))

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
        tensors = _tensors((args, tuple(kwargs.values())))
        outside = "" if not tensors or any(id(x) in self.of_cells for x in tensors) else OUTSIDE
        if name in READS:
            self.refuse(f"a value read by Python ({name.strip('_')})", outside or _reads(name))
        name = DUNDER.get(name, name.strip("_")) if name.startswith("__") else name.removeprefix("special_")
        in_place = IN_PLACE.get(name, name[:-1] if name.endswith("_") else "")
        if name in ("setitem", "set_data"):
            self.refuse(f"{name} in place", "assign the result to a new name")
        name = in_place or name
        if name == "new_tensor":
            name, args, kwargs = "tensor", args[1:], {"dtype": args[0].dtype, **kwargs}
            func, tensors = torch.tensor, _tensors(args)
        if name in FACTORIES and not tensors:
            if torch.device(kwargs.get("device") or "cpu").type in (
                "cpu",
                "meta",
            ):  # meta: that of the cells, or a default
                kwargs = {**kwargs, "device": "cpu"}
            x = func(*args, **kwargs)
            self.factory.add(id(x))
            self.kept.append(x)
            return x
        lower = LOWER.get(SAME_AS.get(name, name))
        if name.endswith("set_grad_enabled"):
            self.refuse("torch.no_grad", "detach() the captured tensor")
        if lower is None:
            return self.refuse(f"torch.{name}", outside)
        kwargs.pop("out", None)
        try:
            if name == "detach":
                return self.detach(args[0])
            array = lower(*map(self.lowered, args), **{k: self.lowered(x) for k, x in kwargs.items()})
            made = self.written(args[0], array) if in_place else self.tensor(array)
        except Untraceable as error:
            self.line = self.line or user_line()
            error.remedy = outside or error.remedy
            raise error
        except TypeError as error:  # an argument that the lowering does not have
            return self.refuse(f"torch.{name} in this form ({error})", outside)
        if any(id(x) in self.of_cells for x in tensors):
            self.of_cells.add(id(made))
            self.factory.discard(id(made))
        if name in VIEWS or name in SAME_MEMORY:
            self.views.update(id(x) for x in (made, *tensors))
        return made

    def written(self, x: torch.Tensor, array: Array) -> torch.Tensor:
        """A result that an operation writes in place: the tensor stands for another array from here on."""
        own = self.array(x) if id(x) in self.factory else self.arrays.get(id(x))
        captured = own is None or any(x is y for y in self.captured)
        if own is None or captured or id(x) in self.views or own.shape or array.shape:
            self.refuse("a result in place, in a captured tensor or a view", "assign the result to a new name")
        assert own is not None
        if RANK[kind_of_dtype(array.dtype)] > RANK[own.kind]:
            self.refuse(f"a result of {array.dtype} in place of {own.dtype}", "assign the result to a new name")
        self.arrays[id(x)] = as_dtype(array, own.dtype)
        return x

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


def _tensors(args: Any) -> list[torch.Tensor]:
    """The tensors among arguments, also in lists of them."""
    found: list[torch.Tensor] = []
    for x in args:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (tuple, list)):
            found += _tensors(x)
    return found


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
