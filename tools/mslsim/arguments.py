"""What a call hands to a kernel: tensors as the memory they span, numbers as bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

MAX_BYTES = 4096  # of a number or list: what Metal's setBytes takes
_INTEGERS: dict[str, type[np.signedinteger[Any] | np.unsignedinteger[Any]]] = {
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
}


@dataclass
class Memory:
    """Bytes of a tensor from its first element to its last, or of numbers (then `kept` owns them)."""

    address: int
    bytes: int
    phase: int  # the address modulo 256 that it would have on the device
    kept: Any
    numel: int | None = None  # of a tensor


def _span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Bytes from the first element to the end of the last; strides in bytes."""
    if 0 in shape:
        return 0
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + itemsize


def of_tensor(x: torch.Tensor | np.ndarray) -> Memory:
    if isinstance(x, torch.Tensor):
        if x.device.type != "cpu":
            raise RuntimeError(f"the simulator takes tensors on the CPU, not on {x.device}")
        size = x.element_size()
        extent = _span(tuple(x.shape), tuple(s * size for s in x.stride()), size)
        return Memory(x.data_ptr(), extent, int(x.storage_offset()) * size % 256, x, x.numel())
    if min(x.strides, default=0) < 0:
        raise RuntimeError("an array with negative strides has no place in a tensor of torch's")
    return Memory(x.ctypes.data, _span(x.shape, x.strides, x.itemsize), x.ctypes.data % 16, x, x.size)


def _numbers(index: int, values: list[Any], cast: str | None) -> np.ndarray:
    kind = int if isinstance(values[0], int) else float
    if not isinstance(values[0], int | float) or not all(isinstance(v, int | kind) for v in values):
        raise RuntimeError(f"argument {index}: {values!r:.80} is not a list of ints or of floats")
    if cast is None:
        return np.array(values, np.int64 if kind is int else np.float32)
    if cast in ("fp16", "bf16"):
        dtype = torch.float16 if cast == "fp16" else torch.bfloat16
        return torch.tensor(values, dtype=dtype).view(torch.int16).numpy()
    if cast not in _INTEGERS:
        raise RuntimeError(f"argument {index}: the cast {cast!r} is none of fp16, bf16, {', '.join(_INTEGERS)}")
    limits = np.iinfo(_INTEGERS[cast])
    for v in values:
        if not limits.min <= int(v) <= limits.max:  # torch would cut it without a word
            raise OverflowError(f"argument {index}: {v} does not fit {cast}")
    return np.array([int(v) for v in values], _INTEGERS[cast])


def of(index: int, x: Any, casts: str | Mapping[int, str] | None) -> Memory:
    """As torch.mps.compile_shader binds it: ints are int64 and floats float32 unless cast."""
    if isinstance(x, torch.Tensor | np.ndarray):
        return of_tensor(x)
    if isinstance(x, list | tuple):
        values = list(x)
        if not values:
            raise RuntimeError(f"argument {index}: an empty list cannot be an argument of a kernel")
    elif isinstance(x, int | float):
        values = [x]
    else:
        raise RuntimeError(f"argument {index}: {type(x).__name__} is neither a tensor, a number nor a list of numbers")
    if casts is not None and not isinstance(casts, str | Mapping):
        raise RuntimeError(f"arg_casts: wanted a string or a dict, got {type(casts).__name__}")
    array = _numbers(index, values, casts if isinstance(casts, str) or casts is None else casts.get(index))
    if array.nbytes > MAX_BYTES:
        raise RuntimeError(
            f"argument {index}: {array.nbytes} bytes of numbers, more than Metal's {MAX_BYTES}; use a tensor"
        )
    return Memory(array.ctypes.data, array.nbytes, 0, array)
