"""The launch shape of a kernel, and its `Spec`: one hashable value, the only compile-time argument."""

from __future__ import annotations

from dataclasses import dataclass

from ..gpu.flags import Flags


@dataclass(frozen=True)
class Config:
    """The shape of a launch."""

    BM: int
    BK: int
    warps: int
    stages: int
    pack: int = 1
    splits: int = 1
    split_tiles: int = 0  # key tiles of a split where the caller fixes them
    slices: int = 1  # programs that divide the value columns


@dataclass(frozen=True)
class Operand:
    """K or V: how its columns are split into chunks, how it is stored, and in what type it is multiplied."""

    widths: tuple[int, ...]  # units of each chunk in storage, powers of two
    columns: int  # units in storage; the last chunk may reach further and is padded with zeros
    kind: str  # "plain", or the name of a quantised format
    group: int  # elements that share a scale; 0 for plain
    factored: bool  # each chunk is in one scale group, so its scale can be applied after the dot product
    work: str  # the type of the dot product's operands: "f32", "f16" or "bf16"
    precision: str  # of a float32 dot product: "bf16x6" or "tf32"
    rescaled: bool  # q's rows are multiplied by powers of two, so that float16 holds them
    fast: bool  # dequantised by PTX instructions
    unit: int = 1  # bytes that are read together; of plain storage one element
    biased: bool = False  # int4 is multiplied as x + 8, and the 8's share is subtracted from the sum (`dequant.py`)
    packing: int = 1  # elements per byte
    row_groups: int = 1  # scale groups with their own rows of q (`scale_groups.py`)
    rounds: bool = False  # sums over chunks are rounded, not truncated as by tensor cores
    in_row: bool = False  # scales are in the row, after its bytes (`LatentFormat`)
    rest: int = 0  # bfloat16 elements of a row, after the scales

    @property
    def parts(self) -> int:
        """Chunks of elements per chunk of storage; elements that share a byte are half a row apart."""
        return self.unit * self.packing

    def start(self, chunk: int, part: int) -> int:
        """The first column of a chunk of elements; the others follow `unit` columns apart."""
        byte, half = part % self.unit, part // self.unit
        return (sum(self.widths[:chunk]) + half * self.columns) * self.unit + byte

    @property
    def groups(self) -> int:
        """Scale groups of a row."""
        return self.group_at(len(self.widths) - 1, self.parts - 1) + 1

    def group_at(self, chunk: int, part: int) -> int:
        """The scale group of a chunk of elements that lies in one; 0 with row groups."""
        return 0 if self.row_groups > 1 else self.start(chunk, part) // self.group


@dataclass(frozen=True)
class Spec(Flags):
    """Compile-time parameters of a kernel. Sizes, strides, windows and lengths are run-time arguments."""

    keys: Operand
    values: Operand
    round: str  # q's type, to which weights are rounded before P V
    BM: int  # rows of a tile: BM // pack queries times `pack` heads
    BK: int
    pack: int  # query heads of one KV head that share a tile
    group: int  # query heads of one KV head
    slices: int  # programs that divide the value columns; `values` is one program's share
    ordered: bool  # sequences of a packed batch come longest first
    varlen: bool
    page: int  # slots of a page, 0 for no pages
    chosen: int  # keys of a block of `block_indices`, 1 of `key_indices`, 0: no indices
    listed: bool  # key tiles come from a mask's block-sparsity list, not from a range
    negate: bool  # a negative scale: q is negated instead
    guard: str  # what is done about NaN and Inf under hidden cells: "", "inside", "flag" or "fixup" (fwd_kernel.py)
    split: bool
    combine: str  # who combines splits: "inside": the last-arriver; "after": `combine.py`; "": there are none
    block: int  # splits that a combine loads at once
    ptx: bool  # the GPU takes inline PTX
    lookup: str  # page lookup: one for each "tile", all "pages" of a tile, or one for each of its "rows"; "": no pages
    prefetch: bool  # a tile's page numbers are prefetched during the tile before it
    sum_columns: int  # partial sums per row in which l is kept until the epilogue; 0: one sum
    grain: int  # the unit in which strides of K and V are passed
    v_in_k: bool  # chunks of V are those of K: they are loaded once
    flip: bool  # products are transposed: keys or value columns are their rows
    align: int  # common alignment of all strides of K and V, 16 at most
    scale_grain: int  # the same two for their scales
    scale_align: int
    pdl: bool  # programmatic dependent launch: `combine` may start before this kernel has ended, and waits

    @property
    def folded(self) -> bool:
        """Whether the values' scales are folded into the weights, and acc has a unit (`scale_folding.py`)."""
        return self.values.factored and self.round != "f32" and self.guard == ""

    @property
    def row_groups(self) -> int:
        """Rows of a tile that stand for one row of q: one for each scale group (`scale_groups.py`)."""
        return self.keys.row_groups
