"""Values of `gluon_sim.py`: numbers, blocks of them and pointers, over NumPy."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np


class SimError(AssertionError):
    """A deadlock, a barrier or a value that is used wrongly."""


def raw(x: Any) -> Any:
    return x.value() if isinstance(x, Tensor) else x


class Tensor:
    """A scalar or an array; int32 wraps as on the device."""

    def __init__(self, a: Any) -> None:
        self.a = np.asarray(a)

    def value(self) -> np.ndarray:
        return self.a

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value().shape

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        if bitcast:
            return Tensor(self.value().view(dtype))
        with np.errstate(all="ignore"):
            return Tensor(self.value().astype(dtype))

    def reshape(self, shape: Any) -> Tensor:
        return Tensor(self.value().reshape(shape))

    def permute(self, dims: Any) -> Tensor:
        return Tensor(self.value().transpose(dims))

    def __getitem__(self, at: Any) -> Tensor:
        return Tensor(self.value()[at])

    def __bool__(self) -> bool:
        return bool(self.value())

    def __index__(self) -> int:
        return int(self.value())

    def __neg__(self) -> Tensor:
        return Tensor(-self.value())


def _quotient(a: Any, b: Any) -> Any:
    """As in C: towards zero."""
    a, b = np.asarray(a), np.asarray(b)
    q = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -q, q).astype(np.result_type(a, b))


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "truediv": lambda a, b: a / b,
    "floordiv": _quotient, "mod": lambda a, b: a - _quotient(a, b) * b, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "lshift": lambda a, b: a << b, "rshift": lambda a, b: a >> b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}  # fmt: skip


def typed(x: Any, other: Any) -> np.ndarray:
    """A Python number takes the other's type, as a constant does on the device."""
    if isinstance(x, (int, float)) and isinstance(other, np.ndarray) and not isinstance(x, bool):
        kind = other.dtype if other.dtype.kind in "iu" and isinstance(x, int) else np.float32
        return np.asarray(x, dtype=kind if other.dtype != bool else np.int32)
    return np.asarray(x)


def _operate(name: str, a: Any, b: Any) -> Any:
    a, b = raw(a), raw(b)
    with np.errstate(all="ignore"):
        return Tensor(OPERATIONS[name](typed(a, b), typed(b, a)))


for _name in OPERATIONS:
    setattr(Tensor, f"__{_name}__", lambda a, b, name=_name: _pointed(name, a, b))
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Tensor, f"__r{_name}__", lambda a, b, name=_name: _pointed(name, b, a))


def _pointed(name: str, a: Any, b: Any) -> Any:
    return b + a if isinstance(b, Pointer) else _operate(name, a, b)


class Pointer:
    """Elements of a flat array, from an offset on."""

    def __init__(self, array: np.ndarray, at: Any = 0) -> None:
        self.array, self.at = array, at

    def __add__(self, n: Any) -> Pointer:
        return Pointer(self.array, raw(self.at) + np.asarray(raw(n)).astype(np.int64))

    __radd__ = __add__

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.array.dtype)

    def __sub__(self, n: Any) -> Pointer:
        return self + -np.asarray(raw(n)).astype(np.int64)

    def load(self, mask: Any = None, other: Any = 0) -> Tensor:
        at = np.asarray(self.at)
        ok = np.broadcast_to(True if mask is None else raw(mask), np.broadcast_shapes(at.shape, np.shape(raw(mask))))
        at = np.broadcast_to(at, ok.shape)
        if ((at[ok] < 0) | (at[ok] >= self.array.size)).any():
            raise SimError("a load outside of its tensor")
        found = self.array[np.where(ok, at, 0)]
        return Tensor(np.where(ok, found, np.asarray(other, dtype=self.array.dtype)))

    def store(self, x: Any, mask: Any = None) -> None:
        shape = np.broadcast_shapes(np.shape(self.at), np.shape(raw(x)), np.shape(raw(mask)))
        ok = np.broadcast_to(True if mask is None else raw(mask), shape)
        at = np.broadcast_to(self.at, shape)[ok]
        if ((at < 0) | (at >= self.array.size)).any():
            raise SimError("a store outside of its tensor")
        self.array[at] = np.broadcast_to(raw(x), shape)[ok]
