"""What a backward kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BackwardSpec:
    dtype: str
    D: int
    BM: int
    q_stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2
    dq_stages: int = 2
    causal: bool = False
    masked: bool = False  # some tiles are seen in part
    deterministic: bool = True
    late_dk: bool = True  # dK is under way while S and dP of the next block start
    ds_regs: bool = True  # dK takes dS from registers, not from shared memory
    early_dv: bool = False  # dV is started before dS is computed
    swizzle: int = 1
    consumer_regs: int = 240
    producer_regs: int = 24
