"""The block manager of `PagedKVCache`: which sequence has which pages. It does not touch keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import InvalidArgument
from .block_loops import compiled, count_pages, give_pages, mark_written, note_ids
from .block_pool import Pool
from .block_table import Table
from .integers import integer
from .prefix_cache import LOST, ROOT
from .stats import tokens_of_pages
from .upload import blocks

NONE = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class Growth:
    """The result of making room for new tokens. Its arrays are int32 `[B]`, pieces of `block`."""

    block: np.ndarray
    starts: np.ndarray  # the position of each sequence's first new token
    cu: np.ndarray  # [B + 1], cumulative numbers of new tokens
    lengths: np.ndarray  # tokens of each, the new ones included
    pages: int  # of the longest sequence
    changes: np.ndarray  # [pages, 4]: row and column of the block table, its new page, the page copied to it
    copies: int  # leading rows of `changes` that are copies of shared pages
    stamp: int  # `Sequences.changes` after this change: equal as long as nothing else has changed
    known: np.ndarray | None = None  # leading tokens of each sequence whose ids were known before
    full: np.ndarray | None = None  # leading pages of each sequence to be indexed once all layers are written


class Sequences:
    """Sequences by id: their lengths, block tables and nodes of the prefix index.

    Numbers of sequences are in arrays. A sequence's index in them, its slot, is reused after it is freed; its id is
    not. A method that raises has changed nothing.
    """

    def __init__(self, pages: int, page_size: int, layers: int, device: torch.device) -> None:
        self.pool, self.page_size, self.device = Pool(pages), page_size, device
        self.table = Table(device)
        self.slot_of: dict[int, int] = {}
        self.created = 0
        self._unused: list[int] = []
        # For each slot: tokens, leading tokens with known ids, the sequence's last node in the prefix index, and the
        # depth of that node in pages
        self.length, self.known, self.node, self.depth = (np.zeros(0, dtype=np.int64) for _ in range(4))
        self.written = np.zeros((layers, 0), dtype=np.int64)  # leading tokens whose keys and values are written
        # Batches keep the versions of their sequences. A version counts the changes of a slot and is never reset, so a
        # batch of a freed sequence does not match the next one in its slot. `changes` counts changes of any slot.
        self.version, self.changes = np.zeros(0, dtype=np.int64), 0
        self.ids = np.zeros((pages, page_size), dtype=np.int64)  # token ids of each page, where they are known
        self._recent: dict[tuple[int, ...], tuple[np.ndarray, torch.Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_recent": {}, "ids": self.known_ids()}

    def known_ids(self) -> np.ndarray:
        """The token ids of each page, 0 where they are not known: no ids of earlier users of the page."""
        known = np.arange(self.page_size) < tokens_of_pages(self, self.known)[:, None]
        return np.where(known, self.ids, 0)

    def slot(self, argument: str, sequence: object) -> int:
        number = integer(sequence)
        slot = None if number is None else self.slot_of.get(number)
        if slot is None:
            was = number is not None and 0 <= number < self.created
            remedy = "it was freed" if was else "create, fork and prefix_match give ids"
            raise InvalidArgument(argument, repr(sequence), "a live sequence", remedy)
        return int(slot)

    def slots(self, numbers: list[int]) -> tuple[np.ndarray, torch.Tensor]:
        """The slots of distinct sequences, on the host and on the device."""
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
        """Creates a sequence that begins with pages in use or kept; returns its id and slot."""
        if not self._unused:
            have = len(self.length)
            more = max(16, have)
            written = np.pad(self.written, ((0, 0), (0, more)))  # first: there may be no memory for it
            self.length, self.known, self.node, self.depth, self.version = (
                np.concatenate([x, np.zeros(more, dtype=np.int64)])
                for x in (self.length, self.known, self.node, self.depth, self.version)
            )
            self.written, self._unused = written, list(range(have + more - 1, have - 1, -1))
        self.table.grow(len(self.length), len(pages))
        slot, number = self._unused.pop(), self.created
        self.created += 1
        self.slot_of[number] = slot
        self.length[slot] = self.known[slot] = self.depth[slot] = self.written[:, slot] = 0
        self.node[slot] = ROOT
        self.pool.share(pages)
        self.table.set_row(slot, pages)
        return number, slot

    def fork(self, argument: str, sequence: object) -> int:
        source = self.slot(argument, sequence)
        self.check_written(argument, sequence, source)
        number, slot = self.create(self.pages(source).copy())
        for x in (self.length, self.known, self.node, self.depth, *self.written):
            x[slot] = x[source]
        return number

    def match(self, ids: np.ndarray) -> tuple[int, int]:
        """Creates a sequence of the indexed pages that hold the longest prefix of `ids`; returns its id and length."""
        P, index = self.page_size, self.pool.index
        node, pages = ROOT, []
        for start in range(0, len(ids) - P + 1, P):
            child = index.find(node, ids[start : start + P].tobytes())
            if child is None:
                break
            node = child
            pages.append(index.nodes[node].page)
        number, slot = self.create(np.array(pages, dtype=np.int32))
        self.length[slot] = self.known[slot] = self.written[:, slot] = P * len(pages)
        self.node[slot], self.depth[slot] = node, len(pages)
        return number, P * len(pages)

    def truncate(self, slot: int, length: int) -> None:
        if length == self.length[slot]:
            return
        P = self.page_size
        self.pool.release(self.pages(slot)[-(-length // P) :])
        self.length[slot], self.known[slot] = length, min(length, int(self.known[slot]))
        depth = min(int(self.depth[slot]), length // P)
        self.node[slot] = self.pool.index.above(int(self.node[slot]), int(self.depth[slot]) - depth)
        self.depth[slot] = depth
        self.written[:, slot] = np.minimum(self.written[:, slot], length)
        self._changed(slot)

    def _changed(self, slot: int) -> None:
        self.version[slot] += 1
        self.changes += 1

    def free(self, numbers: list[int]) -> None:
        slots = self.slots(numbers)[0]
        for number, slot in zip(numbers, slots.tolist(), strict=True):
            self.pool.release(self.pages(slot))
            del self.slot_of[number]
            self._changed(slot)
            self._unused.append(slot)
        self._recent.clear()

    def extend(self, slots: np.ndarray, new: np.ndarray, ids: np.ndarray | None) -> Growth:
        """Makes room for `new[b]` tokens in each sequence."""
        pool, B = self.pool, len(slots)
        copied = np.empty(B, dtype=np.bool_)
        wanted, longest, known = compiled(count_pages)(
            slots, new, self.length, self.table.host, pool.refs, pool.index.node_of, self.page_size, copied
        )
        pool.check(wanted)
        if known:
            self._forget_written(slots[(new > 0) & ~copied])
        fresh = pool.take(wanted)
        try:
            self.table.grow(0, longest)
            changes = np.empty((wanted, 4), dtype=np.int32)
            block, (starts, cu, lengths) = blocks(B, B + 1, B)
            copies = compiled(give_pages)(
                slots, new, self.length, self.table.host, pool.refs, self.page_size, copied, fresh, changes, starts, cu,
                lengths, self.version,
            )  # fmt: skip
        except BaseException:
            pool.release(fresh)
            raise
        self.changes += 1
        before, full = (None, None) if ids is None else (self.known[slots], np.empty(B, dtype=np.int64))
        growth = Growth(block, starts, cu, lengths, longest, changes, copies, self.changes, before, full)
        try:
            self.table.sent(changes)
            if copies:  # even without ids: those of the copied pages' tokens may be known
                self.ids[changes[:copies, 2]] = self.ids[changes[:copies, 3]]
            if ids is not None:
                compiled(note_ids)(
                    slots, starts, new, self.table.host, self.known, self.depth, ids, self.ids, self.page_size, full
                )
        except BaseException:
            self.undo(slots, growth)
            raise
        return growth

    def undo(self, slots: np.ndarray, growth: Growth) -> None:
        """Undoes `extend`. Prefixes that were evicted for it stay evicted.

        Copies of shared pages are undone too, unless anything has changed since: the shared page may be free by now.
        """
        last = growth.stamp == self.changes
        copied = growth.changes[: growth.copies if last else 0].copy()
        copied[:, 2] = copied[:, 3]
        self.table.host[copied[:, 0], copied[:, 1]] = copied[:, 2]
        np.add.at(self.pool.refs, copied[:, 2], 1)  # several may be copies of one page
        self.pool.release(growth.changes[0 if last else growth.copies :, 2])
        self.length[slots] = growth.starts
        self.written[:, slots] = np.minimum(self.written[:, slots], growth.starts)
        if growth.known is not None:
            self.known[slots] = growth.known
        self.version[slots] += np.where(last, -(growth.lengths > growth.starts).astype(np.int64), 1)
        self.changes += 1
        self.table.sent(copied)

    def as_they_are(self, slots: np.ndarray, queries: np.ndarray) -> Growth:
        """A `Growth` without new tokens, for `view`: the last `queries[b]` tokens of each sequence are its queries."""
        B = len(slots)
        block, (starts, cu, lengths) = blocks(B, B + 1, B)
        lengths[:] = self.length[slots]
        starts[:] = lengths - queries
        np.cumsum(queries, out=cu[1:])
        pages = -(-int(lengths.max(initial=0)) // self.page_size)
        return Growth(block, starts, cu, lengths, pages, NONE.reshape(0, 4), 0, self.changes)

    def _forget_written(self, slots: np.ndarray) -> None:
        """Removes half-filled pages from the prefix index that are about to be overwritten in place."""
        index = self.pool.index
        for slot in slots[self.length[slots] % self.page_size > 0]:
            node = int(index.node_of[self.pages(slot)[-1]])
            if node:
                self.pool.forget(node)

    def commit(self, numbers: list[int], full: np.ndarray) -> None:
        """Adds the first `full[i]` pages of each sequence, all written, to the prefix index."""
        index = self.pool.index
        for i in np.flatnonzero(full):
            slot = self.slot_of.get(numbers[i])
            if slot is None:  # freed in the meantime
                continue
            pages = min(int(full[i]), min(self.written[:, slot].tolist()) // self.page_size)
            if pages <= self.depth[slot]:
                continue
            node = int(self.node[slot])
            for page in self.table.host[slot, self.depth[slot] : pages].tolist():
                # Another page with the same ids may have been indexed and evicted: then nothing can follow it.
                node = index.add(node, self.ids[page].tobytes(), page) if index.holds(node) else LOST
            self.node[slot], self.depth[slot] = node, pages

    def wrote(self, layer: int, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> int:
        """Marks new tokens of a layer as written: see `mark_written`."""
        return int(compiled(mark_written)(self.written[layer], slots, starts, lengths))

    def check_unchanged(self, numbers: list[int], slots: np.ndarray, versions: np.ndarray) -> None:
        """Raises if a sequence has another version than when its batch was made."""
        changed = np.flatnonzero(self.version[slots] != versions)
        if len(changed):
            number = numbers[changed[0]]
            how = "changed" if number in self.slot_of else "freed"
            given, remedy = f"one made before sequence {number} was {how}", "call extend or view again"
            raise InvalidArgument("batch", given, "an up-to-date batch", remedy)

    def check_written(self, argument: str, number: object, slot: int, layer: int | None = None) -> None:
        """Raises if tokens that `extend` made room for were never written: their memory holds old data."""
        written = int(self.written[:, slot].min() if layer is None else self.written[layer, slot])
        if written < self.length[slot]:
            missing = int(self.length[slot]) - written
            where = "" if layer is None else f" in layer {layer}"
            raise InvalidArgument(
                argument, f"{number}, whose last {missing} tokens are not all written{where}", "one that is written",
                f"write them by the batch of extend, or truncate the sequence to {written}",
            )  # fmt: skip

    def restore(self, lists: dict[str, np.ndarray], created: int, kept: int) -> None:
        """Fills an empty cache from what `save.py` wrote. Its pages are the first ones of the pool, kept ones last."""
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
            self.length[slot] = self.written[:, slot] = length
            for name in ("known", "node", "depth"):
                getattr(self, name)[slot] = lists[name][i]
        self.created = created
        pool.kept = dict.fromkeys(range(U - kept, U))
