"""`KVCache`: a contiguous row of slots for each sequence of a batch."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch

from ..api import attention, paged_attention
from ..core.arrays import converter_back, to_tensor
from ..core.devices import as_device
from ..core.dropout import with_seed
from ..core.eager import eager
from ..core.kv_store import WriteSlots
from ..errors import CacheFull, InvalidArgument
from ..state import AttentionState, Aux, map_result, merge, same
from . import checks, copies, hadamard, ring
from .attend_call import attend, check_width, copy_to_out, is_seq_major, needs_packed, refuse, rounded
from .formats import allocate_or_refuse, check_rotation, described, flag, formats_of, size, token_bytes
from .integers import integer
from .serialization.load import load_rows
from .serialization.save import save_rows
from .stores import RowStore, empty_rows, nbytes
from .uneven import attend_packed
from .upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack

    from ..core.options import Array
    from ..core.signatures import CacheOptions, Kind


@eager
class KVCache:
    """A contiguous KV cache: `batch` rows of `capacity` slots, each row with its own length.

    Args:
        batch: number of rows.
        kv_heads: number of K and V heads, Hkv.
        capacity: tokens that a row can hold.
        head_dim: head dim of K, D.
        dtype: storage of K and V: `"f32"`, `"f16"`, `"bf16"`, `"fp8_e4m3"`, `"int8"`, `"int4"`, `"codebook4"`, or a
            torch dtype. Default: torch's default dtype, or float32 if that is float64.
        v_dtype: storage of V. Default: as K.
        value_dim: head dim of V, Dv. Default: D.
        latent: V is the first `latent` elements of K (latent attention). Rows are stored once, and `append` takes only
            `k`. See docs/caches.md.
        group: elements that share a scale in quantised storage: 32, 64 or 128.
        rotate: rotate K and V by a Hadamard matrix before storing them, which spreads outliers before quantisation. The
            results are the same up to rounding.
        ring: keep the last `capacity` tokens of each row instead of raising `CacheFull`. Tokens keep their positions.
        device: device of the cache. Default: torch's default device.

    >>> cache = KVCache(2, 4, 100, 64, "int8")
    >>> k, v = torch.randn(2, 2, 4, 30, 64)
    >>> cache.append(k, v)
    >>> cache.attend(torch.randn(2, 8, 30, 64)).shape
    torch.Size([2, 8, 30, 64])
    >>> cache.lengths.tolist()
    [30, 30]
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype | str | None = None,
        *,
        v_dtype: torch.dtype | str | None = None,
        value_dim: int | None = None,
        latent: int | None = None,
        group: int = 64,
        rotate: bool = False,
        ring: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self.batch, self.kv_heads = size("batch", batch, 0), size("kv_heads", kv_heads)
        self.capacity = size("capacity", capacity)
        self.k_format, self.v_format = formats_of(head_dim, value_dim, dtype, v_dtype, group, latent)
        self.latent = None if latent is None else self.v_format.width
        self.rotate, self.ring = flag("rotate", rotate), flag("ring", ring)
        check_rotation(self)
        self.device = as_device(device)
        sizes = {"batch": self.batch, "kv_heads": self.kv_heads, "capacity": self.capacity}
        k, v = allocate_or_refuse(lambda: empty_rows(self), **sizes)
        self.store = RowStore(
            k, v, *np.zeros((2, self.batch), dtype=np.int32)
        )  # what batches, copies and files work on

    def __copy__(self) -> KVCache:
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        return copies.deep(self, memo)

    def __getstate__(self) -> dict[str, Any]:
        return copies.rows_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        copies.set_rows(self, state)

    def __repr__(self) -> str:
        shown = self.store.length[:8].tolist()
        lengths = f"[{', '.join(map(str, shown))}{', ...' if self.batch > 8 else ''}]"
        return described(self, batch=self.batch, capacity=self.capacity, ring=self.ring, lengths=lengths)

    @property
    def lengths(self) -> torch.Tensor:
        """int32 `[batch]`: number of tokens appended to each row. A ring may hold fewer."""
        return self.store.on_device.clone()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V, scales included."""
        return self.kv_heads * token_bytes(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache."""
        return nbytes(self.store.k, self.store.v)

    def append(self, k: Any, v: Any = None, counts: Any = None) -> None:
        """Appends tokens to the rows.

        Args:
            k: `[B, Hkv, L, D]`, float32, float16 or bfloat16.
            v: `[B, Hkv, L, Dv]`; None if the cache is latent.
            counts: ints `[B]`: row `b` takes only the first `counts[b]` of its L tokens. Default: all.

        Raises:
            CacheFull: a row has no room for its tokens; no row has changed.
        """
        k, v = checks.both_rows(self, k, v, packed=False)
        if k.shape[0] != self.batch:
            raise InvalidArgument("k", f"a batch of {k.shape[0]}", f"{self.batch}, as the cache")
        L = k.shape[2]
        new = np.full(self.batch, L) if counts is None else checks.counts("counts", counts, self.batch, L)
        length = self.store.length + new
        if self.batch and length.max() > checks.MOST:
            raise CacheFull(
                f"a row would have {int(length.max())} tokens; positions end at {checks.MOST}: reset the row"
            )
        if not self.ring and self.batch and length.max() > self.capacity:
            b = int(length.argmax())
            raise CacheFull(
                f"row {b} holds {self.store.length[b]} of {self.capacity} tokens and cannot take {new[b]} more; make "
                f"the cache larger, truncate or reset the row, or use ring=True for a sliding window"
            )
        if self.rotate:
            k, v = hadamard.rotate(k), hadamard.rotate(v)
        cu = np.zeros(self.batch + 1, dtype=np.int32)
        np.cumsum(new, out=cu[1:])
        if tokens := int(cu[-1]):
            starts, cu_on_device = upload(self.device, self.store.length, cu)
            self.store.write(k, v, WriteSlots(starts, cu_on_device, tokens, packed=False))
        self.store.set(length, np.maximum(self.store.first, length - self.capacity) if self.ring else self.store.first)

    @overload
    def attend(self, q: Kind, *, return_lse: Literal[False] = False, **options: Unpack[CacheOptions]) -> Kind: ...
    @overload
    def attend(self, q: Array, *, return_lse: Literal[True], **options: Unpack[CacheOptions]) -> AttentionState: ...
    @overload
    def attend(self, q: Kind, *, return_lse: bool, **options: Unpack[CacheOptions]) -> Kind | AttentionState: ...
    @overload
    def attend(self, q: Kind, *, return_aux: Sequence[str], **options: Unpack[CacheOptions]) -> tuple[Kind, Aux]: ...
    @overload
    def attend(self, q: Array, *, return_lse: bool = False, **options: Unpack[CacheOptions]) -> Any: ...
    def attend(self, q: Any, *, counts: Any = None, causal: bool = True, **options: Any) -> Any:
        """Attention of each row's queries over its tokens. The queries are at the last positions: append first.

        Args:
            q: `[B, H, Lq, D]` (or as `layout` says).
            counts: ints `[B]`, as given to `append`: only the first `counts[b]` queries of row `b` are used; the output
                for the others is undefined.
            causal: a query sees keys up to its own position.

        All other options are those of `tilewise.attention`, except `kv_lengths`. The last dim of a mask is at least as
        long as the longest row. A ring takes no mask, and only chunks that divide its capacity; without a window, its
        queries see all tokens that it holds.
        """
        refuse(options, {"kv_lengths": "leave it out"})
        options["causal"] = causal
        seq_major = is_seq_major(options)
        shape = getattr(q, "shape", ())
        q_rows = shape[1 if seq_major else 2] if len(shape) == 4 else 0
        if counts is not None and options.get("q_offset") is not None:
            raise InvalidArgument("counts", "counts and q_offset", "one of them")
        new = None if counts is None else checks.counts("counts", counts, self.batch, q_rows)
        if self.ring:
            ring.check_options(self.capacity, options)
        call: Any = self._attend_ring if self.ring and self.store.first.any() else self._attend
        own: dict[str, Any] = {}
        if new is not None and (new < q_rows).any():
            if needs_packed(options):
                return attend(q, lambda q, **options: self._attend_packed(q, new, options), self.rotate, options)
            own["q_offset"] = torch.from_numpy(self.store.length - new).to(self.device)
        return attend(q, lambda q, **options: call(q, q_rows, seq_major, **options | own), self.rotate, options)

    def _of_longest(self, result: Any, seq_major: bool) -> Any:
        """The result of a call over more slots than the longest row has, without `key_mass` for the others."""
        longest = int(self.store.length.max(initial=0))
        return map_result(result, same, same, lambda x: x[:, :longest] if seq_major else x[..., :longest])

    def truncate(self, row: int, length: int) -> None:
        """Shortens a row to `length` tokens, for example to drop rejected draft tokens."""
        row = checks.index("row", row, self.batch, "row")
        least, most = int(self.store.first[row]), int(self.store.length[row])
        number = integer(length)
        if number is None or not least <= number <= most:
            raise InvalidArgument("length", repr(length), f"{least} to {most}, the tokens of row {row}")
        lengths = self.store.length.copy()
        lengths[row] = number
        self.store.set(lengths, self.store.first)

    def reset(self, row: int | None = None) -> None:
        """Empties a row, or all rows."""
        which = slice(None) if row is None else checks.index("row", row, self.batch, "row")
        lengths, first = self.store.length.copy(), self.store.first.copy()
        lengths[which] = first[which] = 0
        self.store.set(lengths, first)

    def gather(self, rows: Any = None, *, start: int = 0, capacity: int | None = None) -> KVCache:
        """A new cache with copies of some rows, as they are stored: for beams, another batch or another capacity.

        Args:
            rows: ints: the rows to take, in any order; a row may be repeated. Default: all.
            start: the first position to keep in every row; it becomes position 0. For a ring it must be 0.
            capacity: of the new cache. Default: that of this cache. A ring keeps its own.

        Raises:
            CacheFull: a row does not fit.
        """
        which = None if rows is None else checks.indices("rows", rows, self.batch)
        length = self.store.length if which is None else self.store.length[which]
        first, room = integer(start), self.capacity if capacity is None else size("capacity", capacity)
        if first is None or not 0 <= first <= length.min(initial=checks.MOST):
            raise InvalidArgument("start", repr(start), f"0 to {length.min(initial=0)}, the shortest row")
        if self.ring and (first or room != self.capacity):
            raise InvalidArgument("start or capacity", "given for a ring", "none: a ring always gives all its slots")
        if not self.ring and (longest := length.max(initial=0) - first) > room:
            raise CacheFull(f"a row of {longest} tokens does not fit into {room} slots: give a larger capacity")
        return copies.gathered(self, which, first, room)

    def keys(self, row: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The keys that a row holds, oldest first, `[Hkv, n, D]`: for inspection."""
        return self._held(self.store.k, row, dtype)

    def values(self, row: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values that a row holds, oldest first, `[Hkv, n, Dv]`."""
        return self._held(self.store.v, row, dtype)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all rows to a safetensors file, as they are stored."""
        save_rows(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str | None = None) -> KVCache:
        """Loads a cache from a file of `save`. A truncated or altered file is refused."""
        return load_rows(cls, path, device)

    def _held(self, store: Any, row: int, dtype: torch.dtype) -> torch.Tensor:
        row, dtype = checks.index("row", row, self.batch, "row"), checks.dtype(dtype)
        first, last = int(self.store.first[row]), int(self.store.length[row])
        slots = torch.arange(first, last, device=self.device) % self.capacity
        x = store.map(lambda x: x[row][:, slots]).floats()
        return (hadamard.rotate_back(x) if self.rotate else x).to(dtype)

    def _slots(self, options: dict[str, Any]) -> int:
        """How many slots a call is given: as many as a mask, bias or tile map has, or those of the longest row and a
        few more.
        """
        longest = int(self.store.length.max(initial=0))
        width = check_width(options, longest, self.capacity)
        return min(self.capacity, rounded(longest)) if width is None else width

    def _attend(self, q: Any, q_rows: int, seq_major: bool, **options: Any) -> Any:
        slots = self._slots(options)
        result = attention(q, *self.store.operands(slots, seq_major), kv_lengths=self.store.on_device, **options)
        return result if "return_aux" not in options else self._of_longest(result, seq_major)

    def _attend_packed(self, q: Any, counts: np.ndarray, options: dict[str, Any]) -> Any:
        """Over rows that are pages, each sequence's only one: such a call takes packed queries."""
        slots = max(1, self._slots(options))
        pages = self.store.operands(slots, seq_major=True)
        cu, first = upload(self.device, np.insert(counts.cumsum(), 0, 0), np.arange(self.batch))

        def call(q: torch.Tensor, **options: Any) -> Any:
            return paged_attention(q, *pages, first[:, None], self.store.on_device, **options)

        seq_major = is_seq_major(options)
        return self._of_longest(attend_packed(q, cu, call, options), seq_major)

    def _attend_ring(self, q: Any, q_rows: int, seq_major: bool, **options: Any) -> Any:
        first, length = self.store.first.astype(np.int64), self.store.length.astype(np.int64)
        options = with_seed(options, self.device)  # one for all runs
        offset = options.get("q_offset")
        if offset is None:
            offset = length - q_rows
        q_first = checks.offsets(offset, self.batch, q_rows, self.capacity)
        ring.check(first, q_first, self.capacity, options)
        if ring.order_does_not_matter(first, length, self.capacity, q_rows, options):
            kv_lengths = torch.from_numpy((length - first).astype(np.int32)).to(self.device)
            operands = self.store.operands(min(self.capacity, rounded(int((length - first).max(initial=0)))), seq_major)
            return attention(q, *operands, kv_lengths=kv_lengths, **options | {"causal": False, "window": None})
        options.pop("q_offset", None)
        lse, out, wanted = (options.pop(name, None) for name in ("return_lse", "out", "return_aux"))
        back, q = converter_back(q), to_tensor("q", q)
        sinks = None
        if wanted is None:
            options["return_lse"] = True
        else:  # sinks last: how much of a part they have taken cannot be told from its entropy
            options["return_aux"] = tuple(dict.fromkeys(("lse", *wanted)))
            sinks, options["sinks"] = options.get("sinks"), None
        states: list[Any] = []
        absolute = any(options.get(name) is not None for name in ("score_mod", "mask_mod", "dropout_seed"))
        for run in ring.runs(first, length, q_first, self.capacity, options.get("window")):
            lengths, offsets = (torch.from_numpy(x).to(self.device, torch.int32) for x in (run.lengths, run.offsets))
            slots = min(self.capacity, rounded(int(run.lengths.max(initial=0))))
            mask = None if run.hidden is None else ring.mask_below(run.hidden, slots, self.device)
            if absolute:  # they are given positions
                start = torch.from_numpy(run.start).to(self.device, torch.int32)
                options["k_start"], offsets = start, offsets + start
            states.append(attention(
                q, *self.store.operands(slots, seq_major), kv_lengths=lengths, q_offset=offsets, mask=mask,
                **options,
            ))  # fmt: skip
            options["sinks"] = None  # once
        if sinks is not None:
            sinks = to_tensor("sinks", sinks) if seq_major else to_tensor("sinks", sinks)[:, None]
        state = states[0] if len(states) == 1 and sinks is None else merge(states, sinks=sinks)
        result = map_result(state, lambda x: back(x if out is None else copy_to_out(out, x)), back)
        if wanted is None:
            return result if lse else result.out
        return result if "lse" in wanted else (result[0], result[1]._replace(lse=None))
