"""`ShardedKVCache`: sequences whose tokens are sharded over the ranks of a mesh, for decoding (DCP).

Token i of a sequence is on rank `i // interleave % R`. In a step, the queries of all ranks' heads are gathered, each
rank attends over its own tokens, and each gets back the merged results of its heads: one gather, one all-to-all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..api import paged_attention
from ..core import keywords
from ..core.eager import eager
from ..core.mask_rules import NO_RULES, near
from ..core.options import Options, as_rules, is_int
from ..errors import InvalidArgument
from ..kv_cache import PagedKVCache
from ..kv_cache.checks import sequence_ids
from .agreement import Kind, agreed, described
from .arguments import functions_of, with_functions
from .combine import combine, gathered
from .layout import ranks_of

# Options of `paged_attention` that do not work here: keys are this rank's alone, heads are those of all ranks.
RULES = tuple(name for name in NO_RULES.options() if name != "causal")
FUNCTIONS = ("score_mod", "mask_mod")
TAKEN = (*RULES, *FUNCTIONS, "scale", "softcap", "alibi_slopes", "split_size", "allow_tf32", "validate", "backend")
OPTIONS = ("sinks", "return_lse", *TAKEN)


def tokens_on_rank(length: int, rank: int, ranks: int, interleave: int) -> int:
    """How many of a sequence's first `length` tokens a rank holds.

    >>> [tokens_on_rank(10, rank, 3, 2) for rank in range(3)]
    [4, 4, 2]
    """
    rounds, rest = divmod(length, interleave * ranks)
    return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)


@eager
class ShardedKVCache:
    """A `PagedKVCache` on each of the R ranks of a mesh; together they hold R times as many tokens.

    Every rank calls every method with the same sequences and the same new tokens, and stores its own share. Sequences
    have the same ids on all ranks.

    Args:
        mesh: as in `attention`.
        num_pages: pages on each rank. This and all other arguments are those of each rank's `PagedKVCache`.
        interleave: number of consecutive tokens that a rank holds before the next rank follows.
    """

    def __init__(self, mesh: Any, num_pages: int, page_size: int, *args: Any, interleave: int = 1, **options: Any):
        if not is_int(interleave) or not 1 <= interleave < 2**31:
            raise InvalidArgument("interleave", repr(interleave), "tokens that lie together, 1 or more, below 2**31")
        self.ranks, _ = ranks_of(mesh, "ring")
        self.interleave = interleave
        self.cache = PagedKVCache(num_pages, page_size, *args, **options)
        self._length: dict[int, int] = {}

    def __copy__(self) -> ShardedKVCache:
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedKVCache:
        """A separate cache over the same ranks; all of them have to make it."""
        new = object.__new__(type(self))
        new.ranks, new.interleave = self.ranks, self.interleave
        new.cache, new._length = copy.deepcopy(self.cache, memo), dict(self._length)
        return new

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"ranks": self.ranks._replace(group=None)}

    def attach(self, mesh: Any) -> None:
        """Connects an unpickled cache to a mesh of the same size, in which this rank has the same place."""
        ranks, _ = ranks_of(mesh, "ring")
        if ranks[1:] != self.ranks[1:]:
            want = f"rank {self.ranks.rank} of {self.ranks.size}, whose tokens these are"
            raise InvalidArgument("mesh", f"rank {ranks.rank} of {ranks.size}", want)
        self.ranks = ranks

    def create(self) -> int:
        """Creates an empty sequence and returns its id."""
        sequence = self.cache.create()
        self._length[sequence] = 0
        return sequence

    def fork(self, sequence: int) -> int:
        """A new sequence that shares all tokens of another; returns its id."""
        new = self.cache.fork(sequence)
        self._length[new] = self.length(sequence)
        return new

    def free(self, sequences: int | Sequence[int]) -> None:
        """Frees sequences."""
        self.cache.free(sequences)
        for sequence in sequence_ids(sequences):
            del self._length[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Shortens a sequence to `length` tokens, counted over all ranks."""
        if not is_int(length) or not 0 <= length <= self.length(sequence):
            raise InvalidArgument("length", repr(length), f"0 to {self.length(sequence)}, what the sequence holds")
        self.cache.truncate(sequence, self._own_tokens(length))
        self._length[sequence] = length

    def length(self, sequence: int) -> int:
        """Number of tokens of a sequence on all ranks together."""
        (number,) = sequence_ids([sequence])
        if number not in self._length:
            raise InvalidArgument("sequence", repr(sequence), "the id of a sequence that is not freed")
        return self._length[number]

    def _own_tokens(self, length: int) -> int:
        return tokens_on_rank(length, self.ranks.rank, self.ranks.size, self.interleave)

    def append(self, sequences: int | Sequence[int], k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        """Appends tokens `[B, Hkv, L, D]`, of which each rank stores its own, in a cache with one layer.

        A latent cache takes only k.
        """
        _check_rows("k", k)
        self.extend(sequences, k.shape[2]).write(k, v)

    def extend(self, sequences: int | Sequence[int], count: int = 1) -> ShardedBatch:
        """Makes room for `count` new tokens of each sequence, once for all layers.

        Raises:
            CacheFull: this rank has too few free pages. Others may have enough: give all ranks the same size.
        """
        if not is_int(count) or count < 0:
            raise InvalidArgument("count", repr(count), "a number of new tokens of each sequence, 0 or more")
        ids = sequence_ids(sequences)
        before = [self.length(sequence) for sequence in ids]
        new = [self._own_tokens(n + count) - self._own_tokens(n) for n in before]
        batch = self.cache.extend(ids, new)
        self._length |= {sequence: n + count for sequence, n in zip(ids, before, strict=True)}
        return ShardedBatch(self, ids, batch, before, count)

    def attend(self, sequences: int | Sequence[int], q: torch.Tensor, **options: Any) -> Any:
        """Attention of the last tokens' queries over their sequences; see `ShardedBatch.attend`."""

        def last_tokens() -> ShardedBatch:
            _check_rows("q", q)
            ids = sequence_ids(sequences)
            before = [self.length(sequence) - q.shape[2] for sequence in ids]
            return ShardedBatch(self, ids, self.cache.view(ids, 0), before, q.shape[2])

        return attend(self, last_tokens, q, **options)

    def __repr__(self) -> str:
        mine = f"rank {self.ranks.rank} of {self.ranks.size}, interleave={self.interleave}"
        return f"ShardedKVCache({mine}, lengths={self._length}, {self.cache})"


@eager
class ShardedBatch:
    """The result of `ShardedKVCache.extend`: room for new tokens of some sequences, in all layers."""

    def __init__(self, cache: ShardedKVCache, sequences: list[int], batch: Any, before: list[int], count: int) -> None:
        self.cache, self.sequences, self.batch, self.before, self.count = cache, sequences, batch, before, count

    def write(self, k: torch.Tensor, v: torch.Tensor | None = None, layer: int = 0) -> None:
        """Stores this rank's share of the new tokens `[B, Hkv, L, D]` of a layer. A latent cache takes only k."""
        for name, x in (("k", k), ("v", v)) if v is not None else (("k", k),):
            _check_rows(name, x)
            if x.shape[0] != len(self.sequences) or x.shape[2] != self.count:
                want = f"[{len(self.sequences)}, Hkv, {self.count}, D]"
                raise InvalidArgument(name, tuple(x.shape), f"{want}, all new tokens of every sequence")
        c = self.cache
        turn = c.ranks.size * c.interleave
        own = [
            (b, n - start)
            for b, start in enumerate(self.before)
            for n in range(start, start + self.count)
            if n % turn // c.interleave == c.ranks.rank
        ]
        rows, at = (torch.tensor([x[i] for x in own], dtype=torch.int64, device=k.device) for i in range(2))
        self.batch.write(*(None if x is None else x.transpose(1, 2)[rows, at] for x in (k, v)), layer)

    def attend(
        self, q: torch.Tensor, layer: int = 0, *, causal: bool = True, gather: bool = True, **options: Any
    ) -> Any:
        """Attention of the new tokens' queries over their sequences, on all ranks together.

        Args:
            q: `[B, H, L, D]`: this rank's heads or, with `gather=False`, the same heads on every rank.
            layer: which layer's keys and values.
            causal: a query sees keys up to its own position.
            gather: q has this rank's share of the heads, as in tensor parallelism: rank 0 has the first H, and so on.
            sinks: `[H]`, of this rank's heads.
            alibi_slopes: of the heads of all ranks; only with `interleave=1`.
            score_mod: of the heads of all ranks and positions in the whole sequence, as is `mask_mod`; likewise.

        The other options are `scale`, `window`, `chunk`, `softcap`, `split_size`, `allow_tf32`, `return_lse`, `backend`
        and `validate`. Ranks compare sizes and options as in `attention`.

        Returns:
            `[B, H, L, Dv]` for the heads of `q`; with `return_lse` an `AttentionState`.
        """
        return attend(self.cache, lambda: self, q, layer, causal=causal, gather=gather, **options)

    def positions(self, q: torch.Tensor, causal: bool, options: dict[str, Any]) -> dict[str, Any]:
        """Options for the positions of queries and this rank's keys: strides, or with `interleave` > 1 a mask."""
        c, ranks = self.cache, self.cache.ranks
        first = torch.tensor(self.before, dtype=torch.int32, device=q.device)
        if c.interleave == 1 or ranks.size == 1:
            return {"causal": causal, "q_offset": first, "k_start": ranks.rank, "k_stride": ranks.size}
        most = max((c._own_tokens(n + self.count) for n in self.before), default=0)
        j = torch.arange(max(most, 1), device=q.device)  # a rank without keys needs a mask too
        keys = (j // c.interleave * ranks.size + ranks.rank) * c.interleave + j % c.interleave
        queries = first[:, None, None] + torch.arange(self.count, device=q.device)[:, None]  # [B, L, 1]
        rules = {name: options.pop(name) for name in RULES if name in options}
        visible = near(as_rules(Options(**rules | {"causal": causal})), queries, keys)
        return {"causal": False, "mask": visible[:, None]}


def attend(
    c: ShardedKVCache,
    batch_of: Callable[[], ShardedBatch],
    q: Any,
    layer: int = 0,
    *,
    causal: bool = True,
    gather: bool = True,
    **options: Any,
) -> Any:
    """`ShardedBatch.attend` of a batch that is found, and may be refused, with the other checks of the call."""
    ranks, validate = c.ranks, options.get("validate")
    options = with_functions(options, q)
    if ranks.size > 1 and ranks.group is None:
        raise InvalidArgument("cache", "one that was pickled", "its ranks", "cache.attach(mesh)")
    kind: Kind = ()
    if ranks.size > 1 and validate is not False:
        sizes = (*q.shape, q.dtype, q.requires_grad) if isinstance(q, torch.Tensor) else type(q).__name__
        rules = {"causal": causal, "gather": gather, **options}.items()
        kind = ("function", "attend"), ("q", sizes), *sorted((name, described(x)) for name, x in rules if x is not None)

    def check() -> tuple[ShardedBatch, dict[str, Any]]:
        _check_rows("q", q)
        functions_of(options, q)
        _check_options(q, causal, c, options)
        return batch_of(), {name: x for name, x in options.items() if name in TAKEN}

    def arguments() -> dict[str, object]:
        given = dict(kind)
        names = ("function", "q", "causal", "gather", "sinks", "return_lse", *TAKEN)
        values: dict[str, object] = {name: given.pop(name, None) for name in names}
        slopes, batch = options.get("alibi_slopes"), batch_of()
        values["alibi_slopes"] = slopes.tolist() if isinstance(slopes, torch.Tensor) else slopes
        return values | {"options": sorted(given), "layer": layer, "sequences": (batch.sequences, batch.before)}

    device = q.device if isinstance(q, torch.Tensor) and not q.is_meta else None
    batch, passed = agreed([ranks], kind, validate, check, arguments, device)
    sinks, heads = options.get("sinks"), q.shape[1]
    if gather and ranks.size > 1:
        q = gathered(q, ranks, 1)
    passed |= batch.positions(q, causal, passed)
    if ranks.size == 1:
        passed["sinks"] = sinks
    state = c.cache.view(batch.sequences, 0).attend(q, layer, return_lse=True, **passed)
    if ranks.size > 1:  # a sink counts once, in the merge
        state = combine(state, ranks, heads if gather else 0, sinks=sinks)
    return state if options.get("return_lse") else state.out


def _check_options(q: torch.Tensor, causal: Any, c: ShardedKVCache, options: dict[str, Any]) -> None:
    """Checks the options of `attend` that need no other rank."""
    if unknown := [name for name, x in options.items() if name not in OPTIONS and x is not None]:
        known = keywords.of(paged_attention)
        if others := [name for name in unknown if name in known]:
            raise InvalidArgument(others[0], "one over a sharded cache", "none")
        names = ["q", "layer", "causal", "gather", *OPTIONS]
        keywords.refuse(unknown, names, "tilewise.distributed.ShardedKVCache.attend")
    heads, sinks = q.shape[1], options.get("sinks")
    if sinks is not None and (not isinstance(sinks, torch.Tensor) or sinks.shape != (heads,)):
        raise InvalidArgument("sinks", getattr(sinks, "shape", type(sinks).__name__), f"({heads},), of q's heads")
    if torch.is_grad_enabled() and q.requires_grad:
        raise InvalidArgument("q", "a tensor that requires grad", "one that does not", "a cache has no gradients")
    for name in ("alibi_slopes", *FUNCTIONS) if c.interleave > 1 and c.ranks.size > 1 else ():
        if options.get(name) is not None:
            raise InvalidArgument(name, "one over blocks of tokens", "none", "a cache with interleave=1 takes it")
    as_rules(Options(causal=causal, **{name: options[name] for name in RULES if name in options}))


def _check_rows(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor) or x.ndim != 4:
        raise InvalidArgument(name, getattr(x, "shape", type(x).__name__), "a torch tensor [B, H, L, D]")
