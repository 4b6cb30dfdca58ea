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
    """K or V as a kernel reads it: type and kind of the storage, and its columns, padded with zeros."""

    type: str
    kind: str
    scale_type: str
    columns: int

    @property
    def slice(self) -> int:
        """Columns that go through threadgroup memory at a time."""
        return 64 if self.columns % 64 == 0 else 32


@dataclass(frozen=True)
class Spec:
    """All that an attention kernel's source depends on. Other options are checked at run time."""

    kernel: str  # "tiled" or "vector"
    q_type: str
    keys: Operand
    values: Operand
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


def operand(width: int, fmt: StorageFormat, scales: torch.dtype | None) -> Operand:
    type_ = TYPES.get(fmt.dtype, "uint8_t")  # bytes where Metal has no such type
    scale_type = TYPES[scales or torch.float32] if fmt.is_quantised else "float"
    return Operand(type_, KINDS[fmt.name], scale_type, padded(width))


def padded(width: int) -> int:
    """Columns padded to a multiple of 32, of 64 above 128: few kernels, little padding."""
    unit = 32 if width <= 128 else 64
    return -(-width // unit) * unit
