"""Statistics of a `PagedKVCache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .block_manager import Sequences


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The state of a `PagedKVCache`."""

    pages: int
    used: int  # pages of sequences, each counted once
    shared: int  # of those, pages of several sequences
    kept: int  # unused pages that hold cached prefixes; given up when pages are needed
    free: int
    sequences: int
    tokens: int  # in used pages; those of shared pages count once
    fragmentation: float  # share of slots in used pages that hold no token
    nbytes: int


def tokens_of_pages(sequences: Sequences, lengths: np.ndarray, indexed: bool = True) -> np.ndarray:
    """Tokens of each page, int64 `[pages]`, if sequences have `lengths` (one for each slot).

    Indexed pages count as full even if their sequences are shorter, unless `indexed` is False.
    """
    size = sequences.page_size
    filled = np.zeros(sequences.pool.pages, dtype=np.int64)
    if indexed:
        filled[sequences.pool.index.node_of > 0] = size
    for slot in sequences.slot_of.values():
        length = int(lengths[slot])
        pages = sequences.table.host[slot, : -(-length // size)]
        if len(pages):
            filled[pages[:-1]] = size
            filled[pages[-1]] = max(filled[pages[-1]], length - (len(pages) - 1) * size)
    return filled


def stats_of(sequences: Sequences, nbytes: int) -> PoolStats:
    pool, size = sequences.pool, sequences.page_size
    filled = tokens_of_pages(sequences, sequences.length, indexed=False)
    used, tokens = int((pool.refs > 0).sum()), int(filled.sum())
    return PoolStats(
        pages=pool.pages,
        used=used,
        shared=int((pool.refs > 1).sum()),
        kept=len(pool.kept),
        free=pool.free,
        sequences=len(sequences.slot_of),
        tokens=tokens,
        fragmentation=1 - tokens / (used * size) if used else 0.0,
        nbytes=nbytes,
    )
