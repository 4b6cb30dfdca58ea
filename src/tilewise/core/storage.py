"""How K and V are stored: each format is one value, which says its sizes and has its arithmetic in plain torch.

A new format is an entry of `FORMATS`, and a load (for caches a store too) in each backend that is to serve it; other
backends refuse it. Arguments, caches, files, operators and plans take what they need to know from the entry. A format
with rows of another layout (scales within a row, columns of two types, a codebook) is a subclass, which answers
`columns`, `width`, `scales`, `quantise` and `dequantise` for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch

from ..errors import InvalidArgument
from .options import is_int, to_int

QuantDtype = Literal["int8", "int4", "codebook4", "fp8_e4m3", "fp8_latent"]  # what a type checker knows of `FORMATS`
GROUPS = (32, 64, 128)
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class StorageFormat:
    """How a row of K or V lies in memory: plain floats, or few bits and a scale for each group of elements.

    Symmetric: an element is its stored number times its group's scale. Where a byte holds two elements they are half a
    row apart: the first half of a row in the low bits, the second in the high ones, as two's complement.

    >>> stored_as("int4", 64).columns(128), stored_as("int4", 64).scales(128), str(stored_as("int4", 64))
    (64, 2, 'int4/64')
    """

    name: str
    dtype: torch.dtype  # of the stored numbers
    bits: int  # of an element
    largest: float = 0.0  # what a group's largest magnitude is stored as
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
        """Whether a row holds its own scales. Their group is then the format's."""
        return False

    @property
    def packing(self) -> int:
        """Elements in one stored number."""
        return 8 * self.dtype.itemsize // self.bits

    def wants(self, width: int) -> str | None:
        """What the width of a row must be, if it cannot be `width`."""
        return f"an even head dim for {self.name}" if width % self.packing else None

    def columns(self, width: int) -> int:
        """Stored numbers of a row of `width` elements."""
        return width // self.packing

    def width(self, columns: int) -> int:
        """Elements of a row of `columns` stored numbers."""
        return columns * self.packing

    def scales(self, width: int) -> int:
        """Scales of a row."""
        return -(-width // self.group) if self.group else 0

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`x` `[..., D]` as `[..., columns]` and its scales, float32 `[..., scales]` or None: rounded to nearest, the
        scale set by each group's largest magnitude.
        """
        if not self.group:
            return x.to(self.dtype), None
        width, groups = x.shape[-1], self.scales(x.shape[-1])
        padded = torch.nn.functional.pad(x.float(), (0, groups * self.group - width))
        padded = padded.unflatten(-1, (groups, self.group))
        largest = padded.abs().amax(-1)  # [..., groups]
        scales = largest / largest.new_full((), self.largest)  # by a plain number, torch on a GPU is off by a bit
        steps = (padded / scales.clamp_min(TINY)[..., None]).flatten(-2)[..., :width]
        if not self.is_integer:
            return steps.to(self.dtype), scales
        whole = self.codes(steps)
        if self.packing == 1:
            return whole, scales
        low, high = whole.view(torch.uint8).chunk(2, -1)
        return (low & 15) | (high << 4), scales

    def dequantise(self, data: torch.Tensor, scales: torch.Tensor | None, to: torch.dtype) -> torch.Tensor:
        """Any slice of rows, in `to`."""
        if scales is None:
            return data.to(to)
        if self.packing == 2:
            signed = data.view(torch.int8)
            data = torch.cat([(signed << 4) >> 4, signed >> 4], -1)  # both shifts extend the sign
        return self.numbers(data).to(to) * scales.to(to).repeat_interleave(self.group, -1)[..., : data.shape[-1]]

    def codes(self, steps: torch.Tensor) -> torch.Tensor:
        """Elements in units of their scales as the whole numbers that stand for them, int8."""
        return steps.round().to(torch.int8)

    def numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """What they stand for."""
        return codes


# Lloyd-Max levels of normal numbers in groups of 64 in units of their largest magnitude, as int8; their midpoints; and
# bytes of two words, in which kernels look a level up by a shift.
LEVELS = (6, 18, 30, 43, 57, 74, 94, 121)
MIDPOINTS = tuple((a + b) / 2 for a, b in pairwise(LEVELS))
LEVEL_WORDS = tuple(int.from_bytes(LEVELS[i : i + 4], "little") for i in (0, 4))


class CodebookFormat(StorageFormat):
    """Four bits as a sign (the highest) and the index of one of eight levels that lie closer near 0: for elements that
    are normal, as after a rotation. The nearest level is taken, of two the lower.

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


LATENT, LATENT_SCALES = 512, 16  # elements of a latent row in float8, bytes of their scales


class LatentFormat(StorageFormat):
    """A row of latent attention in bytes, as servers keep it (fp8_ds_mla): the latent part in float8, the rest (the
    rope part) in bfloat16. With 64 of these a row has 656 bytes:

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
PLAIN = {entry.dtype: entry for entry in FORMATS.values() if not entry.is_quantised}
OTHER_NAMES = {other: name for name, entry in FORMATS.items() for other in entry.other_names}


_grouped = {
    (name, n): entry if entry.scales_in_row else replace(entry, group=n)
    for name, entry in FORMATS.items()
    if entry.group
    for n in GROUPS
}


def stored_as(name: str, group: int = 0) -> StorageFormat:
    """A format by its name; a quantised one in groups of `group`."""
    entry = FORMATS[name]
    if not entry.group or entry.scales_in_row:
        return entry
    return _grouped.get((name, group)) or replace(entry, group=group)


def parse(text: str) -> StorageFormat:
    """What `str` made of a format."""
    name, _, group = text.partition("/")
    return stored_as(name, int(group or 0))


def quantised_names() -> tuple[str, ...]:
    return tuple(name for name, entry in FORMATS.items() if entry.is_quantised)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """float8 and bool as bytes: torch indexes and Triton loads neither everywhere. Anything else as it is."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.dtype not in (torch.int8, torch.uint8) else x


def as_group(group: Any) -> int:
    number = to_int(group)
    if not is_int(number) or number not in GROUPS:
        raise InvalidArgument("group", repr(group), "32, 64 or 128")
    return int(number)


def short_name(name: Any) -> Any:
    """The short name of a type, by any of its names or as torch's; what is no name comes back as it is.

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
