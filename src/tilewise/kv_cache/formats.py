"""How a cache stores rows of K or V: plain floats, or few bits with scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from ..core.problem import MAX_HEAD_DIM
from ..core.storage import FORMATS, StorageFormat, as_bytes, short_name, stored_as
from ..errors import InvalidArgument
from ..quantised import Quantised, as_group
from .integers import integer

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Format:
    """A row of `width` elements in the storage format `name`, in groups of `group` if it is a quantised one.

    >>> Format.of("dtype", "int4", 32, 128).bytes
    80
    """

    name: str
    width: int
    group: int = 0

    @classmethod
    def of(cls, argument: str, dtype: Any, group: Any, width: int) -> Format:
        """What a user asks for by a name or a torch dtype; None is torch's default."""
        if dtype is None:
            dtype = torch.get_default_dtype()
            dtype = torch.float32 if dtype == torch.float64 else dtype
        name = short_name(dtype)
        if not isinstance(name, str) or name not in FORMATS:
            raise InvalidArgument(argument, repr(dtype), f"one of {', '.join(FORMATS)} or their dtype")
        stored = stored_as(name, as_group(group))
        if width % stored.packing:
            given, remedy = f"{name!r} of {width} elements", "use 'int8'"
            raise InvalidArgument(argument, given, f"an even head dim for {name}", remedy)
        return cls(name, width, stored.group)

    @property
    def storage(self) -> StorageFormat:
        return stored_as(self.name, self.group)

    @property
    def is_quantised(self) -> bool:
        return self.group > 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the data."""
        return self.storage.dtype

    @property
    def columns(self) -> int:
        """Elements of data in a row."""
        return self.storage.columns(self.width)

    @property
    def scales(self) -> int:
        """Scales of a row."""
        return self.storage.scales(self.width)

    @property
    def bytes(self) -> int:
        """Of a row, scales included."""
        return self.columns * self.dtype.itemsize + 4 * self.scales

    def empty(self, *rows: int, device: torch.device) -> Store:
        """Room for `rows` of rows. Quantised data is not touched: its pages of memory come with its use."""
        data = torch.empty(*rows, self.columns, dtype=self.dtype, device=device)
        scales = torch.empty(*rows, self.scales, dtype=torch.float32, device=device) if self.is_quantised else None
        return Store(self, data, scales)


@dataclass(frozen=True, slots=True)
class Store:
    """Rows in a format: `data` and, if it is quantised, `scales`, alike in all dims but the last."""

    format: Format
    data: torch.Tensor
    scales: torch.Tensor | None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Store:
        """A view (or a copy) of both, by a function that leaves their last dim alone."""
        return Store(self.format, change(self.data), None if self.scales is None else change(self.scales))

    def operand(self) -> torch.Tensor | Quantised:
        """What stands for K, V or pages in a call of `attention`."""
        if self.scales is None:
            return self.data
        return Quantised(self.data, self.scales, self.format.name, self.format.group)  # type: ignore[arg-type]

    def floats(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """All of it at full width: for looking at it."""
        return self.format.storage.dequantise(self.data, self.scales, dtype)

    def assign(self, index: Any, x: torch.Tensor) -> None:
        """Stores `x` `[..., width]` where `index` says, in plain torch: for devices that have no kernel."""
        self.data[index], scales = self.format.storage.quantise(x)
        if self.scales is not None and scales is not None:
            self.scales[index] = scales

    def copy(self, index: Any, source: Any) -> None:
        """Rows `source` to `index`, as they are stored."""
        for x in (self.data, self.scales):
            if x is not None:
                bits = as_bytes(x)
                bits[index] = bits[source]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


def size(argument: str, value: Any, least: int = 1, most: int = 2**31 - 1) -> int:
    """A whole number from `least` on; kernels count in int32."""
    number = integer(value)
    if number is None or not least <= number <= most:
        # Python writes no int of thousands of digits.
        given = repr(value) if number is None or number.bit_length() <= 64 else f"an int of {number.bit_length()} bits"
        raise InvalidArgument(argument, given, f"an int, {least} to {most}")
    return number


def room(make: Callable[[], Made], **sizes: int) -> Made:
    """What `make` allocates in the host's memory, if there is any; a GPU's own error passes."""
    try:
        return make()
    except torch.OutOfMemoryError:
        raise
    except (MemoryError, RuntimeError, OverflowError, ValueError) as error:
        given = " x ".join(map(str, sizes.values()))
        raise InvalidArgument(" x ".join(sizes), given, "sizes that memory can be had for", str(error)) from error


def flag(argument: str, value: Any) -> bool:
    """True or False: a text or a number is more likely a mistake."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(argument, repr(value), "True or False")
    return bool(value)


def described(cache: Any, **facts: Any) -> str:
    """What `repr` of a cache says: its sizes, how it stores, what it holds."""
    k, v = cache.k_format, cache.v_format
    facts |= {"kv_heads": cache.kv_heads, "head_dim": k.width}
    facts |= {"value_dim": v.width} if v.width != k.width else {}
    facts |= {"dtype": repr(k.name)} | ({"v_dtype": repr(v.name)} if v.name != k.name else {})
    facts |= {"group": k.group or v.group} if k.group or v.group else {}
    facts |= {"rotate": True} if cache.rotate else {}
    facts |= {"device": repr(str(cache.device)), "nbytes": cache.nbytes}
    return f"{type(cache).__name__}({', '.join(f'{name}={value}' for name, value in facts.items())})"


def head_width(argument: str, value: Any) -> int:
    return size(argument, value, 1, MAX_HEAD_DIM)


def formats_of(head_dim: Any, value_dim: Any, dtype: Any, v_dtype: Any, group: Any) -> tuple[Format, Format]:
    """K's and V's, from the arguments that both caches have."""
    width = head_width("head_dim", head_dim)
    value_width = width if value_dim is None else head_width("value_dim", value_dim)
    k = Format.of("dtype", dtype, group, width)
    return k, Format.of("v_dtype", dtype if v_dtype is None else v_dtype, group, value_width)
