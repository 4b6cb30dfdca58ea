"""`ShardedKVCache`: sequences whose tokens are sharded over the ranks of a mesh, for decoding (DCP).

Token i of a sequence is on rank `i // interleave % R`. In a step, the queries of all ranks' heads are gathered, each
rank attends over its own tokens, and each gets back the merged results of its heads: one gather, one all-to-all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch

from ..core.eager import eager
from ..core.options import is_int
from ..errors import InvalidArgument
from ..kv_cache import PagedKVCache
from ..kv_cache.checks import sequence_ids
from .agreement import agreed
from .layout import ranks_of
from .sharded_batch import ShardedBatch, attend, check_rows, described_rows

Result = TypeVar("Result")


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
    have the same ids on all ranks. Ranks compare every change: one that a rank refuses, or has no room for, is undone
    and refused on all.

    Args:
        mesh: as in `attention`.
        num_pages: pages on each rank. This and all other arguments are those of each rank's `PagedKVCache`.
        interleave: number of consecutive tokens that a rank holds before the next rank follows.
    """

    def __init__(self, mesh: Any, num_pages: int, page_size: int, *args: Any, interleave: int = 1, **options: Any):
        if not is_int(interleave) or not 1 <= interleave < 2**31:
            raise InvalidArgument(
                "interleave", repr(interleave), "the number of consecutive tokens that a rank stores, 1 to 2**31 - 1"
            )
        self.ranks, _ = ranks_of(mesh, "ring")
        self.interleave = interleave
        self.cache = PagedKVCache(num_pages, page_size, *args, **options)
        self.lengths: dict[int, int] = {}

    def __copy__(self) -> ShardedKVCache:
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedKVCache:
        """A separate cache over the same ranks; all of them have to make it."""
        new = object.__new__(type(self))
        new.ranks, new.interleave = self.ranks, self.interleave
        new.cache, new.lengths = copy.deepcopy(self.cache, memo), dict(self.lengths)
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
        self._change("create", dict, lambda: None)
        sequence = self.cache.create()
        self.lengths[sequence] = 0
        return sequence

    def fork(self, sequence: int) -> int:
        """A new sequence that shares all tokens of another; returns its id."""

        def check() -> None:
            whole = self.cache.view([sequence], 0)
            for layer in range(self.cache.layers):
                whole.check(layer)

        self._change("fork", lambda: self._about([sequence]), check)
        new = self.cache.fork(sequence)
        self.lengths[new] = self.length(sequence)
        return new

    def free(self, sequences: int | Sequence[int]) -> None:
        """Frees sequences."""
        ids = _ids(sequences)
        self._change("free", lambda: self._about(ids()), lambda: self.cache.view(ids(), 0))
        self.cache.free(ids())
        for sequence in ids():
            del self.lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Shortens a sequence to `length` tokens, counted over all ranks."""

        def check() -> None:
            if not is_int(length) or not 0 <= length <= self.length(sequence):
                raise InvalidArgument(
                    "length", repr(length), f"0 to {self.length(sequence)}, the tokens of the sequence"
                )

        self._change("truncate", lambda: {**self._about([sequence]), "length": length}, check)
        self.cache.truncate(sequence, self.own_tokens(length))
        self.lengths[sequence] = length

    def length(self, sequence: int) -> int:
        """Number of tokens of a sequence on all ranks together."""
        (number,) = sequence_ids([sequence])
        if number not in self.lengths:
            raise InvalidArgument("sequence", repr(sequence), "the id of a sequence that is not freed")
        return self.lengths[number]

    def own_tokens(self, length: int) -> int:
        return tokens_on_rank(length, self.ranks.rank, self.ranks.size, self.interleave)

    def append(self, sequences: int | Sequence[int], k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        """Appends tokens `[B, Hkv, L, D]`, of which each rank stores its own, in a cache with one layer.

        A latent cache takes only k.

        Raises:
            CacheFull: a rank has too few free pages; nothing has changed on any.
        """
        ids = _ids(sequences)

        def change() -> ShardedBatch:
            if self.cache.layers > 1:
                remedy = "extend, then write each layer"
                raise InvalidArgument("layers", f"{self.cache.layers} layers", "one, to append", remedy)
            check_rows("k", k)
            batch = self._extended(ids(), k.shape[2])
            try:
                batch.batch.put(*batch.new_rows(k, v, 0), 0)
            except BaseException:
                batch.batch.undo()
                raise
            return batch

        batch = self._change("append", lambda: {**self._about(ids()), **described_rows(k, v)}, change, _undo)
        batch.keep_lengths()

    def extend(self, sequences: int | Sequence[int], count: int = 1) -> ShardedBatch:
        """Makes room for `count` new tokens of each sequence, once for all layers.

        Raises:
            CacheFull: a rank has too few free pages; nothing has changed on any.
        """
        ids = _ids(sequences)

        def arguments() -> dict[str, object]:
            return {**self._about(ids()), "count": count}

        batch = self._change("extend", arguments, lambda: self._extended(ids(), count), _undo)
        batch.keep_lengths()
        return batch

    def _extended(self, ids: list[int], count: int) -> ShardedBatch:
        """`extend` on this rank alone."""
        if not is_int(count) or count < 0:
            raise InvalidArgument("count", repr(count), "a number of new tokens of each sequence, 0 or more")
        before = [self.length(sequence) for sequence in ids]
        new = [self.own_tokens(n + count) - self.own_tokens(n) for n in before]
        return ShardedBatch(self, ids, self.cache.extend(ids, new), before, count)

    def _about(self, ids: Sequence[int]) -> dict[str, object]:
        """What must be equal on all ranks of sequences."""
        return {"sequences": [(sequence, self.length(sequence)) for sequence in ids]}

    def _change(
        self,
        name: str,
        arguments: Callable[[], dict[str, object]],
        change: Callable[[], Result],
        undo: Callable[[Result], object] = lambda _: None,
    ) -> Result:
        """The result of `change` on this rank, once all ranks have made it; else it is undone on those that have."""
        self.check_connected()
        made: list[Result] = []

        def make() -> Result:
            made.append(change())
            return made[0]

        try:
            return agreed([self.ranks], (), None, make, lambda: {"function": name, **arguments()}, None)
        except BaseException:
            for result in made:
                undo(result)
            raise

    def check_connected(self) -> None:
        if self.ranks.size > 1 and self.ranks.group is None:
            raise InvalidArgument(
                "cache", "a pickled cache, which has no ranks", "one with a mesh", "call cache.attach(mesh)"
            )

    def attend(self, sequences: int | Sequence[int], q: torch.Tensor, **options: Any) -> Any:
        """Attention of the last tokens' queries over their sequences; see `ShardedBatch.attend`."""
        ids = _ids(sequences)

        def last_tokens() -> ShardedBatch:
            check_rows("q", q)
            before = [self.length(sequence) - q.shape[2] for sequence in ids()]
            return ShardedBatch(self, ids(), self.cache.view(ids(), 0), before, q.shape[2])

        return attend(self, last_tokens, q, **options)

    def __repr__(self) -> str:
        mine = f"rank {self.ranks.rank} of {self.ranks.size}, interleave={self.interleave}"
        return f"ShardedKVCache({mine}, lengths={self.lengths}, {self.cache})"


def _ids(sequences: Any) -> Callable[[], list[int]]:
    """A function that returns the ids; an iterator is read once."""
    return cache(lambda: sequence_ids(sequences))


def _undo(batch: ShardedBatch) -> None:
    batch.batch.undo()
