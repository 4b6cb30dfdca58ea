"""Which sequence holds which pages: all bookkeeping of `PagedKVCache`, none of its keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..errors import InvalidArgument
from ..options import is_int
from .append import blocks
from .books import compiled, count_pages, give_pages, note_ids
from .pool import Pool
from .prefix import LOST, ROOT
from .table import Table

NONE = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Growth:
    """What new tokens have changed, and where they go; arrays are int32 `[B]`, in `block` one after the other."""

    block: np.ndarray
    starts: np.ndarray  # the position of each sequence's first new token
    cu: np.ndarray  # [B + 1], sums of their counts
    lengths: np.ndarray  # tokens of each, the new ones included
    pages: int  # of the longest
    copied: np.ndarray  # pages that were shared, and were written
    copies: np.ndarray  # what their writers have instead
    full: np.ndarray | None  # pages of each that the prefix index is to know when all is written


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

    def extend(self, slots: np.ndarray, new: np.ndarray, ids: np.ndarray | None) -> Growth:
        """Makes room for `new` tokens of each."""
        pool, B = self.pool, len(slots)
        copied = np.empty(B, dtype=np.bool_)
        wanted, longest, known = compiled(count_pages)(
            slots, new, self.length, self.table.host, pool.refs, pool.index.node_of, self.page_size, copied
        )
        pool.check(wanted)
        if known:
            self._forget_written(slots[(new > 0) & ~copied])
        fresh = pool.take(wanted)
        self.table.grow(0, longest)
        changes = np.empty((wanted, 4), dtype=np.int32)
        block, (starts, cu, lengths) = blocks(B, B + 1, B)
        copies = compiled(give_pages)(
            slots, new, self.length, self.table.host, pool.refs, self.page_size, copied, fresh, changes, starts, cu,
            lengths,
        )  # fmt: skip
        self.table.sent(changes)
        full = None
        if ids is not None:
            full = np.empty(B, dtype=np.int64)
            if copies:
                self.ids[changes[:copies, 2]] = self.ids[changes[:copies, 3]]
            compiled(note_ids)(
                slots, starts, new, self.table.host, self.known, self.depth, ids, self.ids, self.page_size, full
            )
        return Growth(block, starts, cu, lengths, longest, changes[:copies, 3], changes[:copies, 2], full)

    def as_they_are(self, slots: np.ndarray, queries: np.ndarray) -> Growth:
        """The same for no new tokens; `queries` of each sequence's last ones are looked at."""
        B = len(slots)
        block, (starts, cu, lengths) = blocks(B, B + 1, B)
        lengths[:] = self.length[slots]
        starts[:] = lengths - queries
        np.cumsum(queries, out=cu[1:])
        pages = -(-int(lengths.max(initial=0)) // self.page_size)
        return Growth(block, starts, cu, lengths, pages, NONE, NONE, None)

    def _forget_written(self, slots: np.ndarray) -> None:
        """Half filled pages that will be written in place: what they were known for is gone."""
        index = self.pool.index
        for slot in slots[self.length[slots] % self.page_size > 0]:
            node = int(index.node_of[self.pages(slot)[-1]])
            if node:
                self.pool.forget(node)

    def commit(self, numbers: list[int], full: np.ndarray) -> None:
        """The first `full[i]` pages of sequences hold known ids and are written: from now on they can be found."""
        index = self.pool.index
        for i in np.flatnonzero(full):
            slot = self.slot_of.get(numbers[i])
            if slot is None or full[i] <= self.depth[slot]:  # freed meanwhile
                continue
            node = int(self.node[slot])
            for page in self.table.host[slot, self.depth[slot] : full[i]].tolist():
                # Another page may have been known for the same ids, and gone: then nothing follows it.
                node = index.add(node, self.ids[page].tobytes(), page) if index.holds(node) else LOST
            self.node[slot], self.depth[slot] = node, full[i]

    def restore(self, lists: dict[str, np.ndarray], created: int, kept: int) -> None:
        """Sets up an empty cache from what `save.py` has written; pages are the first ones, kept ones last."""
        pool, U = self.pool, len(lists["ids"])
        self.ids[:U] = lists["ids"]
        assert (np.sort(pool.take(U)) == np.arange(U)).all()  # an empty pool gives its first pages
        for number, parent, page in lists["nodes"].tolist():
            pool.index.restore(number, parent, self.ids[page].tobytes(), page)
        pool.refs[:U] = 0
        for i, number in enumerate(lists["sequences"].tolist()):
            length = int(lists["length"][i])
            self.created = number
            _, slot = self.create(lists["table"][i, : -(-length // self.page_size)].copy())
            self.length[slot] = length
            for name in ("known", "node", "depth"):
                getattr(self, name)[slot] = lists[name][i]
        self.created = created
        pool.kept = dict.fromkeys(range(U - kept, U))
