"""NumPy, JAX and other DLPack arrays in, the same kind out; torch tensors pass untouched."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from .errors import InvalidArgument

_BITS = {"bfloat16": ("int16", torch.bfloat16), "float8_e4m3fn": ("int8", torch.float8_e4m3fn)}


def to_tensor(name: str, x: Any) -> torch.Tensor:
    """`x` as a torch tensor over the same memory."""
    if isinstance(x, torch.Tensor):
        return x
    if _is_numpy(x):
        return _from_numpy(x)
    if hasattr(x, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(x)
    raise InvalidArgument(name, type(x).__name__, "a torch tensor, a NumPy array or an object with __dlpack__")


def returner(like: Any) -> Callable[[torch.Tensor], Any]:
    """What turns a result into an array of the kind of `like`."""
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
    return type(x).__module__ == "numpy" and hasattr(x, "ndim")


def _from_numpy(x: Any) -> torch.Tensor:
    import numpy as np

    if x.dtype.name in _BITS:  # of ml_dtypes: torch knows the bits, not the name
        as_bits, dtype = _BITS[x.dtype.name]
        return _from_numpy(x.view(as_bits)).view(dtype)
    if any(stride < 0 for stride in x.strides):
        x = np.ascontiguousarray(x)  # torch has no negative strides
    return torch.from_numpy(x if x.flags.writeable else np.asarray(_Writable(x)))


class _Writable:
    """A read-only array that does not say so: torch warns of those, but inputs are only read."""

    def __init__(self, x: Any) -> None:
        self.kept = x
        self.__array_interface__ = {**x.__array_interface__, "data": (x.ctypes.data, False)}


def _to_numpy(x: torch.Tensor) -> Any:
    if x.dtype == torch.bfloat16:
        import ml_dtypes

        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()
