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
    right_edges: int = 0  # what hides cells of blocks at the right edge, or at the end of the keys (`consumer.hide`)
    left_edges: int = 0  # and of those at the left edge
    softcap: bool = False
    exact_tanh: bool = False
    near_tanh: bool = False  # tanh of small scores by a polynomial (`softcap.near_tanh`)
    mask: bool = False  # an additive one
    mask_tiles: bool = False  # its cells come by TMA; else each thread reads its own
    near: bool = True  # offsets of cells within a tile are 32 bits wide
    dmask: bool = False  # the gradient of each of its cells is stored
    dmask_tiles: bool = False  # by TMA: it is what dS is for dQ
    guarded: bool = False  # what is hidden may not be finite: a call whose gradients are not is flagged
    clean: bool = False  # the fix-up of a flagged call: NaN and Inf in q, k and dO count as 0 (clean.py)
    persistent: bool = False  # a program takes key blocks one after the other, from a counter
    converts: bool = False  # of a persistent kernel: it gives dQ in q's dtype
    pieces: int = 4  # of dQ that the converter has under way
    direct: bool = False  # dK and dV go from registers to global memory
    split: bool = False  # several programs share a key block: each takes some query blocks, and has float32 partials
    consumer_regs: int = 240
    producer_regs: int = 24

    @property
    def row_lse(self) -> bool:
        """Whether lse is taken off the logits row by row; else the scores' product does it."""
        return self.softcap or self.mask

    @property
    def mask_first(self) -> bool:
        """Whether the scores' product is added to the mask's cells, but where a block's lse is huge."""
        return self.mask and not self.softcap
