"""Dense masks by name, as models and serving engines use them: for benchmarks, tests and pictures."""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK = 128  # block size of the block-sparse pattern
LOCAL = 512  # keys of the window, and rows of a prefix


def window(Lq: int, Lk: int) -> torch.Tensor:
    """A sliding window as a dense mask: the last 512 keys of each query, its own included."""
    return _between(Lq, Lk, LOCAL)


def documents(Lq: int, Lk: int) -> torch.Tensor:
    """Packed documents of many lengths; causal in each."""
    ends = torch.tensor([0.05, 0.07, 0.2, 0.22, 0.3, 0.55, 0.6, 0.85, 0.9], dtype=torch.float32, device="cpu") * Lk
    of = torch.bucketize(torch.arange(Lk, device="cpu").float(), ends, right=True)
    return _between(Lq, Lk) & (of[Lk - Lq :, None] == of[None, :])


def prefix(Lq: int, Lk: int) -> torch.Tensor:
    """Prefix LM: a prefix (an image, a question) with full attention within it, causal after it."""
    return _between(Lq, Lk) | (torch.arange(Lk, device="cpu") < min(LOCAL, Lk // 4))


def tree(Lq: int, Lk: int) -> torch.Tensor:
    """Speculative decoding: the whole cache, and among the last `Lq` tokens the ancestors in a binary tree."""
    own = torch.eye(Lq, dtype=torch.bool, device="cpu")
    for i in range(1, Lq):
        own[i] |= own[(i - 1) // 2]
    return torch.cat([torch.ones(Lq, Lk - Lq, dtype=torch.bool, device="cpu"), own], dim=1)


def blocks(Lq: int, Lk: int) -> torch.Tensor:
    """Block-sparse: each block of 128 queries sees the first block of keys, its own, two before it and one far away."""
    nq, nk = -(-Lq // BLOCK), -(-Lk // BLOCK)
    i, j = torch.arange(nq, device="cpu")[:, None] + nk - nq, torch.arange(nk, device="cpu")
    near = (j <= i) & (i - j <= 2)
    far = (i * 7 + 3) % nk
    states = near | (j == 0) | (j == far)
    return states.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:Lq, :Lk]


def _between(Lq: int, Lk: int, width: int | None = None) -> torch.Tensor:
    """Causal, aligned to the bottom right, with at most `width` keys."""
    back = torch.arange(Lk - Lq, Lk, device="cpu")[:, None] - torch.arange(Lk, device="cpu")
    return (back >= 0) if width is None else (back >= 0) & (back < width)


PATTERNS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "window": window,
    "documents": documents,
    "prefix": prefix,
    "tree": tree,
    "blocks": blocks,
}


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same mask as an additive one."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
