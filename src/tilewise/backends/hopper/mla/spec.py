"""What a latent decode kernel is compiled for, as one hashable value."""

from __future__ import annotations

from dataclasses import dataclass

LATENT = 512  # columns of the values
ROPE = 64  # columns of the keys beside those
KEYS = 64  # of a block
ROWS = 64  # of a tile of queries


@dataclass(frozen=True)
class Spec:
    dtype: str  # "bf16" or "f16"
    page_rows: int  # rows that one copy brings: 64, or a page if that is smaller
    paged: bool  # else batch rows take the place of pages
    head_rows: int  # heads of a tile, a power of two to 64; its other rows are further queries
    causal: bool  # the last query sees all keys, the one before it all but one, and so on
    lengths: bool  # else all sequences have as many keys
    lse: bool
    sinks: bool
    width: int = 128  # columns of the keys that are waited for at a time: 64, 128 or 256
    gate: int = 2  # how much of the second block's scores waits for the first one's: 0 none, 1 half, 2 all
    p_buffers: int = 1  # 2: q's last columns are held in registers, and weights take their memory
    ahead: bool = False  # consumer 0 starts S of the next pair behind its last P V, not after it
    touch: bool = True  # consumer 1 rewrites its output, so that products S need not be over before it is rescaled
    late_wait: bool = True  # consumer 1 waits for P0 V0 after its exponentials, not where the compiler would
    wait_values: bool = True  # warpgroups wait for the values of a block that the other one has scored
    named: bool = False  # hardware barriers where there is a choice, not mbarriers
    prefetch: bool = False  # the next pair is brought to L2; rows of the cache lie one behind the other
    consumer_regs: int = 240
    producer_regs: int = 24

    @property
    def pieces(self) -> int:
        """Pieces of the latent columns."""
        return LATENT // self.width

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return ROWS // self.head_rows
