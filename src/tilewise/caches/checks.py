"""What both caches check alike: new rows, counts, queries."""

from __future__ import annotations

from operator import index as as_int
from typing import Any

import numpy as np
import torch

from ..arrays import to_tensor
from ..checker import FLOATS
from ..errors import InvalidArgument
from ..options import is_int
from .formats import Format


def rows(name: str, x: Any, heads: int, fmt: Format, device: torch.device, packed: bool) -> torch.Tensor:
    """New keys or values in the form `[B, Hkv, L, D]`, or `[1, Hkv, T, D]` of packed ones."""
    x = to_tensor(name, x)
    form = "[T, Hkv, D]" if packed else "[B, Hkv, L, D]"
    if x.ndim != (3 if packed else 4):
        raise InvalidArgument(name, f"shape {tuple(x.shape)}", form)
    if packed:
        x = x.transpose(0, 1)[None]
    if x.shape[1] != heads or x.shape[3] != fmt.width:
        given = f"{x.shape[1]} heads of {x.shape[3]}"
        raise InvalidArgument(name, given, f"{heads} heads of {fmt.width}, in the form {form}")
    if x.dtype not in FLOATS:
        raise InvalidArgument(name, x.dtype, "float32, float16 or bfloat16")
    if x.device != device:
        raise InvalidArgument(name, f"device {x.device}", f"{device}, where the cache is")
    x = x.detach()
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def same_rows(k: torch.Tensor, v: torch.Tensor) -> None:
    if k.shape[:3] != v.shape[:3]:
        given, want = (tuple(x.shape[:3]) for x in (v, k))
        raise InvalidArgument("v", f"(batch, heads, rows) = {given}", f"{want}, as k")


def counts(name: str, given: Any, batch: int, most: int | None = None) -> np.ndarray:
    """New tokens of each sequence, or one number for all, as int64 `[batch]`."""
    if is_int(given) and given >= 0 and (most is None or given <= most):
        return np.full(batch, given, dtype=np.int64)
    if is_int(given):
        given = [given] * batch
    if isinstance(given, torch.Tensor):
        given = given.cpu().numpy()
    values = np.asarray(given)
    if values.shape != (batch,) or (values.size and values.dtype.kind not in "iu"):
        raise InvalidArgument(name, f"{values.dtype} of shape {values.shape}", f"ints, one for each of {batch} rows")
    values = values.astype(np.int64)
    if batch and (values.min() < 0 or (most is not None and values.max() > most)):
        bad = int(np.argmax((values < 0) | (values > (most if most is not None else values.max()))))
        limit = "0 or more" if most is None else f"0 to {most}, the rows that were given"
        raise InvalidArgument(f"{name}[{bad}]", int(values[bad]), limit)
    return values


def index(name: str, value: Any, size: int, what: str) -> int:
    if not is_int(value) or not 0 <= value < size:
        raise InvalidArgument(name, repr(value), f"a {what}, 0 to {size - 1}")
    return int(value)


def evenly(name: str, x: Any, batch: int, dim: int = 2) -> int:
    """Tokens of each sequence if they all have as many: `[B, Hkv, L, D]` or packed `[T, Hkv, D]`."""
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) == 3:
        if batch == 0 or shape[0] % batch:
            remedy = "give counts"
            raise InvalidArgument(name, f"{shape[0]} packed rows", f"as many for each of {batch} sequences", remedy)
        return int(shape[0]) // batch
    if len(shape) != 4 or shape[0] != batch:
        raise InvalidArgument(name, f"shape {shape}", f"rank 4 with {batch} rows, one for each sequence, or packed")
    return int(shape[dim])


def token_ids(tokens: Any) -> np.ndarray:
    """Token ids as int64 `[n]`."""
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.cpu().numpy()
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidArgument("tokens", f"{ids.dtype} of shape {ids.shape}", "token ids, ints in one dim")
    return ids.astype(np.int64)


def sequence_ids(sequences: Any) -> list[int]:
    """An id or several, as a list."""
    try:
        if hasattr(sequences, "tolist"):
            sequences = sequences.tolist()
        return [as_int(sequences)] if hasattr(sequences, "__index__") else [as_int(number) for number in sequences]
    except TypeError:
        raise InvalidArgument("sequences", repr(sequences), "an id or a list of ids") from None
