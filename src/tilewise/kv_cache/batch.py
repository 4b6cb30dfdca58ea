"""A step of some sequences of a `PagedKVCache`: stores their new tokens, and attends over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch

from ..api import paged_attention
from ..core.eager import eager
from ..core.kv_store import WriteSlots
from ..core.problem import CascadeProblem
from ..dispatch import planner
from ..errors import InvalidArgument
from . import checks, hadamard
from .attend_call import attend, check_width, is_seq_major, needs_packed, refuse
from .cascade import AGAINST, Group, Split, run, shared
from .formats import flag, token_bytes
from .uneven import attend_packed
from .upload import pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from ..core.options import Array
    from ..core.signatures import BatchOptions, Kind
    from ..state import AttentionState, Aux
    from .block_manager import Growth
    from .paged import PagedKVCache


@eager
class Batch:
    """The result of `PagedKVCache.extend` and `view`: block tables of some sequences, the same for all layers.

    It is valid as long as its sequences do not change: once one of them is freed, truncated or extended, the batch is
    refused. It cannot be copied.

    Attributes:
        block_table: int32 `[B, pages]` on the device.
        context_lens: int32 `[B]` on the device: tokens of each sequence, the new ones included.
        cu_seqlens: int32 `[B + 1]` on the device: cumulative sums of `counts`.
        counts: int64 `[B]`, NumPy: number of new tokens (`view`: of queries) of each sequence.
        starts: int32 `[B]`, NumPy: position of the first of them.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        sequences: list[int],
        slots: tuple[np.ndarray, torch.Tensor],
        counts: np.ndarray,
        growth: Growth,
        is_new: bool,
    ) -> None:
        self.cache, self.sequences, self.counts, self.starts = cache, sequences, counts, growth.starts
        self.slots, self.growth = slots[0], growth
        self._left = set(range(cache.layers)) if is_new else set()
        self._written: set[int] = set()  # layers that are known to be written
        self._changes, self._versions = cache.store.sequences.changes, cache.store.sequences.version[slots[0]]
        B = len(counts)
        self.tokens = int(growth.cu[-1])
        self.longest = int(counts.max(initial=0))
        self._even = self.tokens == B * self.longest  # all counts are equal
        on_device = torch.from_numpy(growth.block).to(cache.device, non_blocking=True)
        self._starts, self.cu_seqlens, self.context_lens = pieces(on_device, B, B + 1, B)
        self.block_table = cache.store.sequences.table.of(*slots, growth.pages)

    def with_cache(self, cache: PagedKVCache | None) -> Batch:
        """The same batch (what is written is shared) with another reference to its cache."""
        batch = object.__new__(Batch)
        vars(batch).update(vars(self), cache=cache)
        return batch

    def write(self, k: Any, v: Any = None, layer: int = 0) -> None:
        """Stores the new tokens of a layer, once.

        Args:
            k: packed `[T, Hkv, D]`, or `[B, Hkv, L, D]`, of which the first `counts[b]` tokens of row `b` are stored.
            v: likewise, with Dv; None if the cache is latent.
        """
        self.put(*self.new_rows(k, v, layer), layer)

    def new_rows(self, k: Any, v: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """The rows that `write` stores, once they are checked, and whether they are packed."""
        layer = checks.index("layer", layer, self.cache.layers, "layer")
        self.check()
        if layer not in self._left:
            remedy = "extend reserves the tokens, and each layer writes them once"
            raise InvalidArgument("layer", f"{layer}, which has no new tokens to write", "one that has", remedy)
        return checks.new_rows(self.cache, k, v, self.counts)

    def undo(self) -> None:
        """Takes back the room that `extend` made, so that nothing has changed; the batch is of no use then."""
        with self.cache.store.lock:
            self.cache.store.sequences.undo(self.slots, self.growth)
            self.cache.store.latest = None

    def put(self, k: torch.Tensor, v: torch.Tensor, packed: bool, layer: int) -> None:
        """`write` of checked rows, in the form that `WriteSlots` describes."""
        cache = self.cache
        if cache.rotate:
            k, v = hadamard.rotate(k), hadamard.rotate(v)
        if self.tokens:
            places = WriteSlots(self._starts, self.cu_seqlens, self.tokens, packed, self.block_table)
            cache.store.writer(layer)(k, v, places)
        with cache.store.lock:
            sequences = cache.store.sequences
            if sequences.wrote(layer, self.slots, self.starts, self.growth.lengths) == len(self.slots):
                self._written.add(layer)
            self._left.remove(layer)
            if not self._left and self.growth.full is not None:  # now prefix_match may find its full pages
                sequences.commit(self.sequences, self.growth.full)

    def check(self, layer: int | None = None) -> None:
        """Refuses a batch whose sequences have changed, and a layer with tokens that were never written."""
        sequences = self.cache.store.sequences
        if self._changes != sequences.changes:
            with self.cache.store.lock:
                sequences.check_unchanged(self.sequences, self.slots, self._versions)
                self._changes = sequences.changes
        if layer is not None and layer not in self._written:
            with self.cache.store.lock:
                b = sequences.wrote(layer, self.slots, self.growth.lengths, self.growth.lengths)  # nothing new
                if b < len(self.slots):
                    sequences.check_written(f"sequences[{b}]", self.sequences[b], int(self.slots[b]), layer)
                self._written.add(layer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidArgument(
            "batch", "a copy or a pickle", "the batch itself", "copy the cache, and call view on the copy"
        )

    @overload
    def attend(
        self, q: Kind, layer: int = 0, *, return_lse: Literal[False] = False, **options: Unpack[BatchOptions]
    ) -> Kind: ...
    @overload
    def attend(
        self, q: Array, layer: int = 0, *, return_lse: Literal[True], **options: Unpack[BatchOptions]
    ) -> AttentionState: ...
    @overload
    def attend(
        self, q: Kind, layer: int = 0, *, return_lse: bool, **options: Unpack[BatchOptions]
    ) -> Kind | AttentionState: ...
    @overload
    def attend(
        self, q: Kind, layer: int = 0, *, return_aux: Sequence[str], **options: Unpack[BatchOptions]
    ) -> tuple[Kind, Aux]: ...
    @overload
    def attend(self, q: Array, layer: int = 0, *, return_lse: bool = False, **options: Unpack[BatchOptions]) -> Any: ...
    def attend(
        self, q: Any, layer: int = 0, *, causal: bool = True, cascade: bool | None = None, **options: Any
    ) -> Any:
        """Attention of the new tokens' queries over their sequences.

        Args:
            q: packed `[T, H, D]`, or `[B, H, Lq, D]` (or as `layout` says), of which the first `counts[b]` queries of
                row `b` are used; the output for the others is undefined.
            layer: which layer's keys and values.
            causal: a query sees keys up to its own position.
            cascade: compute attention over a shared prefix once for all its sequences, and merge it with attention over
                the rest. None: where it is faster. Not with window, chunk, mask, ALiBi, offset or `split_size`. The
                result is the same up to rounding.

        All other options are those of `tilewise.paged_attention`.
        """
        cache = self.cache
        refuse(options, dict.fromkeys(("cu_seqlens_q", "max_q", "kv_lengths"), "leave it out"))
        layer = checks.index("layer", layer, cache.layers, "layer")
        if cascade is not None:
            cascade = flag("cascade", cascade)
        self.check(layer)
        operands = cache.store.operands(layer)
        packed = len(getattr(q, "shape", ())) == 3
        options["causal"] = causal
        check_width(options, int(self.growth.lengths.max(initial=0)))

        def call(q: Any, **options: Any) -> Any:
            even = packed or (self._even and self._q_rows(q, options) == self.longest)
            split = self._split(q, even, cascade, options)
            if split is not None:
                tables = (self.block_table, self.context_lens)
                return run(split, q, len(self.counts), self.longest, self.cu_seqlens, operands, *tables, options)

            def over_pages(q: Any, **options: Any) -> Any:
                return paged_attention(q, *operands, self.block_table, self.context_lens, **options)

            if packed:
                options |= {"cu_seqlens_q": self.cu_seqlens, "max_q": self.longest}
            elif not even and needs_packed(options):
                return attend_packed(q, self.cu_seqlens, over_pages, options)
            elif not even and options.get("q_offset") is None:
                options["q_offset"] = self._starts
            return over_pages(q, **options)

        return attend(q, call, cache.rotate, options)

    def shared_prefixes(self, heads: int, always: bool = False) -> list[Group]:
        """Groups of sequences (by index in the batch) that a cascade would serve together, for `heads` query heads.

        With `always`, all that share a page; else those for which a cascade is faster.
        """
        self.check()
        cache = self.cache
        fmt = (cache.k_format, cache.v_format)
        problem = CascadeProblem(
            cache.device, cache.kv_heads, max(1, heads // cache.kv_heads), sum(f.width for f in fmt),
            token_bytes(cache), torch.get_num_threads(),
        )  # fmt: skip

        def worth(members: np.ndarray, pages: int) -> float:
            tokens = pages * cache.page_size
            if always:
                return float((len(members) - 1) * tokens)
            return planner.cascade_gain(problem, self.counts[members], tokens)

        full = np.maximum(self.starts, 0) // cache.page_size  # every query is after these pages
        return shared(cache.store.sequences.table.host[self.slots], full, worth)

    def _split(self, q: Any, even: bool, wanted: bool | None, options: dict[str, Any]) -> Split | None:
        """How to run as a cascade; None if it is not possible, not wanted or not faster."""
        against = [name for name in AGAINST if options.get(name) is not None]
        possible = even and not against and self.tokens > 0 and len(self.counts) > 1
        if wanted and not possible:
            given = ", ".join(against) or (
                "sequences with different numbers of queries" if not even else "a lone sequence"
            )
            raise InvalidArgument("cascade", f"True with {given}", "None or False there")
        if wanted is False or not possible:
            return None
        cache = self.cache
        heads = q.shape[1 if q.ndim == 3 or not is_seq_major(options) else 2]
        key = (tuple(self.sequences), self.counts.tobytes(), heads, bool(wanted))
        with cache.store.lock:
            if key not in cache.store.splits:
                groups = self.shared_prefixes(heads, always=bool(wanted))
                table = cache.store.sequences.table.host[self.slots]
                if len(cache.store.splits) >= 64:
                    cache.store.splits.clear()
                cache.store.splits[key] = (
                    Split.of(groups, table, self.counts, cache.page_size, cache.device) if groups else None
                )
            return cache.store.splits[key]

    def _q_rows(self, q: Any, options: dict[str, Any]) -> int:
        shape = getattr(q, "shape", ())
        return int(shape[1 if is_seq_major(options) else 2]) if len(shape) == 4 else 0
