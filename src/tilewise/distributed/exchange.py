"""Messages between ranks: K and V to those that need them, their gradients back, and heads exchanged for tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .faults import RankLost, connected, lost_rank, report_lost_ranks
from .layout import Ranks
from .schedule import Range, Round, Source

Tensors = tuple[torch.Tensor, ...]
AddGradient = Callable[[Range, torch.Tensor], None]


def gather_rows(x: torch.Tensor, dim: int, ranges: Sequence[Range]) -> torch.Tensor:
    """The rows of `x` in `ranges`, contiguous; not copied if they are one range that is contiguous in memory."""
    parts = [x.narrow(dim, lo, hi - lo) for lo, hi in ranges]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


def resized(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """An empty tensor like `x` with another size along `dim`."""
    return x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])


def connect(ranks: Ranks, device: torch.device) -> None:
    """Sets up a group's communicator by an exchange of all ranks, once.

    NCCL does so in the group's first exchange, in which all ranks must take part; in a ring step some have nothing to
    send.
    """
    if ranks.size > 1 and ranks.group not in connected:
        with report_lost_ranks(ranks):
            dist.all_reduce(torch.zeros(1, device=device), group=ranks.group)
        connected.add(ranks.group)


class Messages:
    """Messages in transit: `wait` before reading what is received or reusing what is sent."""

    def __init__(self, ranks: Ranks, sends: Sequence[tuple[int, Tensors]], receipts: Sequence[tuple[int, Tensors]]):
        self.ranks, self.messages = ranks, (sends, receipts)
        ops = []
        for kind, messages in ((dist.irecv, receipts), (dist.isend, sends)):
            for peer, tensors in messages:
                at = dist.get_global_rank(ranks.group, peer)
                ops += [dist.P2POp(kind, x, at, ranks.group) for x in tensors if x.numel()]
        try:
            self.works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise lost_rank(ranks, sorted({peer for peer, _ in (*sends, *receipts)}), error) from error

    def wait(self) -> None:
        works, peers = self.works, sorted({peer for messages in self.messages for peer, _ in messages})
        self.works = []
        lost = None
        for work in works:  # all, even after an error: posted operations must not outlive their memory
            try:
                work.wait()
            except RuntimeError as error:
                lost = lost or error
        self.messages = (), ()
        if lost is not None:
            raise lost_rank(self.ranks, peers, lost) from lost


class KVReceive:
    """The keys and values of a round, in transit to this rank; `buffer` waits for them.

    `row_cache` holds the rows of `tensors` that earlier rounds have sent, by their ranges; this round adds its own.
    """

    def __init__(
        self, ranks: Ranks, round: Round, tensors: Tensors, dim: int, row_cache: dict[tuple[Range, ...], Tensors]
    ) -> None:
        self.round, self.dim, self.rank = round, dim, ranks.rank

        def rows(source: Source) -> Tensors:
            if source.ranges not in row_cache:
                row_cache[source.ranges] = tuple(gather_rows(x, dim, source.ranges) for x in tensors)
            return row_cache[source.ranges]

        self.received: dict[int, Tensors] = {}
        for source in round.sources:
            if source.rank != ranks.rank:
                self.received[source.rank] = tuple(resized(x, dim, source.rows) for x in tensors)
            elif source.ranges == ((0, tensors[0].shape[dim]),):
                self.received[source.rank] = tensors
            else:
                self.received[source.rank] = rows(source)
        receipts = [(rank, x) for rank, x in self.received.items() if rank != ranks.rank]
        self.messages = Messages(ranks, [(to.rank, rows(to)) for to in round.sends], receipts)

    def buffer(self) -> Tensors:
        """K and V of the round, with rows as its pairs number them; empty if this rank needs none."""
        self.messages.wait()
        order = self.round.order
        if len(order) < 2:
            return self.received[order[0][0]] if order else ()
        both = zip(*(self.received[rank] for rank, _, _ in order), strict=True)
        return tuple(
            torch.cat(
                [x.narrow(self.dim, row, count) for x, (_, row, count) in zip(parts, order, strict=True)], self.dim
            )
            for parts in both
        )


class GradReturn:
    """Gradients of a round's keys and values, in transit to their owners; `add` waits for this rank's own.

    `accumulate` has a function for each of `tensors` that adds the gradient of some of its rows.
    """

    def __init__(
        self, ranks: Ranks, round: Round, grads: Tensors, accumulate: Sequence[AddGradient], tensors: Tensors, dim: int
    ) -> None:
        self.round, self.dim, self.accumulate = round, dim, accumulate
        by_rank = {source.rank: self._rows_of(source.rank, grads) for source in round.sources} if grads else {}
        own = by_rank.pop(ranks.rank, None)
        if own is not None:
            self._accumulate(own, next(source for source in round.sources if source.rank == ranks.rank))
        self.received = [tuple(resized(x, dim, to.rows) for x in tensors) for to in round.sends]
        receipts = [(to.rank, x) for to, x in zip(round.sends, self.received, strict=True)]
        sends = [
            (rank, tuple(x.to(t.dtype).contiguous() for x, t in zip(part, tensors, strict=True)))
            for rank, part in by_rank.items()
        ]
        self.messages = Messages(ranks, sends, receipts)

    def _rows_of(self, rank: int, grads: Tensors) -> Tensors:
        """The rows from one source, in the order in which it sent them."""
        if len(self.round.order) < 2:
            return grads
        at, places = 0, []
        for owner, row, count in self.round.order:
            if owner == rank:
                places.append((row, at, count))
            at += count
        return tuple(torch.cat([x.narrow(self.dim, i, n) for _, i, n in sorted(places)], self.dim) for x in grads)

    def _accumulate(self, parts: Tensors, source: Source) -> None:
        for add, part in zip(self.accumulate, parts, strict=True):
            at = 0
            for lo, hi in source.ranges:
                add((lo, hi), part.narrow(self.dim, at, hi - lo))
                at += hi - lo

    def add(self) -> None:
        """Adds other ranks' gradients of this rank's keys and values in the order of ranks: deterministic."""
        self.messages.wait()
        for to, parts in zip(self.round.sends, self.received, strict=True):
            self._accumulate(parts, to)


@contextlib.contextmanager
def drained_on_error(in_transit: Sequence[KVReceive | GradReturn]) -> Iterator[None]:
    """Waits, after an error, for messages whose results are no longer needed."""
    try:
        yield
    except BaseException:
        for exchange in in_transit:
            with contextlib.suppress(RankLost):
                exchange.messages.wait()
        raise


# Heads for tokens


def all_to_all(parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], ranks: Ranks) -> list[torch.Tensor]:
    """Sends `parts[u]` to rank u and receives tensors of `shapes`, one from each."""
    counts = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.cat([x.reshape(-1) for x in parts])
    received = flat.new_empty(sum(counts))
    with report_lost_ranks(ranks):
        dist.all_to_all_single(received, flat, counts, [x.numel() for x in parts], group=ranks.group)
    return [x.view(tuple(shape)) for x, shape in zip(received.split(counts), shapes, strict=True)]


class Heads:
    """An exchange: before it, each rank has some tokens of all heads; after it, all tokens of some heads."""

    def __init__(self, ranks: Ranks, heads: Sequence[Sequence[int]], sizes: Sequence[int], head: int, seq: int) -> None:
        self.ranks, self.heads, self.sizes, self.head, self.seq = ranks, heads, sizes, head, seq

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens of this rank's heads, from some tokens of all heads. A head may go to several ranks."""
        index = [torch.tensor(list(h), device=x.device) for h in self.heads]
        parts = [x.index_select(self.head, i) for i in index]
        shape = list(x.shape)
        shape[self.head] = len(self.heads[self.ranks.rank])
        shapes = [[*shape[: self.seq], size, *shape[self.seq + 1 :]] for size in self.sizes]
        return torch.cat(all_to_all(parts, shapes, self.ranks), self.seq)

    def scatter(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """This rank's tokens of all `count` heads; a head that several ranks had is summed, in float32."""
        parts = list(x.split(list(self.sizes), self.seq))
        shape = list(parts[self.ranks.rank].shape)
        shapes = [[*shape[: self.head], len(h), *shape[self.head + 1 :]] for h in self.heads]
        received = all_to_all(parts, shapes, self.ranks)
        if [i for h in self.heads for i in h] == list(range(count)):
            return torch.cat(received, self.head)
        whole = x.new_zeros([*shape[: self.head], count, *shape[self.head + 1 :]], dtype=torch.float32)
        for part, heads in zip(received, self.heads, strict=True):
            whole.index_add_(self.head, torch.tensor(list(heads), device=x.device), part.float())
        return whole.to(x.dtype)


class ToHeads(torch.autograd.Function):
    """`Heads.gather`, whose gradient is `Heads.scatter`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, heads: Heads) -> torch.Tensor:
        ctx.heads, ctx.count = heads, x.shape[heads.head]
        return heads.gather(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.heads.scatter(dx, ctx.count), None


class ToTokens(torch.autograd.Function):
    """`Heads.scatter` of heads that one rank has each, whose gradient is `Heads.gather`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, heads: Heads) -> torch.Tensor:
        ctx.heads = heads
        return heads.scatter(x, sum(map(len, heads.heads)))

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.heads.gather(dx), None
