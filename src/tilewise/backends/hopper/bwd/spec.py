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
    hides_right: bool = False  # causal, or a window's right side
    hides_left: bool = False
    packed: bool = False
    lengths: bool = False
    offset: str = "int"  # of the queries: "int", "rows" or "end", as in `MaskRules`
    right_edges: int = 0  # edge flags (`consumer.hide`) of blocks at the right edge, or at the end of the keys
    left_edges: int = 0  # and of blocks at the left edge
    softcap: bool = False
    exact_tanh: bool = False
    near_tanh: bool = False  # tanh of small scores by a polynomial (`softcap.near_tanh`)
    mask: bool = False  # an additive one
    mask_tiles: bool = False  # its tiles are loaded by TMA; else each thread loads its own cells
    near: bool = True  # offsets of cells within a tile are 32 bits wide
    dmask: bool = False  # the gradient of each of its cells is stored
    dmask_tiles: bool = False  # by TMA, from the dS tile that the product of dQ reads
    guarded: bool = False  # hidden inputs may be non-finite: a call with non-finite gradients is flagged
    persistent: bool = False  # programs take key blocks from a counter until none is left
    converts: bool = False  # of a persistent kernel: a converter warp writes dQ in q's dtype
    pieces: int = 4  # pieces of dQ that the converter has in flight
    direct: bool = False  # dK and dV are stored from registers, not by TMA
    split: bool = False  # several programs share a key block: each takes some query blocks and stores float32 partials
    consumer_regs: int = 240
    producer_regs: int = 24

    @property
    def row_lse(self) -> bool:
        """Whether lse is loaded in float32, to be subtracted in registers; else the scores' product subtracts it."""
        return self.softcap or self.mask

    @property
    def mask_first(self) -> bool:
        """Whether the mask's cells initialise the accumulator of the scores, except in blocks with a huge lse."""
        return self.mask and not self.softcap
