"""What a kernel is compiled for, as one hashable value: the only compile-time argument of `attend`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operand:
    """K or V: how its columns are cut, how it is stored and in what type it is multiplied."""

    widths: tuple[int, ...]  # columns of each chunk in storage, powers of two
    columns: int  # columns in storage; the last chunk may reach further and is padded with zeros
    kind: str  # "plain", "int8", "fp8" or "int4"
    group: int  # elements that share a scale; 0 for plain
    factored: bool  # each chunk lies in one group, so its scale can leave the dot product
    work: str  # the type of the dot product's operands: "f32", "f16" or "bf16"
    precision: str  # of a float32 dot product: "bf16x6" or "tf32"
    rescaled: bool  # q's rows are multiplied by powers of two, so that float16 holds them
    fast: bool  # stored numbers are widened by PTX instructions

    @property
    def parts(self) -> int:
        """Chunks of elements in a chunk of storage: an int4 byte holds two elements, half a head apart."""
        return 2 if self.kind == "int4" else 1


@dataclass(frozen=True)
class Spec:
    """One kernel. Sizes, strides, windows and lengths are arguments at run time; these are not."""

    keys: Operand
    values: Operand
    round: str  # q's type, in which weights are rounded before they meet the values
    BM: int  # rows of a tile: BM // pack queries times `pack` heads
    BK: int
    pack: int  # query heads of one KV head that share a tile
    group: int  # query heads of one KV head
    packed_q: bool
    varlen: bool
    page: int  # slots of a page, 0 for no pages
    lengths: bool
    offset: str  # "int", "rows" or "end"
    causal: bool
    left: bool
    right: bool
    chunk: bool
    softcap: bool
    alibi: bool
    sinks: bool
    mask: str  # "", "bool" or "float"
    listed: bool  # walk the list of tiles that a mask leaves, rather than a range
    linear: bool
    negate: bool  # a negative scale: q is negated instead
    tail: bool  # the keys may end inside a tile
    guard: str  # what is done about NaN and Inf under hidden cells: "", "inside", "flag" or "repair" (attend.py)
    split: bool
    lse: bool
    pdl: bool  # the merging kernel may start before this one has ended, and waits

    @property
    def ruled(self) -> bool:
        """Whether rules hide keys to the right of a row."""
        return self.causal or self.right or self.chunk

    @property
    def moves(self) -> bool:
        """Whether rules hide keys to the left of a row."""
        return self.left or self.chunk
