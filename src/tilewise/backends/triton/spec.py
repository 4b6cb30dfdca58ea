"""How a kernel is launched, and what it is compiled for: one hashable value, its only compile-time argument."""

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
    slices: int = 1  # programs that share the value columns


@dataclass(frozen=True)
class Operand:
    """K or V: how its columns are cut, how it is stored and in what type it is multiplied."""

    widths: tuple[int, ...]  # units of each chunk in storage, powers of two
    columns: int  # units in storage; the last chunk may reach further and is padded with zeros
    kind: str  # "plain", or the name of a quantised format
    group: int  # elements that share a scale; 0 for plain
    factored: bool  # each chunk lies in one group, so its scale can leave the dot product
    work: str  # the type of the dot product's operands: "f32", "f16" or "bf16"
    precision: str  # of a float32 dot product: "bf16x6" or "tf32"
    rescaled: bool  # q's rows are multiplied by powers of two, so that float16 holds them
    fast: bool  # stored numbers are widened by PTX instructions
    unit: int = 1  # bytes that are read together; of plain numbers one number
    biased: bool = False  # int4 is multiplied as x + 8 and what the 8 adds is taken off the sum (`dequant.py`)
    packing: int = 1  # elements of a byte
    row_groups: int = 1  # scale groups that have rows of q of their own (`scale_groups.py`)
    rounds: bool = False  # sums over chunks are rounded, not cut off as tensor cores do
    in_row: bool = False  # scales lie in the row, behind its bytes (`LatentFormat`)
    rest: int = 0  # and behind them so many elements in bfloat16

    @property
    def parts(self) -> int:
        """Chunks of elements in a chunk of storage; elements that share a byte are half a head apart."""
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
        """The scale group of a chunk of elements that lies in one; 0 where groups have rows of their own."""
        return 0 if self.row_groups > 1 else self.start(chunk, part) // self.group


@dataclass(frozen=True)
class Spec(Flags):
    """One kernel. Sizes, strides, windows and lengths are arguments at run time; these are not."""

    keys: Operand
    values: Operand
    round: str  # q's type, in which weights are rounded before they meet the values
    BM: int  # rows of a tile: BM // pack queries times `pack` heads
    BK: int
    pack: int  # query heads of one KV head that share a tile
    group: int  # query heads of one KV head
    slices: int  # programs that share the value columns; `values` is what one of them has
    ordered: bool  # sequences of a packed batch come longest first
    varlen: bool
    page: int  # slots of a page, 0 for no pages
    chosen: int  # keys of a block of `block_indices`, 1 of `key_indices`, 0: no indices
    listed: bool  # tiles come from the list that a mask leaves, not from a range
    negate: bool  # a negative scale: q is negated instead
    guard: str  # what is done about NaN and Inf under hidden cells: "", "inside", "flag" or "fixup" (fwd_kernel.py)
    split: bool
    combine: str  # who combines splits: "inside" the last program, "after" it `combine.py`, "" there are none
    block: int  # splits that a combine loads at once
    ptx: bool  # the GPU takes NVIDIA's assembly
    lookup: str  # of the page of each "tile", all "pages" of a tile or those of its "rows"; "" without pages
    prefetch: bool  # a tile's pages are looked up while the tile before it is done
    sum_columns: int  # each row's sum is kept in so many columns until the end; 0: it is one number
    grain: int  # what the strides of K and V are given in
    v_in_k: bool  # chunks of V are those of K: they are loaded once
    flip: bool  # products are transposed: keys or value columns are their rows
    align: int  # what all strides of K and V are multiples of, 16 at most
    scale_grain: int  # the same two of their scales
    scale_align: int
    pdl: bool  # the combining kernel may start before this one has ended, and waits

    @property
    def folded(self) -> bool:
        """Whether the values' scales go into the weights, and acc has a unit (`scale_folding.py`)."""
        return self.values.factored and self.round != "f32" and self.guard == ""

    @property
    def row_groups(self) -> int:
        """Rows of a tile that stand for one row of q: one for each scale group (`scale_groups.py`)."""
        return self.keys.row_groups
