"""How the tokens of a sequence are distributed over the ranks of a mesh: which rank holds which, in which order.

A rank holds *pieces*, runs of tokens `start, start + stride, ...`, concatenated along the sharded dim.

    contiguous   rank r of R holds the r-th part
    zigzag       the sequence is cut into 2R chunks, and rank r holds chunks r and 2R - 1 - r: with causal all ranks
                 have equal work. Packed documents are cut one by one
    striped      token i is on rank i mod R

Parts differ by at most one token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..core.options import is_int
from ..errors import InvalidArgument
from .agreement import agreed
from .faults import report_lost_ranks

ORDERS = {
    "ring": "contiguous",
    "zigzag": "zigzag",
    "striped": "striped",
    "gather": "zigzag",
    "ulysses": "contiguous",
    "2d": "zigzag",
}


class Piece(NamedTuple):
    """`size` tokens: `start`, `start + stride`, ..."""

    start: int
    size: int
    stride: int = 1


class Ranks(NamedTuple):
    """One dim of a mesh: its process group, this process's rank in it, and its size."""

    group: Any
    rank: int
    size: int


def ranks_of(mesh: Any, scheme: str) -> tuple[Ranks, Ranks]:
    """The two dims of a mesh: the ring, which shards the sequence, and the inner ranks, which exchange heads."""
    alone = Ranks(None, 0, 1)
    if scheme not in ORDERS:
        raise InvalidArgument("scheme", repr(scheme), f"one of {', '.join(map(repr, ORDERS))}")
    outside = (
        mesh.get_coordinate() is None if isinstance(mesh, DeviceMesh) else mesh is dist.GroupMember.NON_GROUP_MEMBER
    )
    if outside:
        raise InvalidArgument(
            "mesh", "a mesh without this rank", "one that contains it", "make the call on ranks of the mesh only"
        )
    if isinstance(mesh, DeviceMesh):
        want = 2 if scheme == "2d" else 1
        if mesh.ndim != want:
            remedy = "mesh['name'] is one dim of a larger mesh" if want == 1 else "the ring is dim 0, Ulysses dim 1"
            raise InvalidArgument("mesh", f"{mesh.ndim} dims", f"{want} for scheme={scheme!r}", remedy)
        dims = [Ranks(mesh.get_group(d), mesh.get_local_rank(d), mesh.size(d)) for d in range(want)]
    elif isinstance(mesh, dist.ProcessGroup):
        if scheme == "2d":
            raise InvalidArgument("mesh", "a ProcessGroup", "a DeviceMesh of 2 dims for scheme='2d'")
        dims = [Ranks(mesh, dist.get_rank(mesh), dist.get_world_size(mesh))]
    else:
        raise InvalidArgument("mesh", f"a {type(mesh).__name__}", "a DeviceMesh or a ProcessGroup")
    if scheme == "2d":
        return dims[0], dims[1]
    return (alone, dims[0]) if scheme == "ulysses" else (dims[0], alone)


def pieces(length: int, ring: int, rank: int, order: str, cu_seqlens: Sequence[int] = ()) -> tuple[Piece, ...]:
    """The pieces of one rank of a ring, in the order of its memory.

    >>> pieces(16, 2, 1, "zigzag")
    (Piece(start=4, size=4, stride=1), Piece(start=8, size=4, stride=1))
    """
    if order == "striped":
        parts = [Piece(rank, len(range(rank, length, ring)), ring)]
    elif order == "contiguous":
        parts = [_part(0, length, ring, rank)]
    else:
        bounds = sorted({0, *cu_seqlens, length})
        ends = itertools.pairwise(bounds)
        parts = [_part(lo, hi - lo, 2 * ring, i) for lo, hi in ends for i in (rank, 2 * ring - 1 - rank)]
    return tuple(piece for piece in parts if piece.size)


def _part(start: int, length: int, parts: int, i: int) -> Piece:
    lo, hi = i * length // parts, (i + 1) * length // parts
    return Piece(start + lo, hi - lo)


def inner_sizes(count: int, inner: int) -> list[int]:
    """How many of a ring rank's tokens each rank of its inner group holds."""
    return [_part(0, count, inner, u).size for u in range(inner)]


