"""A step over sequences of a `PagedKVCache` for CUDA graphs, and for `torch.compile` without graph breaks.

extend       on the host, before each step: makes room for new tokens and updates the tables in place
write,       in the graph: tensor code over fixed addresses, which depends on no length, no number of
attend       sequences and no Python state
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch

from .. import ops
from ..api import paged_attention
from ..core.eager import eager_function
from ..core.kv_store import WriteSlots
from ..core.private.torch import mark_static
from ..core.tracing import is_traced
from ..errors import InvalidArgument
from . import checks, hadamard
from .attend_call import attend, needs_packed, refuse
from .batch import Batch
from .formats import operand
from .uneven import attend_packed
from .upload import blocks, pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from ..core.options import Array
    from ..core.signatures import Kind, PagedOptions
    from ..state import AttentionState, Aux
    from .paged import PagedKVCache


class StaticBatch:
    """The result of `PagedKVCache.static_batch`.

    A step has `batch` rows of `count` tokens; sequences use the first rows. The output for the other rows is undefined,
    and their keys and values are not stored.

    Attributes:
        block_table: int32 `[batch, pages]` on the device.
        context_lens: int32 `[batch]` on the device: tokens of each sequence, the new ones included; 0 for no sequence.
        cu_seqlens: int32 `[batch + 1]` on the device: cumulative sums of the new tokens.
        starts: int32 `[batch]` on the device: the position of each sequence's first new token.
    """

    def __init__(self, cache: PagedKVCache, batch: int, capacity: int, count: int) -> None:
        self.cache, self.batch, self.capacity, self.count = cache, batch, capacity, count
        self.sequences: list[int] = []
        pages = -(-capacity // cache.page_size)
        with cache.store.lock:
            self._slots = self._versions = np.zeros(0, dtype=np.int64)
            self._changes = cache.store.sequences.changes
            cache.store.sequences.table.grow(0, pages)
            self._writers = [cache.store.writer(layer) for layer in range(cache.layers)]
        self._sizes = (batch, batch + 1, batch)
        self._block = torch.from_numpy(blocks(*self._sizes)[0]).to(cache.device)
        self.starts, self.cu_seqlens, self.context_lens = pieces(self._block, *self._sizes)
        self.block_table = torch.zeros(batch, pages, dtype=torch.int32, device=cache.device)
        tables = (self.starts, self.cu_seqlens, self.context_lens, self.block_table)
        stores = (cache.store.k, cache.store.v)
        kept: list[Any] = [*tables, *(x for store in stores for x in (store.data, store.scales) if x is not None)]
        for x in kept:
            mark_static(x)

    __reduce_ex__ = Batch.__reduce_ex__

    @eager_function
    def extend(self, sequences: Any, counts: Any = 1, tokens: Any = None) -> None:
        """Makes room for new tokens, as `PagedKVCache.extend`, and fills the tables for the next step.

        The cache cannot see what a graph writes, so the tokens count as written at once. Run the step in every layer
        before you do anything else with its sequences; if it fails, `truncate` takes the tokens back.

        Raises:
            CacheFull: there are too few free pages; nothing has changed.
        """
        store = self.cache.store
        numbers = checks.sequence_ids(sequences)
        new = checks.counts("counts", counts, len(numbers))
        if len(numbers) > self.batch:
            raise InvalidArgument("sequences", f"{len(numbers)} of them", f"{self.batch} at most, this batch's size")
        if new.max(initial=0) > self.count:
            raise InvalidArgument("counts", int(new.max()), f"{self.count} at most, this batch's count")
        ids = checks.new_ids(tokens, new)
        with store.lock:
            known = store.sequences
            slots = known.slots(numbers)
            for b in np.flatnonzero(known.length[slots[0]] + new > self.capacity):
                given = f"sequence {numbers[b]} of {known.length[slots[0][b]] + new[b]} tokens"
                raise InvalidArgument("counts", given, f"{self.capacity} at most, this batch's capacity")
            for number, slot in zip(numbers, slots[0].tolist(), strict=True):
                known.check_written("sequences", number, slot)
            growth = store.grow(slots[0], new, ids)
            try:
                block, (starts, cu, lengths) = blocks(*self._sizes)
                B = len(numbers)
                starts[:B], lengths[:B], cu[: B + 1], cu[B:] = growth.starts, growth.lengths, growth.cu, growth.cu[-1]
                self._block.copy_(torch.from_numpy(block), non_blocking=True)
                known.table.copy_into(self.block_table, *slots)
            except BaseException:
                known.undo(slots[0], growth)
                raise
            for layer in range(self.cache.layers):
                known.wrote(layer, slots[0], growth.starts, growth.lengths)
            if growth.full is not None:
                known.commit(numbers, growth.full)
            self.sequences, self._slots = numbers, slots[0]
            self._versions, self._changes = known.version[slots[0]], known.changes
            self.cache.store.latest = None

    def write(self, k: Any, v: Any = None, layer: int = 0) -> None:
        """Stores the new tokens of a layer.

        Args:
            k: packed `[batch * count, Hkv, D]`, the sequences' tokens one after the other, or `[batch, Hkv, count, D]`.
            v: likewise, with Dv; None if the cache is latent.
        """
        cache = self.cache
        layer = checks.index("layer", layer, cache.layers, "layer")
        packed = self._packed("k", k, 2)
        k, v = checks.both_rows(cache, k, v, packed)
        if cache.rotate:
            k, v = hadamard.rotate(k), hadamard.rotate(v)
        tables = (self.starts, self.cu_seqlens, self.block_table)
        if is_traced():
            ops.write_pages(k, v, cache.store.k, cache.store.v, layer, packed, *tables)
            return
        self._check()
        places = WriteSlots(*tables[:2], self.batch * self.count, packed, self.block_table, padded=True)
        self._writers[layer](k, v, places)

    @overload
    def attend(
        self, q: Kind, layer: int = 0, *, return_lse: Literal[False] = False, **options: Unpack[PagedOptions]
    ) -> Kind: ...
    @overload
    def attend(
        self, q: Array, layer: int = 0, *, return_lse: Literal[True], **options: Unpack[PagedOptions]
    ) -> AttentionState: ...
    @overload
    def attend(
        self, q: Kind, layer: int = 0, *, return_lse: bool, **options: Unpack[PagedOptions]
    ) -> Kind | AttentionState: ...
    @overload
    def attend(
        self, q: Kind, layer: int = 0, *, return_aux: Sequence[str], **options: Unpack[PagedOptions]
    ) -> tuple[Kind, Aux]: ...
    @overload
    def attend(self, q: Array, layer: int = 0, *, return_lse: bool = False, **options: Unpack[PagedOptions]) -> Any: ...
    def attend(self, q: Any, layer: int = 0, *, causal: bool = True, **options: Any) -> Any:
        """Attention of the new tokens' queries over their sequences.

        Args:
            q: packed `[batch * count, H, D]` or `[batch, H, count, D]` (or as `layout` says), as the rows of `write`.
            layer: which layer's keys and values.
            causal: a query sees keys up to its own position.

        All other options are those of `tilewise.paged_attention`.
        """
        cache, store = self.cache, self.cache.store
        refuse(options, dict.fromkeys(("cu_seqlens_q", "max_q", "kv_lengths"), "leave it out"))
        layer = checks.index("layer", layer, cache.layers, "layer")
        packed = self._packed("q", q, 1 if options.get("layout") == "blhd" else 2)
        options["causal"] = causal
        if is_traced():  # views of all layers, so that the graph orders this after `write`
            keys, values = (operand(x.map(lambda x: x[layer])) for x in (store.k, store.v))
        else:
            self._check()
            keys, values = store.operands(layer)

        def call(q: Any, **options: Any) -> Any:
            def over_pages(q: Any, **options: Any) -> Any:
                return paged_attention(q, keys, values, self.block_table, self.context_lens, **options)

            if packed:
                options |= {"cu_seqlens_q": self.cu_seqlens, "max_q": self.count}
            elif self.count > 1 and needs_packed(options):  # sequences may have fewer queries
                return attend_packed(q, self.cu_seqlens, over_pages, options)
            elif self.count > 1 and options.get("q_offset") is None:
                options["q_offset"] = self.starts
            return over_pages(q, **options)

        return attend(q, call, cache.rotate, options)

    def _packed(self, name: str, x: Any, dim: int) -> bool:
        """Whether rows are packed; refuses another number of rows than the batch has."""
        shape = tuple(getattr(x, "shape", ()))
        if len(shape) == 3 and shape[0] == self.batch * self.count:
            return True
        if len(shape) != 4 or shape[0] != self.batch or shape[dim] != self.count:
            want = f"{self.batch * self.count} packed rows, or {self.batch} x {self.count}"
            raise InvalidArgument(name, f"shape {shape}", want, "pad them")
        return False

    @eager_function
    def _check(self) -> None:
        """Refuses a step whose sequences have changed. Replays of a graph are not checked."""
        known = self.cache.store.sequences
        if self._changes != known.changes:
            with self.cache.store.lock:
                known.check_unchanged(self.sequences, self._slots, self._versions)
                self._changes = known.changes
