"""`PagedKVCache`: sequences in pages of a common pool, with shared prefixes."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core.devices import as_device
from ..core.eager import eager
from ..core.kv_store import Store
from ..errors import InvalidArgument
from . import checks, copies, hadamard, transfer
from .attending import is_seq_major
from .batch import Batch
from .block_manager import Sequences
from .formats import MOST_LAYERS, check_rotation, described, flag, formats_of, room, size, token_bytes
from .integers import integer
from .serialization.load import load_pages, load_prefix
from .serialization.save import save_pages, save_prefix
from .static_batch import StaticBatch
from .stats import PoolStats, stats_of
from .stores import PageStore, empty_pages, nbytes


@eager
class PagedKVCache:
    """Keys and values of many sequences in one pool of pages, for one or more layers.

    Sequences have ids. They are created, extended, forked (sharing all pages until one of them writes), truncated and
    freed in any order. All methods may be called from several threads; a sequence is one thread's at a time.

    Args:
        num_pages: pages in the pool.
        page_size: tokens in a page.
        kv_heads: heads of K and V.
        head_dim: D, of K.
        dtype: how K and V are stored: `"f32"`, `"f16"`, `"bf16"`, `"fp8_e4m3"`, `"int8"`, `"int4"`, `"codebook4"`, or
            a torch dtype.
            Default: torch's default dtype, or float32 where that is float64.
        layers: layers that share the tables, each with keys and values of its own.
        v_dtype: how V is stored, if not as K.
        value_dim: Dv, if not D.
        latent: V is the first `latent` elements of K (latent attention): rows are stored once, and new ones are given
            as `k` alone. See docs/caches.md.
        group: elements that share a scale in quantised storage: 32, 64 or 128.
        rotate: store K and V rotated by a Hadamard matrix; see `KVCache`.
        device: where it lies. Default: torch's default device.

    >>> cache = PagedKVCache(100, 16, kv_heads=4, head_dim=64, dtype="f16")
    >>> first = cache.create()
    >>> cache.append([first], *torch.randn(2, 1, 4, 50, 64))
    >>> second = cache.fork(first)  # no page is copied
    >>> cache.append([first, second], *torch.randn(2, 2, 4, 1, 64))  # one is: the last, half filled
    >>> cache.attend([first, second], torch.randn(2, 8, 1, 64)).shape
    torch.Size([2, 8, 1, 64])
    >>> stats = cache.stats()
    >>> stats.used, stats.shared, stats.free
    (5, 3, 95)
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype | str | None = None,
        *,
        layers: int = 1,
        v_dtype: torch.dtype | str | None = None,
        value_dim: int | None = None,
        latent: int | None = None,
        group: int = 64,
        rotate: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self.num_pages, self.page_size = size("num_pages", num_pages, 0), size("page_size", page_size)
        self.kv_heads, self.layers = size("kv_heads", kv_heads), size("layers", layers, 1, MOST_LAYERS)
        self.k_format, self.v_format = formats_of(head_dim, value_dim, dtype, v_dtype, group, latent)
        self.latent, self.rotate = None if latent is None else self.v_format.width, flag("rotate", rotate)
        check_rotation(self)
        self.device = as_device(device)
        sizes = {name: getattr(self, name) for name in ("num_pages", "page_size", "kv_heads", "layers")}
        k, v = room(lambda: empty_pages(self), **sizes)
        sequences = room(lambda: Sequences(self.num_pages, self.page_size, self.layers, self.device), **sizes)
        self.store = PageStore(k, v, sequences)  # what batches, copies and files work on

    def __copy__(self) -> PagedKVCache:
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        with self.store.lock:
            return copies.deep(self, memo)

    def __getstate__(self) -> dict[str, Any]:
        with self.store.lock:
            return copies.pages_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        copies.set_pages(self, state)

    def __repr__(self) -> str:
        stats = self.stats()
        return described(
            self, num_pages=self.num_pages, page_size=self.page_size, layers=self.layers, sequences=stats.sequences,
            tokens=stats.tokens, used=stats.used, kept=stats.kept, free=stats.free,
        )  # fmt: skip

    # Sequences

    def create(self) -> int:
        """A new sequence of no tokens; its id."""
        with self.store.lock:
            return self.store.sequences.create()[0]

    def fork(self, sequence: int) -> int:
        """A new sequence that shares all pages of another. Whoever writes into a shared page first gets a copy."""
        with self.store.lock:
            return self.store.sequences.fork("sequence", sequence)

    def prefix_match(self, tokens: Any) -> tuple[int, int]:
        """A new sequence that begins with the pages of the longest known prefix of `tokens`.

        A page is known once it is full and was written with its token ids (`tokens=` of `append` or `extend`). It stays
        known after its sequences are freed, until its room is needed. Only whole pages are shared.

        Args:
            tokens: the token ids of a prompt. Leave out its last one: it has to be computed to go on from it.

        Returns:
            The sequence's id, and how many of the tokens it holds.
        """
        ids = checks.token_ids(tokens)
        with self.store.lock:
            return self.store.sequences.match(ids)

    def truncate(self, sequence: int, length: int) -> None:
        """Shortens a sequence to `length` tokens: rejects tokens that were only a guess."""
        with self.store.lock:
            slot = self.store.sequences.slot("sequence", sequence)
            most = int(self.store.sequences.length[slot])
            number = integer(length)
            if number is None or not 0 <= number <= most:
                raise InvalidArgument("length", repr(length), f"0 to {most}, what the sequence holds")
            self.store.sequences.truncate(slot, number)
            self.store.splits.clear()
            self.store.latest = None

    def free(self, sequences: int | Sequence[int]) -> None:
        """Ends sequences: their pages are free, unless others use them or they are kept for prompts to come."""
        with self.store.lock:
            self.store.sequences.free(checks.sequence_ids(sequences))
            self.store.latest = None

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        with self.store.lock:
            return int(self.store.sequences.length[self.store.sequences.slot("sequence", sequence)])

    def stats(self) -> PoolStats:
        with self.store.lock:
            return stats_of(self.store.sequences, self.nbytes)

    @property
    def bytes_per_token(self) -> int:
        """K and V of all layers, scales included."""
        return self.layers * self.kv_heads * token_bytes(self)

    @property
    def nbytes(self) -> int:
        """Of all pages."""
        return nbytes(self.store.k, self.store.v)

    # Tokens

    def extend(self, sequences: int | Sequence[int], counts: Any = 1, tokens: Any = None) -> Batch:
        """Makes room for new tokens, once for all layers; the result's `write` and `attend` serve each layer.

        Args:
            sequences: ids, each once.
            counts: new tokens of each, or one number for all.
            tokens: the new tokens' ids, packed: those of the first sequence, then those of the next. With them, full
                pages can be found by `prefix_match` as soon as every layer has been written.

        Raises:
            CacheFull: there are too few pages; nothing has changed.
        """
        numbers = checks.sequence_ids(sequences)
        return self._extend(numbers, checks.counts("counts", counts, len(numbers)), tokens)

    def _extend(self, numbers: list[int], new: np.ndarray, tokens: Any) -> Batch:
        ids = checks.new_ids(tokens, new)
        with self.store.lock:
            slots = self.store.sequences.slots(numbers)
            growth = self.store.grow(slots[0], new, ids)
            try:
                self.store.latest = Batch(self, numbers, slots, new, growth, is_new=True)
            except BaseException:
                self.store.sequences.undo(slots[0], growth)
                raise
            return self.store.latest

    def static_batch(self, batch: int, capacity: int, count: int = 1) -> StaticBatch:
        """Steps of up to `batch` sequences with tables at fixed addresses: for CUDA graphs and `torch.compile`.

        Args:
            batch: sequences of a step, at most.
            capacity: tokens of a sequence, at most.
            count: new tokens of a sequence in a step, at most.
        """
        return StaticBatch(self, size("batch", batch), size("capacity", capacity), size("count", count))

    def append(
        self, sequences: int | Sequence[int], k: Any, v: Any = None, *, counts: Any = None, tokens: Any = None
    ) -> None:
        """Adds tokens to sequences of a cache of one layer.

        Args:
            sequences: ids `[B]`, each once.
            k: `[B, Hkv, L, D]`, or packed `[T, Hkv, D]`.
            v: `[B, Hkv, L, Dv]` or `[T, Hkv, Dv]`; None if the cache is latent.
            counts: ints `[B]`: new tokens of each sequence. Default: L, or T / B of packed rows.
            tokens: their ids, packed; see `extend`.

        Raises:
            CacheFull: there are too few pages; nothing has changed.
        """
        if self.layers > 1:
            raise InvalidArgument("layers", f"{self.layers} layers", "one, to append", "extend, then write each layer")
        numbers = checks.sequence_ids(sequences)
        new = checks.counts("counts", checks.evenly("k", k, len(numbers)) if counts is None else counts, len(numbers))
        rows = checks.new_rows(self, k, v, new)  # wrong rows are refused before there is room for them
        batch = self._extend(numbers, new, tokens)
        try:
            batch.put(*rows, layer=0)
        except BaseException:
            with self.store.lock:
                self.store.sequences.undo(batch.slots, batch.growth)
                self.store.latest = None
            raise

    def view(self, sequences: int | Sequence[int], counts: Any = 1) -> Batch:
        """Sequences as they are, to attend to; `counts` are the queries of each, its last tokens."""
        numbers = checks.sequence_ids(sequences)
        queries = checks.counts("counts", counts, len(numbers))
        with self.store.lock:
            latest = self.store.latest
            if latest is not None and latest.sequences == numbers and np.array_equal(latest.counts, queries):
                return latest  # what was appended last
            slots = self.store.sequences.slots(numbers)
            now = self.store.sequences.as_they_are(slots[0], queries)
            return Batch(self, numbers, slots, queries, now, is_new=False)

    def attend(
        self, sequences: int | Sequence[int], q: Any, *, layer: int = 0, counts: Any = None, **options: Any
    ) -> Any:
        """Attention of queries over each sequence's tokens. The queries are the last ones appended.

        Args:
            sequences: ids `[B]`.
            q: `[B, H, Lq, D]` (or as `layout` says), or packed `[T, H, D]`.
            counts: ints `[B]`: queries of each sequence. Default: Lq, or T / B of packed ones.

        All other options as in `Batch.attend`.
        """
        numbers = checks.sequence_ids(sequences)
        if counts is None:
            counts = checks.evenly("q", q, len(numbers), 1 if is_seq_major(options) else 2)
        return self.view(numbers, counts).attend(q, layer=layer, **options)

    def keys(self, sequence: int, layer: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The keys of a sequence, `[Hkv, n, D]`: for looking at them."""
        return self._held(self.store.k, sequence, layer, dtype)

    def values(self, sequence: int, layer: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, likewise."""
        return self._held(self.store.v, sequence, layer, dtype)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all sequences, with what they share and what is kept, to a safetensors file."""
        save_pages(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str | None = None) -> PagedKVCache:
        """A cache as it was saved, ids of sequences included. A file that is cut off or altered is refused."""
        return load_pages(cls, path, device)

    def save_prefix(self, path: str | os.PathLike[str], sequence: int) -> None:
        """Writes one sequence to a safetensors file, to be loaded into any cache of the same storage."""
        save_prefix(self, path, sequence)

    def load_prefix(self, path: str | os.PathLike[str]) -> int:
        """A new sequence from a file of `save_prefix`; `prefix_match` finds it. The page sizes may differ."""
        return load_prefix(self, path)

    def export(
        self,
        sequence: int,
        *,
        layers: tuple[int, int] | None = None,
        heads: tuple[int, int] | None = None,
        first_head: int = 0,
    ) -> transfer.Part:
        """A sequence as tensors, as it is stored, to be imported by another cache, in this process or another.

        Args:
            layers: a range of layers; default all.
            heads: a range of this cache's heads; default all.
            first_head: the model's number of this cache's first head, where heads are divided over caches.

        Returns:
            A manifest, of plain Python values, and tensors `[layers, tokens, heads, ...]`, copies on its device.
        """
        return transfer.export(self, sequence, layers, heads, first_head)

    def import_(self, *parts: transfer.Part, first_head: int = 0) -> int:
        """A new sequence from what `export` gave: all of it, or several parts that have all layers and heads together.

        The page sizes may differ, and so may the heads that a cache has of the model's. What was altered on its way is
        refused, by checksums.

        Raises:
            CacheFull: there are too few pages; nothing has changed.
        """
        return transfer.import_parts(self, parts, first_head)

    def _held(self, store: Store, sequence: int, layer: int, dtype: torch.dtype) -> torch.Tensor:
        layer, dtype = checks.index("layer", layer, self.layers, "layer"), checks.dtype(dtype)
        with self.store.lock:
            slot = self.store.sequences.slot("sequence", sequence)
            self.store.sequences.check_written("sequence", sequence, slot, layer)
            pages = torch.from_numpy(self.store.sequences.pages(slot)).to(self.device, torch.int64)
            length = int(self.store.sequences.length[slot])
        x = store.map(lambda x: x[layer][pages].flatten(0, 1)[:length].transpose(0, 1)).floats()
        return (hadamard.rotate_back(x) if self.rotate else x).to(dtype)
