"""What a kernel is compiled for, as one hashable value: its only compile-time argument."""

from __future__ import annotations

from dataclasses import dataclass

from ...gpu.flags import Flags


@dataclass(frozen=True)
class Spec(Flags):
    """Compile-time parameters of a kernel. Sizes, strides, windows and lengths are run-time arguments."""

    dtype: str  # "bf16" or "f16"
    chunk_d: int  # columns of a chunk of q and k in shared memory, a power of two
    chunks: int  # chunks that cover the head dim; columns past it are zeros, by TMA
    DV: int  # columns of a tile of v and of the output, a power of two
    value_tiles: int  # tiles of columns that cover the value dim, each a work tile of its own
    BN: int  # keys of a tile
    consumers: int  # warpgroups of 64 query rows each
    q_stages: int  # work tiles whose query rows are in shared memory
    k_stages: int  # chunks of keys in shared memory
    v_stages: int  # tiles of values in their own ring; 0: they are in the ring of the keys, in pieces
    out_aliases_q_chunks: int  # leading chunks of q whose shared memory the output tile reuses; 0: none
    out_columns: int  # columns of the output in that buffer at a time
    overlaps: bool  # in tiles without hidden cells, a warpgroup's softmax overlaps its own P V
    late_wait: bool  # P V is waited for after the exponentials, not where the compiler would
    max_free: bool  # tiles without hidden cells keep the m of those before them (see softmax.py)
    consumer_regs: int
    producer_regs: int
    guard: bool  # tiles are flagged if not finite: hidden values, or overflow, may be the cause (see nonfinite.py)
    blocks: bool  # tiles come from the lists of block indices
    fixup: bool  # recomputes the tiles that the launch before has flagged
    prefetch_tile: bool  # the next work tile is fetched before the keys of this one are loaded, not after

    @property
    def BM(self) -> int:
        """Query rows of a tile."""
        return 64 * self.consumers

    @property
    def pieces(self) -> int:
        """Pieces of a tile of values: as large as a chunk of keys where they share a ring."""
        return 1 if self.v_stages else self.DV // self.chunk_d

    @property
    def masked(self) -> bool:
        """Whether any tile may hold a hidden cell."""
        return self.hides or self.blocks

    @property
    def capped(self) -> bool:
        """Whether logits are a softcap times a tanh, and nothing is added to them."""
        return self.softcap and not (self.exact_tanh or self.alibi)

    @property
    def hides(self) -> bool:
        """Whether lengths or rules may hide cells."""
        return self.tail or self.rules.hides_left or self.rules.hides_right
