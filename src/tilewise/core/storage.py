"""Storage formats of K and V. A `StorageFormat` has the sizes of rows, and quantises and dequantises in plain torch.

A new format is an entry of `FORMATS` and, in each backend that is to serve it, a load (for caches a store too); other
backends refuse it. Arguments, caches, files, operators and plans all use the entry. A format with another row layout
(scales within the row, columns of two types, a codebook) is a subclass that overrides `columns`, `width`, `scales`,
`quantise` and `dequantise`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch

from ..errors import InvalidArgument
from .options import is_int, to_int

QuantDtype = Literal["int8", "int4", "codebook4", "fp8_e4m3", "fp8_latent"]  # `FORMATS`, for type checkers
GROUPS = (32, 64, 128)
TINY = torch.finfo(torch.float32).tiny
MOST = 3.402823e38  # scales are for magnitudes up to here: of float32's largest, 127 times its scale would be infinite


@dataclass(frozen=True, slots=True)
class StorageFormat:
    """The layout of a row of K or V: plain floats, or quantised elements with a scale for each group.

    Quantisation is symmetric: an element is its stored number times its group's scale. A byte of two elements holds
    d in its low bits and d + D / 2 in its high bits, as two's complement.

    >>> stored_as("int4", 64).columns(128), stored_as("int4", 64).scales(128), str(stored_as("int4", 64))
    (64, 2, 'int4/64')
    """

    name: str
    dtype: torch.dtype  # of the stored numbers
    bits: int  # of an element
    largest: float = 0.0  # the stored number of a group's largest magnitude
    group: int = 0  # elements that share a scale; 0: there are no scales
    other_names: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.group))  # the rest follows from these

    def __str__(self) -> str:
        return f"{self.name}/{self.group}" if self.group else self.name

    @property
    def is_quantised(self) -> bool:
        return self.group > 0

    @property
    def is_integer(self) -> bool:
        return not self.dtype.is_floating_point

    @property
    def scales_in_row(self) -> bool:
        """Whether scales are part of the row. The format then fixes their group."""
        return False

    @property
    def packing(self) -> int:
        """Elements in one stored number: 2 for 4-bit formats."""
        return 8 * self.dtype.itemsize // self.bits

    def wants(self, width: int) -> str | None:
        """What the width of a row must be, if it cannot be `width`."""
        return f"an even head dim for {self.name}" if width % self.packing else None

    def columns(self, width: int) -> int:
        """Stored numbers in a row of `width` elements."""
        return width // self.packing

    def width(self, columns: int) -> int:
        """Elements in a row of `columns` stored numbers."""
        return columns * self.packing

    def scales(self, width: int) -> int:
        """Scales in a row."""
        return -(-width // self.group) if self.group else 0

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Quantises `x` `[..., D]` to `[..., columns]` and scales, float32 `[..., scales]` or None. Rounds to nearest;
        the largest magnitude of a group sets its scale.
        """
        if not self.group:
            return x.to(self.dtype), None
        width, groups = x.shape[-1], self.scales(x.shape[-1])
        padded = torch.nn.functional.pad(x.float(), (0, groups * self.group - width))
        padded = padded.unflatten(-1, (groups, self.group))
        largest = padded.abs().amax(-1)  # [..., groups]
        largest = torch.where(largest == torch.inf, largest, largest.clamp_max(MOST))
        scales = largest / largest.new_full((), self.largest)  # by a Python number, a GPU is off by one bit
        steps = (padded / scales.clamp_min(TINY)[..., None]).flatten(-2)[..., :width]
        if not self.is_integer:
            return steps.to(self.dtype), scales
        whole = self.codes(steps)
        if self.packing == 1:
            return whole, scales
        low, high = whole.view(torch.uint8).chunk(2, -1)
        return (low & 15) | (high << 4), scales

    def dequantise(self, data: torch.Tensor, scales: torch.Tensor | None, to: torch.dtype) -> torch.Tensor:
        """Dequantises rows `[..., columns]` to `[..., D]` of dtype `to`."""
        if scales is None:
            return data.to(to)
        if self.packing == 2:
            signed = data.view(torch.int8)
            data = torch.cat([(signed << 4) >> 4, signed >> 4], -1)  # both shifts extend the sign
        return self.numbers(data).to(to) * scales.to(to).repeat_interleave(self.group, -1)[..., : data.shape[-1]]

    def codes(self, steps: torch.Tensor) -> torch.Tensor:
        """Elements divided by their scales to their int8 codes."""
        return steps.round().to(torch.int8)

    def numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """The multiples of the scale that codes stand for."""
        return codes


