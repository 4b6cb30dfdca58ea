"""NumPy, JAX and other DLPack arrays in, the same kind out; torch tensors pass untouched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import InvalidArgument


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
    namespace = like.__array_namespace__()
    return lambda x: namespace.from_dlpack(x.contiguous())


def _is_numpy(x: Any) -> bool:
    return type(x).__module__ == "numpy" and hasattr(x, "ndim")


def _from_numpy(x: Any) -> torch.Tensor:
    import numpy as np

    if x.dtype.name == "bfloat16":  # ml_dtypes; torch knows the bits, not the name
        return _from_numpy(x.view(np.int16)).view(torch.bfloat16)
    if any(stride < 0 for stride in x.strides):
        x = np.ascontiguousarray(x)  # torch has no negative strides
    if not x.flags.writeable:  # torch warns of it, but inputs are only read
        x = np.lib.stride_tricks.as_strided(x, writeable=True) if x.flags.owndata else x.copy()
    return torch.from_numpy(x)


def _to_numpy(x: torch.Tensor) -> Any:
    if x.dtype == torch.bfloat16:
        import ml_dtypes

        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()