def total(pieces: Sequence[Piece]) -> int:
    return sum(piece.size for piece in pieces)


def global_length(count: int, length: int | None, ring: int, inner: int) -> int:
    """The tokens of all ranks: as given, or `count` on each."""
    if length is None:
        return count * ring * inner
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length < 2**62:
        raise InvalidArgument("length", repr(length), "the number of tokens on all ranks")
    return length


def packed_length(cu_seqlens: Any) -> int | None:
    """The tokens of all packed sequences; None without offsets, or with offsets that `as_offsets` will refuse."""
    last: Any = cu_seqlens[-1] if isinstance(cu_seqlens, (list, tuple)) and cu_seqlens else None
    return int(last) if hasattr(last, "__index__") and int(last) >= 0 else None


def rows_of(length: int, ring: Ranks, inner: Ranks, scheme: str, cu_seqlens: Sequence[int] = ()) -> torch.Tensor:
    """The tokens of one rank, int64 on the CPU."""
    own_pieces = pieces(length, ring.size, ring.rank, ORDERS[scheme], cu_seqlens)
    parts = [torch.arange(p.start, p.start + p.size * p.stride, p.stride, device="cpu") for p in own_pieces]
    rows = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")
    return rows.split(inner_sizes(len(rows), inner.size))[inner.rank]