# Lloyd-Max levels of normal numbers in groups of 64, relative to the group's largest magnitude, as int8; their
# midpoints; and the levels as bytes of two words, which kernels look up by a shift.
LEVELS = (6, 18, 30, 43, 57, 74, 94, 121)
MIDPOINTS = tuple((a + b) / 2 for a, b in pairwise(LEVELS))
LEVEL_WORDS = tuple(int.from_bytes(LEVELS[i : i + 4], "little") for i in (0, 4))


class CodebookFormat(StorageFormat):
    """Four bits: a sign (the highest bit) and the index of one of eight levels, denser near 0. For normally distributed
    elements, as after a rotation. Rounds to the nearest level, ties to the lower one.

    >>> stored_as("codebook4").codes(torch.tensor([0.0, -7.0, 12.0, 12.1, 127.0])).tolist()
    [0, 8, 0, 1, 7]
    """

    def codes(self, steps: torch.Tensor) -> torch.Tensor:
        size, index = steps.abs(), (steps < 0).to(torch.int8) << 3
        for middle in MIDPOINTS:
            index += size > middle
        return index

    def numbers(self, codes: torch.Tensor) -> torch.Tensor:
        levels = torch.tensor(LEVELS, dtype=torch.int8, device=codes.device)[(codes & 7).long()]
        return torch.where(codes < 0, -levels, levels)


LATENT, LATENT_SCALES = 512, 16  # float8 elements of a latent row, bytes of their scales


class LatentFormat(StorageFormat):
    """A row of latent attention (MLA) in bytes, as vLLM's fp8_ds_mla: the latent part in float8, the rest (the rope
    part) in bfloat16. With 64 of the latter a row has 656 bytes:

        bytes 0 to 511      512 float8_e4m3
        bytes 512 to 527    4 float32 scales, one for each 128 of them
        bytes 528 to 655    64 bfloat16

    V, the latent part, is the first 528 bytes of the same memory.

    >>> stored_as("fp8_latent").columns(576), stored_as("fp8_latent").columns(512), stored_as("fp8_latent").width(656)
    (656, 528, 576)
    """

    @property
    def scales_in_row(self) -> bool:
        return True

    def wants(self, width: int) -> str | None:
        fits = width >= LATENT and width % 2 == 0  # scales begin at multiples of 4 bytes
        return None if fits else f"{LATENT} or an even number more for {self.name}"

    def columns(self, width: int) -> int:
        return LATENT + LATENT_SCALES + 2 * (width - LATENT)

    def width(self, columns: int) -> int:
        return LATENT + (columns - LATENT - LATENT_SCALES) // 2

    def scales(self, width: int) -> int:
        return 0

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        data, scales = stored_as("fp8_e4m3", self.group).quantise(x[..., :LATENT])
        assert scales is not None
        rest = x[..., LATENT:].to(torch.bfloat16).contiguous()
        return torch.cat([part.view(torch.uint8) for part in (data, scales, rest)], -1), None

    def dequantise(self, data: torch.Tensor, scales: torch.Tensor | None, to: torch.dtype) -> torch.Tensor:
        data = data.clone() if data.storage_offset() % 4 else data  # torch views no float32 elsewhere
        latent, factors, rest = latent_parts(data.contiguous())
        latent = stored_as("fp8_e4m3", self.group).dequantise(latent, factors, to)
        return torch.cat([latent, rest.to(to)], -1)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of `lse` and of biases, slopes and sinks in a call whose q has this one."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def latent_parts(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a latent row's parts: float8 `[..., 512]`, scales float32 `[..., 4]`, bfloat16 `[..., rest]`."""
    end = LATENT + LATENT_SCALES
    latent, scales, rest = data[..., :LATENT], data[..., LATENT:end], data[..., end:]
    return latent.view(torch.float8_e4m3fn), scales.view(torch.float32), rest.view(torch.bfloat16)


