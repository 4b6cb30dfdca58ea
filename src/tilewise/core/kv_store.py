"""Rows of K and V in a cache: their storage format, their memory, and the slots that new rows go to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidArgument
from .storage import FORMATS, StorageFormat, as_bytes, as_group, short_name, stored_as


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The format of a row: `width` elements stored as `name`, with a scale for each `group` of them if it is quantised.

    >>> RowFormat.of("dtype", "int4", 32, 128).bytes
    80
    """

    name: str
    width: int
    group: int = 0

    @classmethod
    def of(cls, argument: str, dtype: Any, group: Any, width: int) -> RowFormat:
        """The format for a name or a torch dtype; None is torch's default dtype."""
        if dtype is None:
            dtype = torch.get_default_dtype()
            dtype = torch.float32 if dtype == torch.float64 else dtype
        name = short_name(dtype)
        if not isinstance(name, str) or name not in FORMATS:
            raise InvalidArgument(argument, repr(dtype), f"one of {', '.join(FORMATS)} or their dtype")
        stored = stored_as(name, as_group(group))
        if wanted := stored.wants(width):
            raise InvalidArgument(argument, f"{name!r} of {width} elements", wanted, "use 'int8'")
        return cls(name, width, stored.group)

    @property
    def storage(self) -> StorageFormat:
        return stored_as(self.name, self.group)

    @property
    def is_quantised(self) -> bool:
        return self.group > 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `Store.data`."""
        return self.storage.dtype

    @property
    def columns(self) -> int:
        """Stored numbers in a row."""
        return self.storage.columns(self.width)

    @property
    def scales(self) -> int:
        """Scales in a row."""
        return self.storage.scales(self.width)

    @property
    def bytes(self) -> int:
        """Bytes of a row, scales included."""
        return self.columns * self.dtype.itemsize + 4 * self.scales

    def empty(self, *rows: int, device: torch.device) -> Store:
        """Uninitialised memory for rows of shape `rows`. Nothing is written, so the OS maps its pages on first use."""
        data = torch.empty(*rows, self.columns, dtype=self.dtype, device=device)
        scales = torch.empty(*rows, self.scales, dtype=torch.float32, device=device) if self.scales else None
        return Store(self, data, scales)


@dataclass(frozen=True, slots=True)
class Store:
    """Rows in a format: `data` and, if quantised, `scales`, equal in all dims but the last."""

    format: RowFormat
    data: torch.Tensor
    scales: torch.Tensor | None
    inside: bool = False  # a view of the first columns of another store (V in K), written with it

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Store:
        """Applies a function that keeps the last dim to data and scales."""
        scales = None if self.scales is None else change(self.scales)
        return Store(self.format, change(self.data), scales, self.inside)

    def first(self, fmt: RowFormat) -> Store:
        """The first elements of each row, in the same memory: V of latent attention."""
        scales = None if self.scales is None else self.scales[..., : fmt.scales]
        return Store(fmt, self.data[..., : fmt.columns], scales, inside=True)

    def floats(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """All rows, dequantised: for inspection."""
        return self.format.storage.dequantise(self.data, self.scales, dtype)

    def assign(self, index: Any, x: torch.Tensor) -> None:
        """Stores `x` `[..., width]` at `index`, in plain torch: for devices without a kernel."""
        self.data[index], scales = self.format.storage.quantise(x)
        if self.scales is not None and scales is not None:
            self.scales[index] = scales

    def copy(self, index: Any, source: Any) -> None:
        """Copies rows `source` to rows `index`, bit by bit."""
        for x in (self.data, self.scales):
            if x is not None:
                bits = as_bytes(x)
                bits[index] = bits[source]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


@dataclass(slots=True)
class WriteSlots:
    """Where new tokens are stored: token i of sequence b goes to position `starts[b] + i`."""

    starts: torch.Tensor  # int32 [B]
    cu: torch.Tensor  # int32 [B + 1]: cumulative numbers of new tokens, as `cu_seqlens`
    tokens: int  # new tokens in all; with `padded` an upper bound: those past `cu[-1]` are padding, and are not stored
    packed: bool  # new rows are [1, Hkv, T, D], sequence b's from cu[b] on; else [B, Hkv, L, D]
    table: torch.Tensor | None = None  # int32 [B, pages]
    padded: bool = False


# Stores new rows of K and V, [B or 1, Hkv, L or T, D] each
Writer = Callable[[torch.Tensor, torch.Tensor, WriteSlots], None]
