"""Attention over four ranks, by every scheme, against the oracle: forward and backward, as any backend is judged."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

import tilewise
from ranks import mesh_of
from sharded import Sharded, run_cases
from tilewise import InvalidArgument, distributed
from tilewise.core.mask_rules import MaskRules
from tilewise.distributed import function
from tilewise.distributed.arguments import KNOWN
from tilewise.distributed.layout import Piece, Ranks
from tilewise.distributed.schedule import Task
from tilewise.testing.case import Case, make
from tilewise.testing.cases import GRADIENTS

SCHEMES = [("zigzag", "4"), ("ring", "4"), ("gather", "4"), ("ulysses", "4"), ("2d", "2x2"), ("striped", "4")]
SCHEMES += [("zigzag", "2")]
SMALL = Case(B=2, H=4, Hkv=2, Lq=19, D=8, causal=True)
CASES = [
    SMALL,
    Case(B=1, H=4, Lq=16, Lk=29, D=8, Dv=12, dtype="bf16"),
    Case(H=4, Hkv=1, Lq=24, D=8, causal=True, window=5, softcap=4.0, sinks=True, layout="blhd", dtype="f16"),
    Case(H=4, Lq=21, Lk=17, D=8, window=(6, 2), offset=3, alibi="bh"),
    Case(H=4, Lq=21, Lk=26, D=8, chunk=7, causal=True, sinks=True),
    Case(B=5, H=4, Lq=14, Lk=30, D=8, causal=True, offset="rows", sinks="mixed"),
    Case(B=3, H=4, Hkv=2, Lq=12, Lk=26, D=8, causal=True, lengths=(26, 0, 11), sinks=True),
    Case(H=4, Lq=18, Lk=22, D=8, mask="bhqk", mask_kind="f32", alibi="h", causal=True),
    Case(H=4, Hkv=2, Lq=18, Lk=22, D=8, mask="b1qk", pattern="rows", window=9),
    Case(H=4, Lq=18, Lk=22, D=8, mask="h1k", mask_kind="bf16", dtype="bf16"),
    Case(H=4, Hkv=2, Lq=18, Lk=22, D=8, q_bias="bh", k_bias="1h", causal=True),
    Case(H=4, Lq=18, Lk=22, D=8, q_bias="11", k_bias="b1", sinks=True, layout="blhd"),
    Case(H=4, Hkv=4, Lq=18, Lk=22, D=8, indices="7", causal=True, sinks=True),
    Case(B=2, H=8, Hkv=4, Lq=18, Lk=22, D=8, indices="h7", window=12, layout="blhd", k_bias="b1"),
    Case(form="varlen", H=4, Hkv=2, q_lengths=(5, 0, 27, 1), lengths=(5, 0, 27, 1), D=8, causal=True, sinks=True),
    Case(form="varlen", H=4, q_lengths=(9, 20, 3), lengths=(14, 7, 19), D=8, Dv=4, window=(8, 3), alibi="bh"),
    Case(form="varlen", H=4, q_lengths=(9, 20, 3), lengths=(9, 23, 19), D=8, chunk=8, window=6),
    Case(form="varlen", H=4, q_lengths=(9, 30), lengths=(33, 24), used=(21, 0), D=8, causal=True, dtype="f16"),
    Case(form="varlen", H=4, q_lengths=(7, 11), lengths=(13, 11), D=8, mask="bhqk", mask_kind="f32", offset="rows"),
]


@pytest.mark.parametrize("how", SCHEMES, ids="-".join)
def test_every_scheme_with_every_option(pool, how):
    assert pool(run_cases, [(case, *how) for case in CASES])[0] == []


def _in_groups(cases):
    """As `run_cases`, with groups of heads also in calls of few rows."""
    least, function.LEAST_ROWS = function.LEAST_ROWS, 1
    try:
        return run_cases(cases)
    finally:
        function.LEAST_ROWS = least


def test_groups_of_heads(pool):
    assert pool(_in_groups, [(case, "gather", "4") for case in CASES])[0] == []


@pytest.mark.parametrize("kv_heads", [1, 2, 7, 8, 64])
@pytest.mark.parametrize("tokens", [1, 999, 10**4, 10**7])
def test_groups_of_heads_have_each_head_once_and_enough_rows(kv_heads, tokens):
    heads, ranks = 4 * kv_heads, Ranks(None, 0, 8)
    pieces = tuple((Piece(0, tokens + rank),) for rank in range(8))
    for gather in (True, False):
        task = Task(MaskRules(), pieces, pieces, (0,), (0,), (), True, gather)
        call = SimpleNamespace(task=task, ranks=ranks)
        groups = function.head_groups(call, heads, kv_heads)
        assert [h for lo, hi in groups for h in range(lo, hi)] == [*range(kv_heads)]
        assert len(groups) <= (function.MOST_GROUPS if gather else 1)
        if len(groups) > 1:
            assert heads * tokens >= len(groups) * function.LEAST_ROWS - heads


def test_kernels_of_the_cpu(pool):
    cases = [(SMALL, "zigzag", "4"), (CASES[14], "zigzag", "4")]
    assert pool(run_cases, cases, "cpu")[0] == []


def test_an_lse_that_was_merged_is_not_rounded_twice(pool):
    """Scores of 30, of one number each: an ulp of their lse is one of every weight in the row, and of its gradients."""
    narrow = Case(B=2, H=4, Hkv=2, Lq=33, Lk=97, D=1, causal=True)
    drawn = [("try 1", "ring"), ("try 2", "striped"), ("try 3", "striped")]
    assert pool(run_cases, [(replace(narrow, note=note), scheme, "4") for note, scheme in drawn])[0] == []


def is_taken(case):
    """Whether the options are, and the sizes are small. Rows of least numbers have an lse without their scores."""
    if (
        max(case.queries, case.keys) > 300
        or case.pattern == "least"
        or (case.form == "varlen" and case.q_bias + case.k_bias + case.indices)
    ):
        return False
    return set(make(case).options) - {"tile_map"} <= set(KNOWN)


@pytest.mark.slow
@pytest.mark.parametrize("which", range(6))
def test_the_conformance_cases(pool, which):
    """Each of them by one of the schemes."""
    scheme, kind = SCHEMES[which]
    heads = {"ulysses": 4, "2d": 2}.get(scheme, 1)
    cases = [c for c in GRADIENTS if c.H % heads == 0 and is_taken(c)]
    assert pool(run_cases, [(case, scheme, kind) for case in cases[which::6]])[0] == []


def _twice():
    """Whether a call gives the same bits twice, forward and backward, and what only its queries' gradients are."""
    found = []
    for grads in (("q", "k", "v", "sinks"), ("q", "k", "v", "sinks"), ("q",)):
        sharded = Sharded(CASES[2], "zigzag", "4")
        for name in grads:
            sharded.leaves[name].requires_grad_()
        state = sharded.call("torch")
        asked = [sharded.leaves[name] for name in grads]
        found.append([*state, *torch.autograd.grad(state.out.float().square().sum() + state.lse.sum(), asked)])
    first, second, third = found
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) and torch.equal(first[2], third[2])