def is_meta(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_meta


def values_of(name: str, x: Any) -> Any:
    """A tensor's values as a list; anything else as it is."""
    if is_meta(x):
        raise InvalidArgument(name, "a tensor on meta", "its values: they decide which rank sends what")
    return x.tolist() if hasattr(x, "tolist") else x


def as_offsets(cu_seqlens: Any, length: int, name: str = "cu_seqlens") -> tuple[int, ...]:
    """Offsets of packed sequences as ints; a tensor on a GPU is waited for."""
    if cu_seqlens is None:
        return ()
    offsets = list(values_of(name, cu_seqlens))
    if not all(hasattr(x, "__index__") for x in offsets):
        raise InvalidArgument(name, str(offsets[:4]), "ints of one dim")
    ints = tuple(int(x) for x in offsets)
    rising = all(a <= b for a, b in itertools.pairwise(ints))
    if len(ints) < 2 or ints[0] != 0 or ints[-1] > length or not rising:
        want = f"offsets of all ranks' sequences: from 0, not decreasing, to at most {length} tokens"
        raise InvalidArgument(name, str(ints[:8]), want)
    return ints


# Public functions


def positions(length: int, mesh: Any, scheme: str = "zigzag", *, cu_seqlens: Any = None) -> torch.Tensor:
    """The positions of this rank's tokens in the sequence, for rotary embeddings and labels: int64 `[n]` on the CPU.

    Args:
        length: number of tokens on all ranks together.
        mesh: as in `attention`.
        scheme: as in `attention`.
        cu_seqlens: int `[B + 1]`, offsets of packed sequences. Positions then count from the start of each sequence.
    """
    ring, inner = ranks_of(mesh, scheme)
    length = global_length(0, length, ring.size, inner.size)
    offsets = as_offsets(cu_seqlens, length)
    rows = rows_of(length, ring, inner, scheme, offsets)
    if not offsets:
        return rows
    starts = torch.tensor(offsets, device="cpu")
    return rows - starts[torch.searchsorted(starts, rows, right=True) - 1]


def shard(x: torch.Tensor, mesh: Any, dim: int, scheme: str = "zigzag", *, cu_seqlens: Any = None) -> torch.Tensor:
    """This rank's part of a tensor that every rank holds in full: its tokens along `dim`, as `scheme` distributes them.

    Args:
        x: the full tensor, the same on every rank.
        mesh: as in `attention`.
        dim: the token dim; for a mask, the dim of its rows.
        scheme: as in `attention`.
        cu_seqlens: int `[B + 1]`, offsets of packed sequences along `dim`. A zigzag distributes each separately.

    Returns:
        A copy of the part. Gradients flow back to `x`.
    """
    ring, inner = ranks_of(mesh, scheme)
    check_dim("x", x, "dim", dim)
    rows = rows_of(x.shape[dim], ring, inner, scheme, as_offsets(cu_seqlens, x.shape[dim]))
    return x.index_select(dim, rows.to(x.device))


def unshard(
    x: torch.Tensor,
    mesh: Any,
    dim: int,
    scheme: str = "zigzag",
    *,
    length: int | None = None,
    cu_seqlens: Any = None,
) -> torch.Tensor:
    """The full tensor, on every rank, from its parts: the inverse of `shard`. It has no gradients.

    The ranks first compare their arguments, with one small exchange.

    Args:
        x: this rank's part.
        mesh: as in `attention`.
        dim: the token dim.
        scheme: as in `attention`.
        length: number of tokens on all ranks together. None: equally many on each rank, or as `cu_seqlens` say.
        cu_seqlens: as given to `shard`.
    """
    ring, inner = ranks_of(mesh, scheme)

    def check() -> tuple[int, int, list[list[torch.Tensor]]]:
        check_dim("x", x, "dim", dim)
        plain = values_of("cu_seqlens", cu_seqlens)
        given = packed_length(plain) if length is None else length
        tokens = global_length(x.shape[dim], given, ring.size, inner.size)
        offsets = as_offsets(plain, tokens)
        places = (
            [Ranks(None, r, ring.size) for r in range(ring.size)],
            [Ranks(None, u, inner.size) for u in range(inner.size)],
        )
        rows = [[rows_of(tokens, r, u, scheme, offsets) for u in places[1]] for r in places[0]]
        check_count("x", x.shape[dim], len(rows[ring.rank][inner.rank]), tokens)
        return dim % x.ndim, tokens, rows

    def arguments() -> dict[str, object]:
        plain, at = values_of("cu_seqlens", cu_seqlens), dim % x.ndim
        even = length is None and packed_length(plain) is None
        sizes = (*x.shape[:at], x.shape[at] if even else None, *x.shape[at + 1 :], x.dtype)
        shared = {"scheme": scheme, "dim": at, "cu_seqlens": plain, "length": length, "x": sizes}
        return {"function": "unshard", **shared}

    device = x.device if isinstance(x, torch.Tensor) else None
    dim, length, rows = agreed((inner, ring), (), True, check, arguments, device)  # otherwise Gloo ends the process
    moved = x.detach().movedim(dim, 0).contiguous()
    if scheme == "2d":  # the inner ranks first: together they hold a ring rank's shard
        moved = torch.cat(_gathered(moved, inner, [len(part) for part in rows[ring.rank]]))
        parts = _gathered(moved, ring, [sum(map(len, of_rank)) for of_rank in rows])
    else:
        ranks = inner if scheme == "ulysses" else ring
        parts = _gathered(moved, ranks, [len(part) for of_rank in rows for part in of_rank])
    order = torch.cat([part for of_rank in rows for part in of_rank]).to(x.device)
    full = moved.new_empty((length, *moved.shape[1:]))
    full[order] = torch.cat(parts)
    return full.movedim(0, dim)


def check_dim(name: str, x: Any, dim_name: str, dim: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument(name, f"a {type(x).__name__}", "a torch tensor")
    if not is_int(dim) or not -x.ndim <= dim < x.ndim:
        raise InvalidArgument(dim_name, repr(dim), f"a dim of a tensor of {x.ndim}")


def check_count(name: str, given: int, expected: int, length: int) -> None:
    if given != expected:
        remedy = "pass length=, the tokens of all ranks, if they hold different numbers; see tilewise.distributed.shard"
        raise InvalidArgument(name, f"{given} tokens", f"{expected}, this rank's of {length}", remedy)


def _gathered(x: torch.Tensor, ranks: Ranks, sizes: list[int]) -> list[torch.Tensor]:
    """The tensors of all ranks, `[size, ...]`, padded in transit, since collectives need equal shapes."""
    if ranks.size == 1:
        return [x]
    padded = x.new_zeros((max(sizes), *x.shape[1:]))
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in sizes]
    sent = [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (*parts, padded)]  # no float8 on some
    with report_lost_ranks(ranks):
        dist.all_gather(sent[:-1], sent[-1], group=ranks.group)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]
