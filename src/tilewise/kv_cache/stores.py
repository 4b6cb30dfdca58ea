"""The memory of caches, and who owns which part of it. Caches, batches, copies and files all work on these classes."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.forks import new_lock
from ..core.kv_store import Store, Writer
from ..dispatch import planner
from .block_manager import Growth, Sequences
from .cascade import Split
from .formats import operand

if TYPE_CHECKING:
    from .contiguous import KVCache
    from .paged import PagedKVCache


def named_tensors(k: Store, v: Store) -> list[tuple[str, torch.Tensor]]:
    """The tensors of K and V, by their names in files."""
    parts = [("k", k.data), ("k_scales", k.scales)]
    parts += [] if v.inside else [("v", v.data), ("v_scales", v.scales)]
    return [(name, x) for name, x in parts if x is not None]


def nbytes(k: Store, v: Store) -> int:
    return sum(x.nbytes for _, x in named_tensors(k, v))


def empty_rows(cache: KVCache) -> tuple[Store, Store]:
    """Memory for K and V."""
    return _empty(cache, cache.batch, cache.kv_heads, cache.capacity)


def empty_pages(cache: PagedKVCache) -> tuple[Store, Store]:
    return _empty(cache, cache.layers, cache.num_pages, cache.page_size, cache.kv_heads)


def _empty(cache: KVCache | PagedKVCache, *rows: int) -> tuple[Store, Store]:
    k = cache.k_format.empty(*rows, device=cache.device)
    return k, k.first(cache.v_format) if cache.latent else cache.v_format.empty(*rows, device=cache.device)


def _copied(k: Store, v: Store, memo: dict[int, Any]) -> tuple[Store, Store]:
    k = copy.deepcopy(k, memo)
    return k, k.first(v.format) if v.inside else copy.deepcopy(v, memo)


class RowStore:
    """The rows of a `KVCache`, `[B, Hkv, slots, columns]`, and the positions that each of them holds.

    Attributes:
        length: int32 `[B]`, NumPy: tokens that were appended to each row; `on_device` the same on the device.
        first: int32 `[B]`, NumPy: the oldest position held; 0 unless it is a ring.
    """

    def __init__(self, k: Store, v: Store, length: np.ndarray, first: np.ndarray) -> None:
        self.k, self.v, self.length, self.first = k, v, length, first
        self.write: Writer = planner.writer(k, v, k.data.shape[2])
        self.on_device = torch.from_numpy(length).to(k.data.device)  # on the CPU the same memory

    def copy(self, memo: dict[int, Any]) -> RowStore:
        k, v = _copied(self.k, self.v, memo)
        return RowStore(k, v, self.length.copy(), self.first.copy())

    def set(self, lengths: np.ndarray, first: np.ndarray) -> None:
        self.length[:] = lengths
        self.first = first.astype(np.int32)
        if self.on_device.device.type != "cpu":
            self.on_device.copy_(torch.from_numpy(self.length), non_blocking=True)

    def operands(self, slots: int, seq_major: bool) -> tuple[Any, Any]:
        """K and V of the first slots, as the attention functions take them."""

        def part(x: torch.Tensor) -> torch.Tensor:
            x = x[:, :, :slots]
            return x.transpose(1, 2) if seq_major else x

        return operand(self.k.map(part)), operand(self.v.map(part))


class PageStore:
    """The pages of a `PagedKVCache`, `[layers, pages, page_size, Hkv, columns]`, and its sequences.

    Attributes:
        lock: held while `sequences` are read or changed.
        splits: cascades of batches, until a sequence is truncated.
        latest: the batch of the last `extend`, without the cache, while it is up to date.
    """

    def __init__(self, k: Store, v: Store, sequences: Sequences) -> None:
        self.k, self.v, self.sequences = k, v, sequences
        self.lock = new_lock(self, "lock", threading.RLock)
        self.splits: dict[Any, Split | None] = {}
        self.latest: Any = None
        self.writers: dict[int, Writer] = {}
        self._operands: dict[int, tuple[Any, Any]] = {}

    def copy(self, memo: dict[int, Any]) -> PageStore:
        k, v = _copied(self.k, self.v, memo)
        return PageStore(k, v, copy.deepcopy(self.sequences, memo))

    def grow(self, slots: np.ndarray, new: np.ndarray, ids: np.ndarray | None) -> Growth:
        """Makes room for new tokens; shared pages that will be written are copied."""
        growth = self.sequences.extend(slots, new, ids)
        try:
            if growth.copies:
                pages = torch.from_numpy(growth.changes[: growth.copies, 2:]).to(self.k.data.device, torch.int64)
                for store in (self.k,) if self.v.inside else (self.k, self.v):
                    store.copy((slice(None), pages[:, 0]), (slice(None), pages[:, 1]))
        except BaseException:
            self.sequences.undo(slots, growth)
            raise
        return growth

    def operands(self, layer: int) -> tuple[Any, Any]:
        """K and V pages as the attention functions take them."""
        if layer not in self._operands:
            k, v = (operand(store.map(lambda x: x[layer])) for store in (self.k, self.v))
            self._operands[layer] = k, v
        return self._operands[layer]

    def writer(self, layer: int) -> Writer:
        if layer not in self.writers:
            # [pages, Hkv, slots, columns]
            k, v = (store.map(lambda x: x[layer].transpose(1, 2)) for store in (self.k, self.v))
            self.writers[layer] = planner.writer(k, v, k.data.shape[2])
        return self.writers[layer]
