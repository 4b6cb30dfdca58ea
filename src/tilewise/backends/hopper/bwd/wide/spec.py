"""What a kernel of wide heads is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class WideSpec:
    """Outer rows stay: queries for dQ, keys for dK and dV. Inner rows come one block after the other."""

    dtype: str
    D: int  # columns of a tile of q and k, a power of two, and
    tail: int  # more of them, perhaps none
    DV: int  # and of a tile of v
    of_queries: bool  # dQ
    BI: int  # inner rows of a step
    u_stages: int  # of Q or K, the inner rows
    w_stages: int  # and of dO or V
    chunks: int = 1  # of D columns of q, k and of DV columns of v; several: see split.py
    only: str = ""  # "k" or "v": dK or dV alone
    roles: bool = False  # the consumers have the same 64 keys: the first dV, the second dK; else each has 64 outer rows
    hides_right: bool = False  # causal, or a window's right side
    hides_left: bool = False
    packed: bool = False
    lengths: bool = False
    offset: str = "int"  # of the queries: "int", "rows" or "end", as in `MaskRules`
    low_edges: int = 0  # what hides cells of the first inner blocks (`consumer.hide`)
    high_edges: int = 0  # and of the last ones
    softcap: bool = False
    exact_tanh: bool = False
    guarded: bool = False  # what is hidden may not be finite: a call whose gradients are not is flagged
    consumer_regs: int = 240
    producer_regs: int = 24
    near_tanh: ClassVar[bool] = False  # which has not been timed in these kernels
    mask: ClassVar[bool] = False  # none
    dmask: ClassVar[bool] = False
    stats_block: ClassVar[int] = 64  # query rows that a block of statistics has

    @property
    def BO(self) -> int:
        """Outer rows of a program."""
        return 64 if self.roles or self.chunks > 1 else 128
