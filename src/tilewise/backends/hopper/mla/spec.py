"""What a latent decode kernel is compiled for, as one hashable value."""

from __future__ import annotations

from dataclasses import dataclass

LATENT = 512  # columns of the values
ROPE = 64  # further columns of the keys
KEYS = 64  # of a block
ROWS = 64  # of a tile of queries
FEW = 16  # of a tile of queries, where a sequence has no more


@dataclass(frozen=True)
class Spec:
    dtype: str  # "bf16" or "f16"
    page_rows: int  # rows of one copy: 64, or a page if that is smaller
    paged: bool  # else batch rows take the place of pages
    head_rows: int  # heads of a tile, a power of two; its other rows are further queries
    causal: bool  # the last query sees all keys, the one before it all but one, and so on
    lengths: bool  # else all sequences have the same number of keys
    lse: bool
    sinks: bool
    rows: int = ROWS  # of a tile; FEW are the columns of all products
    inside: bool = False  # the last-arriving consumer combines a sequence; of few rows
    gather: bool = False  # keys by index, every query its own
    fp8: bool = False  # latent columns in float8 with a scale for each 128; with `gather` alone
    width: int = 128  # columns of the keys that are waited for at a time
    prefetch: bool = False  # the next pair is prefetched to L2; rows of the cache are contiguous
    ahead: int = 3  # chunks of float8 in flight
    consumer_regs: int = 240
    producer_regs: int = 24

    @property
    def pieces(self) -> int:
        """Pieces of the latent columns."""
        return LATENT // self.width

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.rows // self.head_rows

    @property
    def narrow(self) -> bool:
        """Whether keys are the rows of products, and queries their columns."""
        return self.rows == FEW
