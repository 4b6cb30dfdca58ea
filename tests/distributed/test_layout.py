"""Which rank holds which tokens."""

import pytest
import torch
from torch import distributed as dist

from ranks import Pool, mesh_of
from tilewise import InvalidArgument, distributed
from tilewise.distributed.layout import ORDERS, Ranks, as_offsets, pieces, ranks_of, rows_of

SIZES = [("2d", 3, 2), ("ulysses", 1, 4), *((scheme, 4, 1) for scheme in ORDERS if scheme not in ("2d", "ulysses"))]


def everyones(length, ring, inner, scheme, cu=()):
    places = [(Ranks(None, r, ring), Ranks(None, u, inner)) for r in range(ring) for u in range(inner)]
    return [rows_of(length, *place, scheme, cu) for place in places]


@pytest.mark.parametrize(("scheme", "ring", "inner"), SIZES)
@pytest.mark.parametrize("length", [0, 1, 7, 24, 25, 96])
def test_each_token_is_on_one_rank(scheme, ring, inner, length):
    held = everyones(length, ring, inner, scheme)
    assert torch.cat(held).sort().values.tolist() == list(range(length))
    counts = [len(x) for x in held]
    assert max(counts) - min(counts) <= (2 if ORDERS[scheme] == "zigzag" else 1)
    if length % (2 * ring * inner) == 0:
        assert len(set(counts)) == 1


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_packed_documents_are_cut_one_by_one_in_a_zigzag_only(order):
    cu = (0, 16, 17, 17, 41)
    held = [pieces(45, 2, rank, order, cu) for rank in range(2)]  # four tokens belong to nobody
    found = sorted(token for of in held for start, count, _ in of for token in range(start, start + count))
    assert found == list(range(45))
    first = [piece for of in held for piece in of if piece.start < 16]
    assert len(first) == (4 if order == "zigzag" else 1)


def test_striped_is_round_robin():
    assert [x.tolist() for x in everyones(7, 3, 1, "striped")] == [[0, 3, 6], [1, 4], [2, 5]]


def test_what_is_no_mesh_or_scheme():
    with pytest.raises(InvalidArgument, match=r"scheme: got 'circle', expected one of 'ring'"):
        ranks_of(None, "circle")
    with pytest.raises(InvalidArgument, match="mesh: got a int, expected a DeviceMesh"):
        ranks_of(4, "ring")


@pytest.mark.parametrize("cu", [[0], [1, 4], [0, 5, 3], [0, 11]])
def test_offsets_that_are_none(cu):
    with pytest.raises(InvalidArgument, match="cu_seqlens"):
        as_offsets(torch.tensor(cu), 10)


def _unsharded():
    """What `unshard` and its like say of odd arguments, on each rank."""
    found, rank, mesh = [], dist.get_rank(), mesh_of("4")
    whole = torch.arange(10.0)
    part = distributed.shard(whole, mesh, 0)
    narrow = distributed.unshard(part.to(torch.float8_e4m3fn), mesh, -1, length=10)
    found.append(torch.equal(narrow.float(), whole))
    others = dist.new_group([0])
    x = torch.randn(1, 4, 4, 8)
    calls = [
        lambda: distributed.unshard(part, mesh, 0),  # parts differ by a token
        lambda: distributed.unshard(torch.zeros(2, 2 + rank), mesh, 0),
        lambda: distributed.unshard(torch.zeros(2, dtype=torch.float64 if rank else torch.float32), mesh, 0),
        lambda: distributed.unshard(torch.zeros(2), mesh, 0, length=8 + rank),
        lambda: distributed.unshard(torch.tensor(1.0), mesh, 0),
        lambda: distributed.shard([1, 2], mesh, 0),
        lambda: distributed.shard(whole, mesh, "tokens"),
        lambda: distributed.shard(whole, mesh, True),
        lambda: distributed.positions(10**30, mesh),
        lambda: distributed.attention(*[x.to("meta")] * 3, mesh=mesh),
        lambda: torch.vmap(lambda y: distributed.attention(y, x, x, mesh=mesh))(x[None]),
        lambda: torch.func.grad(lambda y: distributed.attention(y, x, x, mesh=mesh).sum())(x),
        lambda: rank and distributed.shard(whole, others, 0),
    ]
    for call in calls:
        try:
            call()
            found.append("none")
        except InvalidArgument as error:
            found.append(error.argument)
    try:
        distributed.unshard(part, mesh, 0)
    except InvalidArgument as error:
        found.append("pass length=" in str(error))
    out = distributed.attention(x, x, x, mesh=mesh, length=[16, 16], backend="torch")
    compiled = torch.compile(lambda y: distributed.attention(y, x, x, mesh=mesh, backend="torch") + 0, backend="eager")
    found.append(torch.equal(compiled(x), out))
    return found


def test_odd_arguments_are_refused_on_all_ranks():
    names = ["x", "x", "x", "length", "dim", "x", "dim", "dim", "length", "q", "q", "q"]
    with Pool(4) as pool:
        answers = pool(_unsharded)
    assert answers == [[True, *names, "mesh" if rank else "none", True, True] for rank in range(4)]
