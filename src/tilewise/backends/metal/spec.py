"""What a kernel's source is generated for, and how it is launched: hashable values without a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.storage import StorageFormat

THREADS = 128  # of a threadgroup, in every attention kernel; registers may allow less than Metal's 1024
SIMDGROUPS = 4
BK = 32  # keys of a tile

# Names of types in MSL.
TYPES = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
}
# Storage formats that can be read, and their names in the source
KINDS = {
    "f32": "PLAIN", "f16": "PLAIN", "bf16": "PLAIN", "int8": "INT8", "int4": "INT4", "codebook4": "CODEBOOK4",
    "fp8_e4m3": "FP8",
}  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """K or V as a kernel reads it: type and kind of the storage, its columns, padded with zeros, and what a scale is
    for."""

    type: str
    kind: str
    scale_type: str
    width: int
    columns: int
    group: int = 1

    @property
    def tile(self) -> str:
        """The type of a tile in threadgroup memory."""
        return self.type if self.kind == "PLAIN" else "float"

    def slice(self, unit: int) -> int:
        """Columns that go through threadgroup memory at a time: at most 256 bytes of a row."""
        most = 128 if self.is_short else 64
        return max(n for n in range(unit, most + 1, unit) if self.columns % n == 0)

    @property
    def is_short(self) -> bool:
        """Whether its tiles are of 16 bits."""
        return self.tile != "float"


@dataclass(frozen=True)
class Options:
    """The options that a source is made for: it has code for these and no others. The text knows them by their names in
    capitals.
    """

    packed: bool = False
    varlen: bool = False
    page: int = 0  # keys of a page; 0: none
    causal: bool = False
    left: bool = False
    right: bool = False
    chunk: bool = False
    offset: int = 0  # a value of OFFSET_KINDS
    lengths: bool = False
    mask: int = 0  # a value of MASK_KINDS
    states: bool = False  # tiles have states: skip, full, mixed
    softcap: bool = False
    slopes: bool = False
    sinks: bool = False
    lse: bool = False
    natural: bool = False  # logits are in natural units, not in those of log 2
    splits: bool = False
    fixed_splits: bool = False
    pack: int = 1
    wide: bool = False  # rows begin at multiples of 16 bytes
    far: bool = False  # offsets within a tile take 64 bits


@dataclass(frozen=True)
class Spec:
    """All that an attention kernel's source depends on."""

    kernel: str  # "tiled" or "vector"
    q_type: str
    keys: Operand
    values: Operand
    options: Options = Options()
    sg_rows: int = 0  # tiled: simdgroups over rows, the others share columns
    rows: int = 0  # vector: rows of a threadgroup
    v_in_k: bool = False  # vector: values are the first columns of the keys, and are not read again


@dataclass(frozen=True)
class Config:
    """The shape of a launch."""

    kernel: str
    rows: int  # of a threadgroup: queries times heads
    pack: int = 1  # query heads of a KV head that share a query's rows
    splits: int = 1
    split_tiles: int = 0  # key tiles of a split where the caller fixes them

    @property
    def queries(self) -> int:
        return self.rows // self.pack


def operand(width: int, fmt: StorageFormat, scales: torch.dtype | None, unit: int = 32) -> Operand:
    type_ = TYPES.get(fmt.dtype, "uint8_t")  # bytes where Metal has no such type
    scale_type = TYPES[scales or torch.float32] if fmt.is_quantised else "float"
    return Operand(type_, KINDS[fmt.name], scale_type, width, padded(width, unit), fmt.group or 1)


def padded(width: int, unit: int = 32) -> int:
    """Columns padded to a multiple of `unit`, of 64 above 128: these have many slices."""
    unit = unit if width <= 128 else 64
    return -(-width // unit) * unit
