"""Which sequence holds which pages: all bookkeeping of `PagedKVCache`, none of its keys and values."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import InvalidArgument
from ..options import is_int
from .pool import Pool
from .prefix import LOST, ROOT
from .table import Table

NONE = np.zeros(0, dtype=np.int32)


class Sequences:
    """Sequences by id, their lengths, block tables and places in the prefix index.

    Per-sequence numbers lie in arrays; a sequence's row in them (its slot) is used again after it is freed, its id
    never. Nothing changes if a method raises.
    """

    def __init__(self, pages: int, page_size: int, device: torch.device) -> None:
        self.pool, self.page_size, self.device = Pool(pages), page_size, device
        self.table = Table(device)
        self.slot_of: dict[int, int] = {}
        self.created = 0
        self._unused: list[int] = []
        # One number for each slot: tokens, leading tokens whose ids are known, the last node of the prefix index that
        # the sequence stands at, and how many pages that is from the root
        self.length, self.known, self.node, self.depth = (np.zeros(0, dtype=np.int64) for _ in range(4))
        self.ids = np.zeros((pages, page_size), dtype=np.int64)  # token ids of each page, where they are known
        self._recent: dict[tuple[int, ...], tuple[np.ndarray, torch.Tensor]] = {}

    def slot(self, argument: str, number: object) -> int:
        slot = self.slot_of.get(number) if is_int(number) else None  # type: ignore[call-overload]
        if slot is None:
            was = is_int(number) and 0 <= number < self.created  # type: ignore[operator]
            remedy = "it was freed" if was else "create, fork and prefix_match give ids"
            raise InvalidArgument(argument, repr(number), "a live sequence", remedy)
        return int(slot)

    def slots(self, numbers: list[int]) -> tuple[np.ndarray, torch.Tensor]:
        """The slots of different sequences, on the host and on the device."""
        key = tuple(numbers)
        if (known := self._recent.get(key)) is not None:
            return known
        slots = np.array([self.slot(f"sequences[{i}]", number) for i, number in enumerate(numbers)], dtype=np.int64)
        if len(set(numbers)) < len(numbers):
            twice = next(n for i, n in enumerate(numbers) if n in numbers[:i])
            raise InvalidArgument("sequences", f"{twice} twice", "each sequence once")
        if len(self._recent) >= 64:
            self._recent.clear()
        self._recent[key] = slots, torch.from_numpy(slots).to(self.device)
        return self._recent[key]

    def pages(self, slot: int) -> np.ndarray:
        """The pages of a sequence, in order."""
        return self.table.host[slot, : -(-int(self.length[slot]) // self.page_size)]

    def create(self, pages: np.ndarray = NONE) -> tuple[int, int]:
        """A new sequence that begins with pages that are in use or kept; its id and slot."""
        if not self._unused:
            have = len(self.length)
            more = max(16, have)
            self._unused = list(range(have + more - 1, have - 1, -1))
            self.length, self.known, self.node, self.depth = (
                np.concatenate([x, np.zeros(more, dtype=np.int64)])
                for x in (self.length, self.known, self.node, self.depth)
            )
        self.table.grow(len(self.length), len(pages))
        slot, number = self._unused.pop(), self.created
        self.created += 1
        self.slot_of[number] = slot
        self.length[slot] = self.known[slot] = self.depth[slot] = 0
        self.node[slot] = ROOT
        self.pool.share(pages)
        self.table.set_row(slot, pages)
        return number, slot

    def fork(self, source: int) -> int:
        number, slot = self.create(self.pages(source).copy())
        for x in (self.length, self.known, self.node, self.depth):
            x[slot] = x[source]
        return number

    def match(self, ids: np.ndarray) -> tuple[int, int]:
        """A new sequence of the pages that are known to hold the first of `ids`; its id and length."""
        P, index = self.page_size, self.pool.index
        node, pages = ROOT, []
        for start in range(0, len(ids) - P + 1, P):
            found = index.find(node, ids[start : start + P].tobytes())
            if found is None:
                break
            node = found
            pages.append(index.nodes[node].page)
        number, slot = self.create(np.array(pages, dtype=np.int32))
        self.length[slot] = self.known[slot] = P * len(pages)
        self.node[slot], self.depth[slot] = node, len(pages)
        return number, P * len(pages)

    def truncate(self, slot: int, length: int) -> None:
        P = self.page_size
        self.pool.release(self.pages(slot)[-(-length // P) :])
        self.length[slot], self.known[slot] = length, min(length, int(self.known[slot]))
        depth = min(int(self.depth[slot]), length // P)
        self.node[slot] = self.pool.index.above(int(self.node[slot]), int(self.depth[slot]) - depth)
        self.depth[slot] = depth

    def free(self, numbers: list[int]) -> None:
        slots = self.slots(numbers)[0]
        for number, slot in zip(numbers, slots.tolist(), strict=True):
            self.pool.release(self.pages(slot))
            del self.slot_of[number]
            self._unused.append(slot)
        self._recent.clear()

    def extend(self, slots: np.ndarray, new: np.ndarray, ids: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Makes room for `new` tokens of each. Returns pages to copy from and to: shared ones that will be written."""
        P, pool = self.page_size, self.pool
        old = self.length[slots]
        after = old + new
        have, want = -(-old // P), -(-after // P)
        need = want - have
        partial = np.flatnonzero((old % P > 0) & (new > 0))
        last = self.table.host[slots[partial], have[partial] - 1]  # half filled pages that will be written
        copied = self._to_copy(last)
        pool.check(int(need.sum()) + int(copied.sum()))

        for node in pool.index.node_of[last[~copied]].tolist():  # written in place: what it was known for is gone
            if node and pool.index.holds(node):
                pool.forget(node)
        fresh = pool.take(int(need.sum()) + int(copied.sum()))
        self.table.grow(0, int(want.max(initial=0)))
        source, to = last[copied], fresh[: int(copied.sum())]
        rows = np.repeat(slots, need)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(need) - need - have, need)
        if len(source):
            np.subtract.at(pool.refs, source, 1)
            self.ids[to] = self.ids[source]
            writers = partial[copied]
            rows, columns = np.concatenate([slots[writers], rows]), np.concatenate([have[writers] - 1, columns])
        if len(fresh):
            self.table.set(rows, columns, fresh)
        self.length[slots] = after
        if ids is not None:
            self._note(slots, old, new, ids)
        return source, to

    def _to_copy(self, last: np.ndarray) -> np.ndarray:
        """Which writers of half filled pages get a copy: all of a page that others hold too, all but one otherwise."""
        refs = self.pool.refs[last]
        shared = refs > 1
        if not shared.any():
            return shared
        _, which, writers = np.unique(last, return_inverse=True, return_counts=True)
        final = np.zeros(len(last), dtype=bool)
        final[len(last) - 1 - np.unique(last[::-1], return_index=True)[1]] = True
        return shared & ~(final & (refs == writers[which]))

    def _note(self, slots: np.ndarray, old: np.ndarray, new: np.ndarray, ids: np.ndarray) -> None:
        """Token ids of new tokens, into their pages."""
        rows = np.repeat(slots, new)
        positions = np.arange(len(ids)) - np.repeat(np.cumsum(new) - new - old, new)
        self.ids[self.table.host[rows, positions // self.page_size], positions % self.page_size] = ids
        follows = self.known[slots] == old
        self.known[slots[follows]] = (old + new)[follows]

    def commit(self, numbers: list[int], lengths: np.ndarray) -> None:
        """Pages that are full of known ids, up to these lengths, are written: from now on they can be found."""
        P, index = self.page_size, self.pool.index
        live = [(self.slot_of[n], int(length)) for n, length in zip(numbers, lengths, strict=True) if n in self.slot_of]
        for slot, length in live:
            full = min(length, int(self.known[slot])) // P
            if full <= self.depth[slot]:
                continue
            node = int(self.node[slot])
            for page in self.table.host[slot, self.depth[slot] : full].tolist():
                # Another page may have been known for the same ids, and gone: then nothing follows it.
                node = index.add(node, self.ids[page].tobytes(), page) if index.holds(node) else LOST
            self.node[slot], self.depth[slot] = node, full
