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
    dq_stages: int = 2
    causal: bool = False
    masked: bool = False  # some tiles are seen in part
    deterministic: bool = True
    consumer_regs: int = 240
    producer_regs: int = 24