def test_the_same_bits_each_time_whatever_gradients_are_asked_for(pool):
    assert pool(_twice) == [True] * 4


def _packed_without_length():
    """Schemes in which packed sequences that ranks share unevenly are not what one process makes of them."""
    cu_q, cu_k = torch.tensor([0, 5, 26, 27]), torch.tensor([0, 9, 30, 31])
    q, k, v = (
        torch.randn(n, heads, 8, generator=torch.Generator().manual_seed(n)) for n, heads in ((27, 4), (31, 4), (31, 4))
    )
    whole = tilewise.varlen_attention(q, k, v, cu_q.int(), cu_k.int(), causal=True, backend="torch")
    wrong = []
    for scheme, kind in SCHEMES:
        at = {"mesh": mesh_of(kind), "scheme": scheme}
        parts = [distributed.shard(x, dim=0, cu_seqlens=cu, **at) for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k))]
        out = distributed.attention(*parts, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, backend="torch", **at)
        error = (distributed.unshard(out, dim=0, cu_seqlens=cu_q, **at) - whole).abs().max()
        if not error < 1e-4:  # other tokens would be seen, or in another order: errors of about 1
            wrong.append((scheme, error.item()))
    return wrong


def test_packed_sequences_say_how_many_tokens_there_are(pool):
    assert pool(_packed_without_length) == [[]] * 4


def _one_rank():
    """A scheme over one rank is `tilewise.attention`, to the bit."""
    group = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    q, k, v = (torch.randn(1, heads, 20, 8) for heads in (4, 2, 2))
    want = tilewise.attention(q, k, v, causal=True, window=7, backend="torch")
    schemes = ("zigzag", "ring", "gather", "ulysses")
    calls = (
        distributed.attention(q, k, v, mesh=group, scheme=s, causal=True, window=7, backend="torch") for s in schemes
    )
    return all(torch.equal(got, want) for got in calls)


def test_a_group_of_one_gives_the_bits_of_one_process(pool):
    assert pool(_one_rank) == [True] * 4


