"""What a wide-head kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class WideSpec:
    """Outer rows stay in shared memory: queries for dQ, keys for dK and dV. The mainloop is over inner rows."""

    dtype: str
    D: int  # columns of a tile of q and k, a power of two
    tail: int  # columns of q and k beyond D, perhaps 0
    DV: int  # columns of a tile of v
    of_queries: bool  # dQ
    BI: int  # inner rows of a step
    u_stages: int  # of Q or K, the inner rows
    w_stages: int  # and of dO or V
    chunks: int = 1  # of D columns of q and k, and of DV columns of v; several: see split.py
    only: str = ""  # "k" or "v": dK or dV alone
    roles: bool = False  # the consumers have the same 64 keys: the first dV, the second dK; else each has 64 outer rows
    hides_right: bool = False  # causal, or a window's right side
    hides_left: bool = False
    packed: bool = False
    lengths: bool = False
    offset: str = "int"  # of the queries: "int", "rows" or "end", as in `MaskRules`
    low_edges: int = 0  # edge flags (`consumer.hide`) of the first inner blocks
    high_edges: int = 0  # and of the last ones
    softcap: bool = False
    exact_tanh: bool = False
    guarded: bool = False  # hidden inputs may be non-finite: a call with non-finite gradients is flagged
    consumer_regs: int = 240
    producer_regs: int = 24
    near_tanh: ClassVar[bool] = False  # not timed in these kernels
    mask: ClassVar[bool] = False  # none
    dmask: ClassVar[bool] = False
    stats_block: ClassVar[int] = 64  # query rows of a block of statistics

    @property
    def BO(self) -> int:
        """Outer rows of a program."""
        return 64 if self.roles or self.chunks > 1 else 128
