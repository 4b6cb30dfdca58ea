"""Quantised K and V: narrow data with one scale per token, head and group of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from .core.options import is_int, to_int
from .errors import InvalidArgument
from .validation.arrays import to_tensor

QuantDtype = Literal["int8", "int4", "fp8_e4m3"]
GROUPS = (32, 64, 128)
STORAGE = {"int8": torch.int8, "int4": torch.uint8, "fp8_e4m3": torch.float8_e4m3fn}
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8_e4m3": 448.0}


def as_group(group: Any) -> int:
    number = to_int(group)
    if not is_int(number) or number not in GROUPS:
        raise InvalidArgument("group", repr(group), "32, 64 or 128")
    return int(number)


@dataclass(frozen=True, slots=True)
class Quantised:
    """A tensor `[..., D]` stored in few bits; it stands wherever `k`, `v` or pages do.

    The value of element `d` is `data[..., d] * scales[..., d // group]`.

    Args:
        data: `[..., D]` of int8 or float8_e4m3fn; for int4, `[..., D // 2]` of uint8, where byte `d` holds element
            `d` in its low and element `d + D // 2` in its high four bits, as two's complement (D is even).
        scales: `[..., ceil(D / group)]`, float32, float16 or bfloat16.
        dtype: `"int8"`, `"int4"` or `"fp8_e4m3"`.
        group: elements that share a scale: 32, 64 or 128.

    >>> keys = torch.randn(2, 8, 100, 64)
    >>> packed = Quantised.from_float(keys, "int8", group=64)
    >>> bool((packed.dequantise() - keys).abs().max() < 0.03)
    True
    """

    data: torch.Tensor
    scales: torch.Tensor
    dtype: QuantDtype
    group: int

    def __post_init__(self) -> None:
        for name in ("data", "scales"):
            object.__setattr__(self, name, to_tensor(name, getattr(self, name)))
        if not isinstance(self.dtype, str) or self.dtype not in get_args(QuantDtype):
            raise InvalidArgument("dtype", repr(self.dtype), f"one of {', '.join(get_args(QuantDtype))}")
        object.__setattr__(self, "group", as_group(self.group))
        for name in ("data", "scales"):
            if not getattr(self, name).ndim:
                raise InvalidArgument(name, "shape ()", "[..., D] and its scales, rank 1 or more")
        if self.data.dtype != STORAGE[self.dtype]:
            raise InvalidArgument("data", self.data.dtype, f"{STORAGE[self.dtype]} for {self.dtype}")
        if self.scales.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise InvalidArgument("scales", self.scales.dtype, "float32, float16 or bfloat16")
        want = (*self.data.shape[:-1], -(-self.shape[-1] // self.group))
        if tuple(self.scales.shape) != want:
            raise InvalidArgument(
                "scales", f"shape {tuple(self.scales.shape)}", f"{want}, one for each group of each row"
            )
        if self.scales.device != self.data.device:
            raise InvalidArgument("scales", f"device {self.scales.device}", f"{self.data.device}, as data")

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor that this stands for."""
        *rows, width = self.data.shape
        return torch.Size((*rows, width * 2 if self.dtype == "int4" else width))

    @classmethod
    def from_float(cls, x: Any, dtype: QuantDtype, group: int = 64) -> Quantised:
        """Quantises `x` `[..., D]`: symmetric, round to nearest, the scale set by each group's largest magnitude."""
        if not isinstance(dtype, str) or dtype not in LARGEST:
            raise InvalidArgument("dtype", repr(dtype), f"one of {', '.join(LARGEST)}")
        group, x = as_group(group), to_tensor("x", x)
        if not x.ndim:
            raise InvalidArgument("x", "shape ()", "[..., D], rank 1 or more")
        width = x.shape[-1]
        if dtype == "int4" and width % 2:
            raise InvalidArgument("x", f"last dim {width}", "an even size for int4", "use int8")
        groups = -(-width // group)
        padded = torch.nn.functional.pad(x.float(), (0, groups * group - width)).unflatten(-1, (groups, group))
        largest = padded.abs().amax(-1)  # [..., groups]
        scales = largest / largest.new_full((), LARGEST[dtype])  # by a plain number, torch on a GPU is off by a bit
        steps = (padded / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).flatten(-2)[..., :width]
        if dtype == "fp8_e4m3":
            return cls(steps.to(torch.float8_e4m3fn), scales, dtype, group)
        whole = steps.round().to(torch.int8)
        if dtype == "int8":
            return cls(whole, scales, dtype, group)
        low, high = whole.view(torch.uint8).chunk(2, -1)
        return cls((low & 15) | (high << 4), scales, dtype, group)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The whole tensor at full width: for tests and for looking at it; kernels do this tile by tile."""
        return dequantise(self.data, self.scales, self.dtype, self.group, dtype)


def dequantise(
    data: torch.Tensor, scales: torch.Tensor, dtype: str, group: int, to: torch.dtype = torch.float32
) -> torch.Tensor:
    """`data * scales` of any slice of rows, in `to`."""
    if dtype == "int4":
        signed = data.view(torch.int8)
        data = torch.cat([(signed << 4) >> 4, signed >> 4], -1)  # both shifts extend the sign
    return data.to(to) * scales.to(to).repeat_interleave(group, -1)[..., : data.shape[-1]]