def _heads_apart(backend):
    """Whether Ulysses gives the bits of one process over 2 and over 4 ranks, out and gradients."""
    torch.manual_seed(0)
    whole = [torch.randn(2, heads, 48, 16).bfloat16().requires_grad_() for heads in (8, 4, 4)]
    incoming, how = torch.randn_like(whole[0]), {"causal": True, "split_size": 16, "backend": backend}
    one = tilewise.attention(*whole, **how)
    want = [one, *torch.autograd.grad(one, whole, incoming)]
    same = []
    for kind in ("2", "4"):
        at = {"mesh": mesh_of(kind), "scheme": "ulysses"}
        parts = [distributed.shard(x.detach(), dim=2, **at).requires_grad_() for x in whole]
        out = distributed.attention(*parts, **at, **how)
        got = [out, *torch.autograd.grad(out, parts, distributed.shard(incoming, dim=2, **at))]
        same += [torch.equal(distributed.unshard(x, dim=2, **at), y) for x, y in zip(got, want, strict=True)]
    return same


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_ulysses_gives_the_same_bits_over_any_number_of_ranks(pool, backend):
    assert pool(_heads_apart, backend) == [[True] * 8] * 4


def _refusals():
    mesh = mesh_of("4")
    q = torch.randn(1, 3, 8, 8)
    found = []
    for changes in (
        {"mesh": mesh_of("2x2")},
        {"scheme": "ulysses"},
        {"length": 100},
        {"mask": torch.zeros(8, 8)},
        {"out": q},
        {"key_indices": torch.tensor([[[32]] * 8])},
        {"key_indices": torch.zeros(1, 9, 2, dtype=torch.int32)},
        {"block_indices": torch.zeros(1, 1, 1, dtype=torch.int32), "block_size": 8},
        {"tree_mask": torch.ones(1, 8, 8, dtype=torch.bool)},
        {"kv_lengths": torch.tensor([33])},
        {"is_causal": True},
        {"cu_seqlens_q": torch.tensor([0, 8])},
        {"k": q[:, :2]},
        {"sinks": torch.zeros(2)},
        {"alibi_slopes": torch.zeros(1, 2)},
        {"length": (32, 32, 32)},
        {"q": q[0], "k": q[0], "cu_seqlens_q": torch.tensor([[0, 8]])},
    ):
        first, second = changes.pop("q", q), changes.pop("k", q)
        try:
            distributed.attention(first, second, second, **({"mesh": mesh, "backend": "torch"} | changes))
        except InvalidArgument as error:
            found.append(str(error))
    return found


def test_what_is_refused(pool):
    expected = [
        "mesh: got 2 dims, expected 1 for scheme='zigzag'",
        "q: got 3 heads, expected a multiple of 4, the ranks of Ulysses",
        "q: got 8 tokens, expected ",
        "mask: got (1, 1, 8, 8), expected (1, 3, 8, 32), each size or 1",
        "out: got an option that does not work over several ranks, expected none; take what is returned",
        "key_indices: got 32 to 32, expected -1 to 31",
        "key_indices: got torch.Size([1, 9, 2]), expected ints [1, 8, n] or [1, 3, 8, n]",
        "block_indices: got an option that does not work over several ranks, expected none; key_indices= takes",
        "tree_mask: got an option that does not work over several ranks, expected none; mask= takes",
        "kv_lengths[0]: got 33, expected 0 to 32, the keys of all ranks",
        "did you mean causal?",
        "q: got 4 dims, expected 3",
        "k: got 2 heads, v 2, expected as many in both, that divide q's 3",
        "sinks: got torch.Size([2]), expected a tensor of 3 heads",
        "alibi_slopes: got torch.Size([1, 2]), expected a tensor of 3 heads",
        "length: got (32, 32, 32)",
        "cu_seqlens_q: got [[0, 8]], expected ints of one dim",
    ]
    found = pool(_refusals)[0]
    assert [want for want, got in zip(expected, found, strict=True) if want not in got] == []


def _sharing():
    """Shards put together again, for every scheme, also where ranks hold different numbers of tokens."""
    wrong = []
    for scheme, kind in SCHEMES:
        for length, cu in ((32, None), (29, None), (29, [0, 3, 3, 20, 27])):
            x = torch.arange(2 * length).view(2, length).float()
            part = distributed.shard(x, mesh_of(kind), 1, scheme, cu_seqlens=cu)
            whole = distributed.unshard(part, mesh_of(kind), 1, scheme, length=length, cu_seqlens=cu)
            places = distributed.positions(length, mesh_of(kind), scheme, cu_seqlens=cu)
            starts = torch.tensor(cu or [0])
            tokens = part[0].long()
            want = tokens - starts[torch.searchsorted(starts, tokens, right=True) - 1]
            if not torch.equal(whole, x) or not torch.equal(places, want):
                wrong.append((scheme, length, cu))
    return wrong


def test_shards_come_together_and_know_their_positions(pool):
    assert pool(_sharing) == [[]] * 4
