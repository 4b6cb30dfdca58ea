"""Quantised K and V: few bits an element, with one scale for each token, head and group of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .core.arrays import to_tensor
from .core.storage import QuantDtype, StorageFormat, as_bytes, as_group, quantised_names, stored_as
from .errors import InvalidArgument


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """A quantised tensor `[..., D]`, to be passed as `k`, `v` or pages.

    The value of element `d` is `data[..., d] * scales[..., d // group]`.

    Args:
        data: int8 or float8_e4m3fn `[..., D]`. For int4, uint8 `[..., D // 2]` with D even: byte `d` holds element `d`
            in its low and element `d + D // 2` in its high four bits, as two's complement. codebook4 has the same
            layout with indices of levels (docs/semantics.md). For fp8_latent, uint8 `[..., 656]` if D = 576, and
            `[..., 528]` for its first 512 elements (docs/caches.md has the layout).
        scales: `[..., ceil(D / group)]`, float32, float16 or bfloat16; None for fp8_latent, whose rows contain them.
        dtype: `"int8"`, `"int4"`, `"codebook4"`, `"fp8_e4m3"` or `"fp8_latent"`.
        group: elements that share a scale: 32, 64 or 128.

    >>> keys = torch.randn(2, 8, 100, 64)
    >>> packed = Quantised.from_float(keys, "int8", group=64)
    >>> bool((packed.dequantise() - keys).abs().max() < 0.03)
    True
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    dtype: QuantDtype
    group: int

    def __post_init__(self) -> None:
        _check_name(self.dtype)
        as_group(self.group)
        object.__setattr__(self, "group", self.format.group)
        in_row = self.format.scales_in_row
        if (self.scales is None) is not in_row:
            given, wanted = ("a tensor", "None: the scales are in the rows") if in_row else ("None", "a tensor")
            raise InvalidArgument("scales", f"{given} for {self.dtype}", wanted)
        parts = ("data",) if in_row else ("data", "scales")
        for name in parts:
            object.__setattr__(self, name, to_tensor(name, getattr(self, name)))
            if not getattr(self, name).ndim:
                raise InvalidArgument(name, "shape ()", "[..., D] and its scales, rank 1 or more")
        if self.data.dtype != self.format.dtype:
            raise InvalidArgument("data", self.data.dtype, f"{self.format.dtype} for {self.dtype}")
        if self.scales is None:
            held, columns = self.data.shape[-1], self.format.columns(self.shape[-1])
            fits = "" if held == columns else f"{self.shape[-1]} elements: {columns} bytes"
            if wanted := self.format.wants(self.shape[-1]) or fits:
                raise InvalidArgument("data", f"rows of {held} bytes", f"rows of {wanted}")
            return
        if self.scales.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise InvalidArgument("scales", self.scales.dtype, "float32, float16 or bfloat16")
        want = (*self.data.shape[:-1], self.format.scales(self.shape[-1]))
        if tuple(self.scales.shape) != want:
            raise InvalidArgument(
                "scales", f"shape {tuple(self.scales.shape)}", f"{want}, one for each group of each row"
            )
        if self.scales.device != self.data.device:
            raise InvalidArgument("scales", f"device {self.scales.device}", f"{self.data.device}, as data")

    def __repr__(self) -> str:
        groups = "" if self.scales is None else f", groups of {self.group}"
        return f"<Quantised {list(self.shape)} {self.dtype}{groups}, on {self.data.device}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (as_bytes(self.data), self.scales, self.dtype, self.group)  # torch cannot unpickle float8

    @property
    def format(self) -> StorageFormat:
        """The storage format: name, group and the properties derived from them."""
        return stored_as(self.dtype, self.group)

    @property
    def shape(self) -> torch.Size:
        """The shape of the dequantised tensor."""
        *rows, width = self.data.shape
        return torch.Size((*rows, self.format.width(width)))

    @classmethod
    def from_float(cls, x: Any, dtype: QuantDtype, group: int = 64) -> Quantised:
        """Quantises `x` `[..., D]`: symmetric, round to nearest, with scales from each group's largest magnitude."""
        _check_name(dtype)
        group, x = as_group(group), to_tensor("x", x)
        if not x.ndim:
            raise InvalidArgument("x", "shape ()", "[..., D], rank 1 or more")
        if not x.is_floating_point():
            raise InvalidArgument(
                "x", x.dtype, "floats", "already quantised numbers go to Quantised(data, scales, ...)"
            )
        stored = stored_as(dtype, group)
        if wanted := stored.wants(x.shape[-1]):
            raise InvalidArgument("x", f"last dim {x.shape[-1]}", wanted, "use int8")
        return cls(*stored.quantise(x), dtype, group)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The whole tensor in `dtype`: for tests and inspection. Kernels dequantise tile by tile."""
        return self.format.dequantise(self.data, self.scales, dtype)


def _unpickled(data: torch.Tensor, scales: torch.Tensor | None, dtype: QuantDtype, group: int) -> Quantised:
    return Quantised(data.view(stored_as(dtype, group).dtype), scales, dtype, group)


def _check_name(dtype: Any) -> None:
    if not isinstance(dtype, str) or dtype not in quantised_names():
        raise InvalidArgument("dtype", repr(dtype), f"one of {', '.join(quantised_names())}")
