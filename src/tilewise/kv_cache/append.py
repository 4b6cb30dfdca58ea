"""Writing new rows into a cache: by the kernel of the device, or in plain torch where there is none."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .formats import Store


@dataclass(slots=True)
class Places:
    """Where the new tokens of a call come from and go to: token i of sequence b to position `starts[b] + i`."""

    starts: torch.Tensor  # int32 [B]
    cu: torch.Tensor  # int32 [B + 1]: sums of the sequences' counts
    tokens: int  # in all
    packed: bool  # rows come as [1, Hkv, T, D], sequence b's from cu[b] on; else as [B, Hkv, L, D], from 0 on
    table: torch.Tensor | None = None  # int32 [B, pages]


# Rows of K and V as [B or 1, Hkv, L or T, D], and their places
Writer = Callable[[torch.Tensor, torch.Tensor, Places], None]


def blocks(*sizes: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """An int32 array, and pieces of it that each begin at a multiple of 16 bytes, as kernels like it."""
    block = np.zeros(sum(n + 3 & ~3 for n in sizes), dtype=np.int32)
    return block, pieces(block, *sizes)


def pieces(block: Any, *sizes: int) -> list[Any]:
    """The same pieces of a block, an array or a tensor."""
    found, start = [], 0
    for n in sizes:
        found.append(block[start : start + n])
        start += n + 3 & ~3
    return found


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Ints as int32 on the device, by one transfer."""
    sizes = [len(x) for x in arrays]
    block, parts = blocks(*sizes)
    for part, x in zip(parts, arrays, strict=True):
        part[:] = x
    return pieces(torch.from_numpy(block).to(device, non_blocking=True), *sizes)


def writer(k: Store, v: Store, wrap: int) -> Writer:
    """What writes into `k` and `v`, each `[B or pages, Hkv, slots, columns]`: position p into slot `p % wrap`."""
    device = k.data.device.type
    if device == "cpu":
        from ..backends import cpu

        if cpu.unusable() is None:
            from ..backends.cpu.kv_write import Append

            return Append(k, v, wrap)
    if device == "cuda" and importlib.util.find_spec("triton") is not None:
        from ..backends.triton.kv_write import Append as OnGpu

        return OnGpu(k, v, wrap)
    return InTorch(k, v, wrap)


class InTorch:
    """The same in plain torch, on any device; it says what the kernels must do."""

    def __init__(self, k: Store, v: Store, wrap: int) -> None:
        self.k, self.v, self.wrap = k, v, wrap

    def __call__(self, k: torch.Tensor, v: torch.Tensor, places: Places) -> None:
        counts = places.cu.diff()  # [B]
        rows = torch.repeat_interleave(counts, output_size=places.tokens)  # [T], the sequence of each token
        step = torch.arange(places.tokens, device=rows.device) - places.cu[rows]
        position = places.starts[rows] + step
        if places.table is None:
            kept = (step >= counts[rows] - self.wrap).nonzero()[:, 0]  # of a chunk longer than a ring, its end
            rows, step, position = rows[kept], step[kept], position[kept]
            outer = rows
        else:
            kept = torch.arange(places.tokens, device=rows.device)
            outer = places.table[rows, position // self.wrap].long()
        for store, x in ((self.k, k), (self.v, v)):
            new = x[0, :, kept].transpose(0, 1) if places.packed else x[rows, :, step]  # [T, Hkv, D]
            store.assign((outer, slice(None), position % self.wrap), new)
