"""The page pool: which pages are free, how many sequences use each, and which unused ones are kept."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..errors import CacheFull
from .prefix_cache import PrefixIndex


class Pool:
    """Page numbers with a free list and reference counts.

    A page is free, used (by one or more sequences), or kept: unused, but in the prefix index. When free pages run
    out, kept pages are given up, the least recently used first.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.refs = np.zeros(pages, dtype=np.int32)
        self.index = PrefixIndex(pages)
        self.kept: dict[int, None] = {}  # in the order in which they became unused: LRU
        self._stack = np.arange(pages - 1, -1, -1, dtype=np.int32)  # pages [0, free); the last is next
        self.free = pages

    @property
    def available(self) -> int:
        return self.free + len(self.kept)

    def check(self, wanted: int) -> None:
        """Raises `CacheFull` unless `wanted` pages are available."""
        if wanted > self.available:
            raise CacheFull(
                f"{wanted} pages are needed, {self.available} of {self.pages} are free; free or truncate sequences, or "
                f"make the cache larger. Nothing has changed"
            )

    def take(self, wanted: int) -> np.ndarray:
        """Takes pages for one user each, int32; gives up kept pages if needed."""
        self.check(wanted)
        while self.free < wanted:
            self.forget(int(self.index.node_of[next(iter(self.kept))]))
        self.free -= wanted
        pages = self._stack[self.free : self.free + wanted][::-1].copy()
        self.refs[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """Adds a user to each page; no page may be listed twice."""
        if self.kept:
            for page in pages[self.refs[pages] == 0].tolist():
                del self.kept[page]
        self.refs[pages] += 1

    def release(self, pages: np.ndarray) -> None:
        """Removes a user from each page, the last pages first; no page may be listed twice."""
        self.refs[pages] -= 1
        unused = pages[self.refs[pages] == 0][::-1]
        known = self.index.node_of[unused] != 0
        for page in unused[known].tolist():
            self.kept[page] = None
        self._give(unused[~known])

    def forget(self, node: int) -> None:
        """Removes a node and its descendants from the index, and frees pages that were only kept for them."""
        gone = [page for page in self.index.drop(node) if self.refs[page] == 0]
        for page in gone:
            del self.kept[page]
        self._give(gone)

    def _give(self, pages: np.ndarray | Iterable[int]) -> None:
        pages = np.asarray(pages, dtype=np.int32)
        self._stack[self.free : self.free + len(pages)] = pages
        self.free += len(pages)
