"""The lists of tiles that a mask leaves (`classify.py`), made again for another mask of the same form."""

from __future__ import annotations

import torch

from .kernel import Ready


class Listing:
    """The launches that make a mask's lists again."""

    def __init__(self, classifying: Ready | None, compacting: Ready, rows: int, n: int) -> None:
        self.classifying, self.compacting = classifying, compacting
        self.states = rows * n
        self.rank_at = -(-rows * n // 4) * 4  # a multiple of 16 bytes
        self.end = self.rank_at + rows * (n + 1)

    def __call__(self, mask: int, device: torch.device) -> torch.Tensor:
        """LIST and, from `rank_at` on, RANK."""
        lists = torch.empty(self.end, dtype=torch.int32, device=device)
        at = lists.data_ptr()
        if self.classifying is None:
            self.compacting([at, at + 4 * self.rank_at])
            return lists
        states = torch.empty(self.states, dtype=torch.uint8, device=device)
        self.classifying([mask, states.data_ptr()])
        self.compacting([states.data_ptr(), at, at + 4 * self.rank_at])
        return lists
