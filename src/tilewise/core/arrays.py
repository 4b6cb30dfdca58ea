"""NumPy, JAX and other DLPack arrays in, the same kind out; torch tensors pass untouched."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.compiler import is_compiling

from ..errors import InvalidArgument
from .private.torch import is_functional
from .tracing import is_traced, is_transformed, is_wrapper, refuse_tangent

_BITS = {"bfloat16": ("int16", torch.bfloat16), "float8_e4m3fn": ("int8", torch.float8_e4m3fn)}


def to_tensor(name: str, x: Any) -> torch.Tensor:
    """`x` as a torch tensor over the same memory, or a copy if it is a negated view (`x.is_neg()`)."""
    if isinstance(x, torch.Tensor):
        return x if is_compiling() or is_wrapper(x) else _strided(name, x)
    if _is_numpy(x):
        return _from_numpy(name, x)
    library = _library(x)
    if library == "jax" and isinstance(x, sys.modules["jax"].core.Tracer):
        remedy = "inside jax.jit call tilewise through jax.pure_callback (docs/integrations/arrays.md); jax.grad cannot"
        raise InvalidArgument(name, "a JAX tracer", "a concrete array", remedy)
    if type(x).__module__.startswith("torch.fx"):  # a Proxy
        remedy = "torch.fx.wrap the function that calls tilewise, or trace by make_fx or torch.export"
        raise InvalidArgument(name, type(x).__name__, "a torch tensor", remedy)
    if hasattr(x, "__dlpack__"):
        if _runs_backwards(x):  # torch would end the process
            raise InvalidArgument(name, f"strides {x.strides}", "none below 0", "hand in a contiguous copy")
        return torch.utils.dlpack.from_dlpack(x)
    remedy = f"torch.tensor({name})" if isinstance(x, (list, tuple)) else ""
    raise InvalidArgument(name, type(x).__name__, "a torch tensor, a NumPy array or an object with __dlpack__", remedy)


def to_write(name: str, x: Any) -> torch.Tensor:
    """The same for what is written: it must be the caller's own memory, not a copy."""
    if getattr(getattr(x, "flags", None), "writeable", True) is False:
        raise InvalidArgument(name, "a read-only array", "one that can be written")
    if _library(x) in ("jax", "jaxlib"):
        raise InvalidArgument(name, "a JAX array", "one that can be written", "leave it out: JAX arrays are immutable")
    if _is_numpy(x) and _runs_backwards(x):
        raise InvalidArgument(name, f"an array with strides {x.strides}", "none below 0: torch cannot write there")
    found = to_tensor(name, x)
    if isinstance(x, torch.Tensor) and found is not x:
        raise InvalidArgument(
            name, "a lazily negated tensor (is_neg())", "one that can be written", f"{name}.resolve_neg()"
        )
    return found


def with_memory(name: str, x: Any) -> torch.Tensor:
    """As `to_tensor`, for memory that is accessed right away and not by a torch operator: wrappers are refused too."""
    if not isinstance(x, torch.Tensor) or is_compiling():
        return to_tensor(name, x)
    if is_transformed():
        remedy = "call it without torch.vmap and torch.func around it; gradients: .backward() or torch.autograd.grad"
        raise InvalidArgument(name, "a tensor inside a torch.func transform", "one outside it", remedy)
    return _strided(name, x)


def _strided(name: str, x: torch.Tensor) -> torch.Tensor:
    """Refuses a tensor whose elements are not at its address and strides: nested, sparse, subclassed, functional."""
    kind = type(x)
    if x.is_nested:
        remedy = "varlen_attention takes x.values() and x.offsets() of a jagged one"
        raise InvalidArgument(name, "a nested tensor", "a strided one", remedy)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        remedy = "hand in x.as_subclass(torch.Tensor), if it holds plain numbers"
        if kind.__name__ == "DTensor":
            remedy = "hand in x.to_local(), or call tilewise.distributed.register_sharding_rules() first"
        raise InvalidArgument(name, f"a {kind.__name__}", "a plain torch.Tensor", remedy)
    if x.layout is not torch.strided:
        raise InvalidArgument(name, f"a tensor of layout {x.layout}", "a strided one", "hand in x.to_dense()")
    if is_functional(x) and not is_traced():
        raise InvalidArgument(name, "a functional tensor outside its transform", "a tensor with memory")
    refuse_tangent(name, x)
    return x.resolve_neg() if x.is_neg() else x


def converter_back(like: Any) -> Callable[[torch.Tensor], Any]:
    """A function that turns a result tensor into the kind of array that `like` is."""
    if isinstance(like, torch.Tensor):
        return lambda x: x
    if _is_numpy(like):
        return _to_numpy
    library = like.__array_namespace__() if hasattr(like, "__array_namespace__") else sys.modules[_library(like)]
    if not hasattr(library, "from_dlpack"):
        remedy = "hand in torch.from_dlpack(q) instead"
        raise InvalidArgument("q", f"a {type(like).__name__}", "an array whose library has from_dlpack", remedy)
    return lambda x: library.from_dlpack(x.contiguous())


def _library(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _is_numpy(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.generic))


def _runs_backwards(x: Any) -> bool:
    strides = getattr(x, "strides", None)
    return isinstance(strides, (tuple, list)) and any(stride < 0 for stride in strides)


def _from_numpy(name: str, x: Any) -> torch.Tensor:
    if not isinstance(x, np.ndarray):  # one number, of a type of its own
        raise InvalidArgument(name, repr(x), "a torch tensor, a NumPy array or an object with __dlpack__")
    if type(x) is not np.ndarray:  # a memory map, say: its numbers as they lie
        if np.ma.isMaskedArray(x):
            remedy = "pass x.data, and ~x.mask as mask= (True = attend)"
            raise InvalidArgument(name, "a masked array", "a plain one", remedy)
        x = np.asarray(x)
    if x.dtype.name in _BITS:  # of ml_dtypes: torch knows the bits, not the name
        as_bits, dtype = _BITS[x.dtype.name]
        return _from_numpy(name, x.view(as_bits)).view(dtype)
    if _runs_backwards(x):
        x = x.copy()  # torch has no negative strides; of a dim of 1 ascontiguousarray would leave them
    try:
        return torch.from_numpy(x if x.flags.writeable else np.asarray(_Writable(x)))
    except (TypeError, ValueError) as error:  # objects, text, longdouble, another machine's byte order
        raise InvalidArgument(name, f"a NumPy array of {x.dtype!r}", "one that torch can read", str(error)) from error


class _Writable:
    """Presents a read-only array as writable: torch warns of read-only ones, and inputs are never written."""

    def __init__(self, x: Any) -> None:
        self.kept = x
        self.__array_interface__ = {**x.__array_interface__, "data": (x.ctypes.data, False)}


def _to_numpy(x: torch.Tensor) -> Any:
    if x.dtype == torch.bfloat16:
        import ml_dtypes

        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()
