"""`score_mod` and `mask_mod` over four ranks: positions and heads are those of the whole call, by every scheme."""

import pytest
import torch
from torch import distributed as dist

import tilewise
from ranks import mesh_of
from test_schemes import SCHEMES
from tilewise import InvalidArgument, distributed

H, HKV, D = 4, 2, 8
CU = torch.tensor([0, 9, 29, 32], dtype=torch.int32)
DOC = torch.arange(64) // 6


class Given:
    """The tensors of a call, the same on all ranks, and its functions."""

    def __init__(self, packed, grad=True):
        g = torch.Generator().manual_seed(0)
        rows, shape = (3, (32,)) if packed else (2, (2, 19))
        sizes = {"q": H, "k": HKV, "v": HKV}
        if packed:
            made = {name: torch.randn(*shape, n, D, generator=g) for name, n in sizes.items()}
        else:
            made = {name: torch.randn(shape[0], n, shape[1], D, generator=g) for name, n in sizes.items()}
        self.qkv = {name: (2 * x).requires_grad_(grad) for name, x in made.items()}
        self.slope = torch.randn(rows, H, generator=g).requires_grad_(grad)
        self.table = torch.randn(H, 128, generator=g).requires_grad_(grad)
        self.dout = torch.randn(self.qkv["q"].shape, generator=g)

    def options(self):
        slope, table = self.slope, self.table
        return {
            "causal": True,
            "score_mod": lambda s, b, h, q, k: s * torch.sigmoid(slope[b, h]) + table[h, q - k + 64],
            "mask_mod": lambda b, h, q, k: (DOC[q] == DOC[k]) | (k % 4 == b) | (h == 1),
        }


def _over(scheme, kind, packed, changes):
    """Differences from one call: of the output and of all gradients."""
    mesh, given = mesh_of(kind), Given(packed)
    dim, tables = (0, {"cu_seqlens_q": CU, "cu_seqlens_k": CU}) if packed else (2, {})
    cu = CU if packed else None
    options = given.options() | changes
    q, k, v = given.qkv.values()
    inputs = [q, k, v, given.slope, given.table]
    if packed:
        whole = tilewise.varlen_attention(q, k, v, CU, CU, backend="reference", **options)
    else:
        whole = tilewise.attention(q, k, v, backend="reference", **options)
    want = torch.autograd.grad(whole, inputs, given.dout)

    def sharded(x):
        return distributed.shard(x, mesh, dim, scheme, cu_seqlens=cu)

    length = q.shape[dim]
    out = distributed.attention(*map(sharded, (q, k, v)), mesh=mesh, scheme=scheme, length=length, **tables, **options)
    got = list(torch.autograd.grad(out, inputs, sharded(given.dout)))
    for x in got:  # this rank's share of each
        for axis in range(mesh.ndim):
            dist.all_reduce(x, group=mesh.get_group(axis))
    out = distributed.unshard(out.detach(), mesh, dim, scheme, length=length, cu_seqlens=cu)
    pairs = [(out, whole), *zip(got, want, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("how", SCHEMES, ids="-".join)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_every_scheme(pool, how, packed):
    changes = {"window": 8, "softcap": 3.0} if packed else {"chunk": 11}
    assert max(pool(_over, *how, packed, changes)) < 2e-5


def _decode(gather):
    g = torch.Generator().manual_seed(1)
    mesh, rank = mesh_of("4"), dist.get_rank()
    one = tilewise.PagedKVCache(30, 4, HKV, D)
    many = distributed.ShardedKVCache(mesh, 12, 4, HKV, D)
    ids = [one.create(), one.create()], [many.create(), many.create()]
    options = {name: x for name, x in Given(False, grad=False).options().items() if name != "causal"}
    worst = 0.0
    for count in (9, 2, 1):
        k, v, q = (torch.randn(2, n, count, D, generator=g) for n in (HKV, HKV, H))
        one.append(ids[0], k, v)
        many.append(ids[1], k, v)
        mine = slice(rank, rank + 1) if gather else slice(None)
        want = one.attend(ids[0], q, **options)[:, mine]
        got = many.attend(ids[1], q[:, mine], gather=gather, **options)
        worst = max(worst, float((got - want).abs().max()))
    return worst


@pytest.mark.parametrize("gather", [True, False])
def test_a_sharded_cache(pool, gather):
    assert max(pool(_decode, gather)) < 1e-5


def _refused():
    mesh, rank = mesh_of("4"), dist.get_rank()
    q = torch.randn(1, 4, 8, D)
    messages = []
    for mask_mod in (
        lambda b, h, q, k: q % (2 + rank // 3) == 0,  # another on one rank
        lambda b, h, q, k: k if rank == 1 and q else q,  # no expression, on one rank
    ):
        with pytest.raises(InvalidArgument) as error:
            distributed.attention(q, q, q, mesh=mesh, mask_mod=mask_mod)
        messages.append(str(error.value))
    cache = distributed.ShardedKVCache(mesh, 4, 4, HKV, D, interleave=2)
    number = cache.create()
    cache.append([number], torch.randn(1, HKV, 4, D), torch.randn(1, HKV, 4, D))
    with pytest.raises(InvalidArgument, match="interleave=1"):
        cache.attend([number], torch.randn(1, 1, 1, D), mask_mod=lambda b, h, q, k: k < 2)
    return messages


def test_ranks_hear_of_other_functions(pool):
    for rank, messages in enumerate(pool(_refused)):
        assert "not the same on rank" in messages[0]
        assert ("a value read by Python" if rank == 1 else "not the same on rank 1") in messages[1]
