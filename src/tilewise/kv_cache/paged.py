"""`PagedKVCache`: sequences in pages of one pool, with shared prefixes."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch

from ..core.devices import as_device
from ..core.eager import eager
from ..core.kv_store import Store
from ..errors import InvalidArgument
from . import checks, copies, hadamard, transfer
from .attend_call import is_seq_major
from .batch import Batch
from .block_manager import Sequences
from .formats import MOST_LAYERS, allocate_or_refuse, check_rotation, described, flag, formats_of, size, token_bytes
from .integers import integer
from .serialization.load import load_pages, load_prefix
from .serialization.save import save_pages, save_prefix
from .static_batch import StaticBatch
from .stats import PoolStats, stats_of
from .stores import PageStore, empty_pages, nbytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..core.options import Array
    from ..core.signatures import Kind, PagedCacheOptions
    from ..state import AttentionState, Aux

    Ids = int | Sequence[int]


@eager
class PagedKVCache:
    """A paged KV cache: many sequences in one pool of pages, for one or more layers.

    Sequences have ids and can be created, extended, forked (with copy on write), truncated and freed in any order. All
    methods are thread-safe, but only one thread at a time may use a sequence.

    Args:
        num_pages: number of pages in the pool.
        page_size: tokens in a page.
        kv_heads: number of K and V heads, Hkv.
        head_dim: head dim of K, D.
        dtype: storage of K and V: `"f32"`, `"f16"`, `"bf16"`, `"fp8_e4m3"`, `"int8"`, `"int4"`, `"codebook4"`, or a
            torch dtype. Default: torch's default dtype, or float32 if that is float64.
        layers: number of layers. They share the block tables; each has its own keys and values.
        v_dtype: storage of V. Default: as K.
        value_dim: head dim of V, Dv. Default: D.
        latent: V is the first `latent` elements of K (latent attention). Rows are stored once, and `append` takes only
            `k`. See docs/caches.md.
        group: elements that share a scale in quantised storage: 32, 64 or 128.
        rotate: rotate K and V by a Hadamard matrix before storing them; see `KVCache`.
        device: device of the cache. Default: torch's default device.

    >>> cache = PagedKVCache(100, 16, kv_heads=4, head_dim=64, dtype="f16")
    >>> first = cache.create()
    >>> cache.append([first], *torch.randn(2, 1, 4, 50, 64))
    >>> second = cache.fork(first)  # no page is copied
    >>> cache.append([first, second], *torch.randn(2, 2, 4, 1, 64))  # one is: the last page, partly filled
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
        k, v = allocate_or_refuse(lambda: empty_pages(self), **sizes)
        sequences = allocate_or_refuse(
            lambda: Sequences(self.num_pages, self.page_size, self.layers, self.device), **sizes
        )
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
        """Creates an empty sequence and returns its id."""
        with self.store.lock:
            return self.store.sequences.create()[0]

    def fork(self, sequence: int) -> int:
        """A new sequence that shares all pages of another. The first to write to a shared page gets a copy of it."""
        with self.store.lock:
            return self.store.sequences.fork("sequence", sequence)

    def prefix_match(self, tokens: Any) -> tuple[int, int]:
        """A new sequence that shares the pages of the longest cached prefix of `tokens`.

        A page is cached once it is full and was written with token ids (`tokens=` of `append` or `extend`). It stays
        cached after its sequences are freed, until the page is needed. Only whole pages are shared.

        Args:
            tokens: the token ids of a prompt, without the last one, which the model has to compute in any case.

        Returns:
            The id of the sequence, and how many of the tokens it holds.
        """
        ids = checks.token_ids(tokens)
        with self.store.lock:
            return self.store.sequences.match(ids)

    def truncate(self, sequence: int, length: int) -> None:
        """Shortens a sequence to `length` tokens, for example to drop rejected draft tokens."""
        with self.store.lock:
            slot = self.store.sequences.slot("sequence", sequence)
            most = int(self.store.sequences.length[slot])
            number = integer(length)
            if number is None or not 0 <= number <= most:
                raise InvalidArgument("length", repr(length), f"0 to {most}, the tokens of the sequence")
            self.store.sequences.truncate(slot, number)
            self.store.splits.clear()
            self.store.latest = None

    def free(self, sequences: int | Sequence[int]) -> None:
        """Frees sequences. Pages that other sequences use stay; so do cached prefixes, until their pages are needed."""
        with self.store.lock:
            self.store.sequences.free(checks.sequence_ids(sequences))
            self.store.latest = None

    def length(self, sequence: int) -> int:
        """Number of tokens of a sequence."""
        with self.store.lock:
            return int(self.store.sequences.length[self.store.sequences.slot("sequence", sequence)])

    def stats(self) -> PoolStats:
        """How full the pool is.

        Returns:
            Numbers of `pages`: `used`, `shared` (used by several sequences), `kept` (unused, but holding cached
            prefixes) and `free`; of `sequences` and `tokens`; `fragmentation`, the share of slots in used pages that
            hold no token; and `nbytes`.
        """
        with self.store.lock:
            return stats_of(self.store.sequences, self.nbytes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in all layers, scales included."""
        return self.layers * self.kv_heads * token_bytes(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return nbytes(self.store.k, self.store.v)

    # Tokens

    def extend(self, sequences: int | Sequence[int], counts: Any = 1, tokens: Any = None) -> Batch:
        """Makes room for new tokens, once for all layers. Then call the batch's `write` and `attend` for each layer.

        Args:
            sequences: ids, each once.
            counts: number of new tokens of each sequence, or one number for all.
            tokens: ids of the new tokens, packed: those of the first sequence, then those of the next. With them,
                `prefix_match` finds full pages as soon as every layer has been written.

        Raises:
            CacheFull: there are too few free pages; nothing has changed.
        """
        numbers = checks.sequence_ids(sequences)
        return self._extend(numbers, checks.counts("counts", counts, len(numbers)), tokens)

    def _extend(self, numbers: list[int], new: np.ndarray, tokens: Any) -> Batch:
        ids = checks.new_ids(tokens, new)
        with self.store.lock:
            slots = self.store.sequences.slots(numbers)
            growth = self.store.grow(slots[0], new, ids)
            try:
                batch = Batch(self, numbers, slots, new, growth, is_new=True)
                self.store.latest = batch.with_cache(None)  # a cycle would keep the pages after the cache is dropped
            except BaseException:
                self.store.sequences.undo(slots[0], growth)
                raise
            return batch

    def static_batch(self, batch: int, capacity: int, count: int = 1) -> StaticBatch:
        """A batch for decode steps whose tables stay at fixed addresses: for CUDA graphs and `torch.compile`.

        Args:
            batch: largest number of sequences in a step.
            capacity: largest number of tokens of a sequence.
            count: largest number of new tokens of a sequence in a step.
        """
        return StaticBatch(self, size("batch", batch), size("capacity", capacity), size("count", count))

    def append(
        self, sequences: int | Sequence[int], k: Any, v: Any = None, *, counts: Any = None, tokens: Any = None
    ) -> None:
        """Appends tokens to sequences, in a cache with one layer.

        Args:
            sequences: ids `[B]`, each once.
            k: `[B, Hkv, L, D]`, or packed `[T, Hkv, D]`.
            v: `[B, Hkv, L, Dv]` or `[T, Hkv, Dv]`; None if the cache is latent.
            counts: ints `[B]`: number of new tokens of each sequence. Default: L, or T / B if packed.
            tokens: ids of the new tokens, packed; see `extend`.

        Raises:
            CacheFull: there are too few free pages; nothing has changed.
        """
        if self.layers > 1:
            raise InvalidArgument("layers", f"{self.layers} layers", "one, to append", "extend, then write each layer")
        numbers = checks.sequence_ids(sequences)
        new = checks.counts("counts", checks.evenly("k", k, len(numbers)) if counts is None else counts, len(numbers))
        rows = checks.new_rows(self, k, v, new)  # before `_extend`, so that wrong rows change nothing
        batch = self._extend(numbers, new, tokens)
        try:
            batch.put(*rows, layer=0)
        except BaseException:
            batch.undo()
            raise

    def view(self, sequences: int | Sequence[int], counts: Any = 1) -> Batch:
        """A batch of sequences as they are, to attend over; `counts` is the number of queries of each, at its end."""
        numbers = checks.sequence_ids(sequences)
        queries = checks.counts("counts", counts, len(numbers))
        with self.store.lock:
            latest = self.store.latest
            if latest is not None and latest.sequences == numbers and np.array_equal(latest.counts, queries):
                return latest.with_cache(self)  # the batch of the last `extend` or `append`
            slots = self.store.sequences.slots(numbers)
            now = self.store.sequences.as_they_are(slots[0], queries)
            return Batch(self, numbers, slots, queries, now, is_new=False)

    @overload
    def attend(
        self, sequences: Ids, q: Kind, *, return_lse: Literal[False] = False, **options: Unpack[PagedCacheOptions]
    ) -> Kind: ...
    @overload
    def attend(
        self, sequences: Ids, q: Array, *, return_lse: Literal[True], **options: Unpack[PagedCacheOptions]
    ) -> AttentionState: ...
    @overload
    def attend(
        self, sequences: Ids, q: Kind, *, return_lse: bool, **options: Unpack[PagedCacheOptions]
    ) -> Kind | AttentionState: ...
    @overload
    def attend(
        self, sequences: Ids, q: Kind, *, return_aux: Sequence[str], **options: Unpack[PagedCacheOptions]
    ) -> tuple[Kind, Aux]: ...
    @overload
    def attend(
        self, sequences: Ids, q: Array, *, return_lse: bool = False, **options: Unpack[PagedCacheOptions]
    ) -> Any: ...
    def attend(
        self, sequences: int | Sequence[int], q: Any, *, layer: int = 0, counts: Any = None, **options: Any
    ) -> Any:
        """Attention of each sequence's queries over its tokens. The queries are at the last positions: append first.

        Args:
            sequences: ids `[B]`.
            q: `[B, H, Lq, D]` (or as `layout` says), or packed `[T, H, D]`.
            layer: which layer's keys and values.
            counts: ints `[B]`: number of queries of each sequence. Default: Lq, or T / B if packed.

        `causal` is True by default. `cascade` says whether attention over a shared prefix is computed once for all its
        sequences; by default where that is faster. All other options are those of `tilewise.paged_attention`.
        """
        numbers = checks.sequence_ids(sequences)
        if counts is None:
            counts = checks.evenly("q", q, len(numbers), 1 if is_seq_major(options) else 2)
        return self.view(numbers, counts).attend(q, layer=layer, **options)

    def keys(self, sequence: int, layer: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The keys of a sequence, `[Hkv, n, D]`: for inspection."""
        return self._held(self.store.k, sequence, layer, dtype)

    def values(self, sequence: int, layer: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values of a sequence, `[Hkv, n, Dv]`."""
        return self._held(self.store.v, sequence, layer, dtype)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all sequences, with shared pages and cached prefixes, to a safetensors file."""
        save_pages(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str | None = None) -> PagedKVCache:
        """Loads a cache from a file of `save`, with the same ids. A truncated or altered file is refused."""
        return load_pages(cls, path, device)

    def save_prefix(self, path: str | os.PathLike[str], sequence: int) -> None:
        """Writes one sequence to a safetensors file, which any cache of the same storage can load."""
        save_prefix(self, path, sequence)

    def load_prefix(self, path: str | os.PathLike[str]) -> int:
        """A new sequence from a file of `save_prefix`, which `prefix_match` also finds. The page size may differ."""
        return load_prefix(self, path)

    def export(
        self,
        sequence: int,
        *,
        layers: tuple[int, int] | None = None,
        heads: tuple[int, int] | None = None,
        first_head: int = 0,
    ) -> transfer.Part:
        """A sequence as tensors, in its stored form, for `import_` of another cache in this or another process.

        Args:
            layers: a range of layers. Default: all.
            heads: a range of this cache's heads. Default: all.
            first_head: the index in the model of this cache's first head, if heads are sharded over caches.

        Returns:
            A manifest of plain Python values, and tensors `[layers, tokens, heads, ...]`, copies on the cache's device.
        """
        return transfer.export(self, sequence, layers, heads, first_head)

    def import_(self, *parts: transfer.Part, first_head: int = 0) -> int:
        """A new sequence from results of `export`, which together have all layers and heads of this cache.

        Page sizes, and which of the model's heads a cache holds, may differ. Checksums detect data that was altered on
        the way, which is refused.

        Raises:
            CacheFull: there are too few free pages; nothing has changed.
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