FORMATS: dict[str, StorageFormat] = {
    entry.name: entry
    for entry in (
        StorageFormat("f32", torch.float32, 32, other_names=("float32", "float", "fp32", "single")),
        StorageFormat("f16", torch.float16, 16, other_names=("float16", "half", "fp16")),
        StorageFormat("bf16", torch.bfloat16, 16, other_names=("bfloat16",)),
        StorageFormat("int8", torch.int8, 8, 127.0, 64),
        StorageFormat("int4", torch.uint8, 4, 7.0, 64),
        CodebookFormat("codebook4", torch.uint8, 4, 127.0, 64),
        StorageFormat(
            "fp8_e4m3", torch.float8_e4m3fn, 8, 448.0, 64, ("fp8", "float8_e4m3fn", "float8_e4m3", "fp8_e4m3fn")
        ),
        LatentFormat("fp8_latent", torch.uint8, 8, 448.0, 128, ("fp8_ds_mla",)),
    )
}
FLOATS = {name: entry.dtype for name, entry in FORMATS.items() if not entry.is_quantised}
FLOAT64 = StorageFormat("f64", torch.float64, 64)  # of calls that are computed in float64; no cache stores it
PLAIN = {entry.dtype: entry for entry in (*FORMATS.values(), FLOAT64) if not entry.is_quantised}
OTHER_NAMES = {other: name for name, entry in FORMATS.items() for other in entry.other_names}


_grouped = {
    (name, n): entry if entry.scales_in_row else replace(entry, group=n)
    for name, entry in FORMATS.items()
    if entry.group
    for n in GROUPS
}


def stored_as(name: str, group: int = 0) -> StorageFormat:
    """The format of that name; a quantised one with groups of `group`."""
    entry = FORMATS[name]
    if not entry.group or entry.scales_in_row:
        return entry
    return _grouped.get((name, group)) or replace(entry, group=group)


def parse(text: str) -> StorageFormat:
    """The format that `str` gave this text for."""
    name, _, group = text.partition("/")
    return stored_as(name, int(group or 0))


def quantised_names() -> tuple[str, ...]:
    return tuple(name for name, entry in FORMATS.items() if entry.is_quantised)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """float8 and bool viewed as bytes, which every torch can index and every Triton load; others unchanged."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.dtype not in (torch.int8, torch.uint8) else x


def as_group(group: Any) -> int:
    number = to_int(group)
    if not is_int(number) or number not in GROUPS:
        raise InvalidArgument("group", repr(group), "32, 64 or 128")
    return int(number)


def short_name(name: Any) -> Any:
    """The short name of a dtype, from any of its names or torch's dtype; anything else unchanged.

    >>> short_name("float16"), short_name("torch.bfloat16"), short_name("half"), short_name(torch.float32)
    ('f16', 'bf16', 'f16', 'f32')
    >>> short_name("int8"), short_name("f64"), short_name(None)
    ('int8', 'f64', None)
    """
    if isinstance(name, torch.dtype):
        name = str(name)
    if not isinstance(name, str):
        return name
    plain = name.lower().removeprefix("torch.")
    return OTHER_NAMES.get(plain, plain)
