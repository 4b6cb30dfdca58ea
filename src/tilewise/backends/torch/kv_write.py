"""Cache writes in plain torch, on any device; the reference for the kernels."""

from __future__ import annotations

import torch

from ...core.kv_store import Store, WriteSlots


class Append:
    """Stores rows of K and V, each `[B or pages, Hkv, slots, columns]`: position p into slot `p % wrap`."""

    def __init__(self, k: Store, v: Store, wrap: int) -> None:
        self.k, self.v, self.wrap = k, v, wrap

    def __call__(self, k: torch.Tensor, v: torch.Tensor, slots: WriteSlots) -> None:
        counts = slots.cu.diff()  # [B]
        tokens = int(slots.cu[-1]) if slots.padded else slots.tokens
        rows = torch.repeat_interleave(counts, output_size=tokens)  # [T], the sequence of each token
        step = torch.arange(tokens, device=rows.device) - slots.cu[rows]
        position = slots.starts[rows] + step
        if slots.table is None:
            kept = (step >= counts[rows] - self.wrap).nonzero()[:, 0]  # the end of a chunk longer than the ring
            rows, step, position = rows[kept], step[kept], position[kept]
            outer = rows
        else:
            kept = torch.arange(tokens, device=rows.device)
            outer = slots.table[rows, position // self.wrap].long()
        for store, x in ((self.k, k), (self.v, v)):
            if store.inside:
                continue
            new = x[0, :, kept].transpose(0, 1) if slots.packed else x[rows, :, step]  # [T, Hkv, D]
            store.assign((outer, slice(None), position % self.wrap), new)
