"""What each rank computes, sends and keeps; and what the model says of that."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise import InvalidArgument
from tilewise.distributed import Machine, plan
from tilewise.distributed.layout import Ranks, rows_of
from tilewise.testing.case import Case, make

RING = Path(__file__).resolve().parents[2] / "benchmarks/records/h200/ring.json"
SCHEMES = [("zigzag", 4), ("striped", 4), ("ring", 4), ("gather", 4), ("ulysses", 4), ("2d", (2, 2))]


def meta(n, heads=(32, 8, 8), width=128):
    return [torch.empty(1, h, n, width, device="meta", dtype=torch.bfloat16) for h in heads]


def tokens_of_rank(cu, ranks, scheme):
    """Tokens of rank 0."""
    return len(rows_of(cu[-1], Ranks(None, 0, ranks), Ranks(None, 0, 1), scheme, cu))


@pytest.mark.parametrize(("scheme", "mesh"), SCHEMES)
@pytest.mark.parametrize(
    "case",
    [
        Case(B=2, H=4, Hkv=2, Lq=40, causal=True),
        Case(B=1, H=4, Lq=32, Lk=48, window=(7, 3)),
        Case(B=3, H=4, Lq=32, Lk=48, causal=True, lengths=(48, 5, 0)),
        Case(B=2, H=4, Lq=32, Lk=48, causal=True, chunk=11),
        Case(B=5, H=4, Lq=32, Lk=40, causal=True, window=9, offset="rows", alibi="h"),
    ],
    ids=str,
)
def test_cells_are_those_of_one_device_and_what_is_sent_arrives(case, scheme, mesh):
    inputs = make(case)
    q, k, v = inputs.args
    n = 4
    shards = [x[:, :, : x.shape[2] // n] for x in (q, k, v)]
    options = {name: x for name, x in inputs.options.items() if name != "layout"}
    found = plan(*shards, mesh=mesh, scheme=scheme, **options)
    want = tilewise.plan(q, k, v, backend="torch", **options).cost.cells
    assert sum(r.cells for r in found.ranks) * found.inner == want
    assert sum(r.sent for r in found.ranks) == sum(r.received for r in found.ranks)
    assert f"{scheme} over" in str(found)


@pytest.mark.parametrize("scheme", ["zigzag", "ring", "gather", "striped"])
def test_packed_cells_are_those_of_one_device(scheme):
    cu = [0, 17, 17, 64]
    x = torch.empty(tokens_of_rank(cu, 4, scheme), 2, 8, device="meta")
    found = plan(x, x, x, mesh=4, scheme=scheme, length=64, cu_seqlens_q=cu, causal=True)
    assert sum(r.cells for r in found.ranks) == 2 * (17 * 18 + 47 * 48) // 2


def test_a_window_sends_its_neighbours_last_rows_and_leaves_steps_out():
    n, token = 2**20 // 64, 8 * 2 * 128 * 2  # bytes of K and V of a token
    narrow, full = (plan(*meta(n), mesh=64, scheme="ring", causal=True, window=w) for w in (4096, None))
    assert (narrow.steps, narrow.steps_left_out, full.steps) == (2, 62, 64)
    assert {r.received for r in narrow.ranks[1:]} == {4095 * token}
    assert full.ranks[63].received == 63 * n * token
    assert narrow.balance < 1.01


def test_packed_documents_of_any_length_are_balanced():
    random.seed(1)
    for _ in range(3):
        lengths = [int(100 * 1000 ** random.random()) for _ in range(random.choice([4, 30, 60]))]
        cu = torch.tensor([0, *lengths]).cumsum(0).tolist()
        x = torch.empty(tokens_of_rank(cu, 8, "zigzag"), 8, 64, device="meta")
        assert plan(x, x, x, mesh=8, length=cu[-1], cu_seqlens_q=cu, causal=True).balance < 1.05


def test_the_model_gives_what_others_have_published():
    """ring-flash-attention on 8 H800, 8k tokens a rank, 32/8 heads of 128: its README's share of FlashAttention-2."""
    speeds = {"flops": 420e12, "backward_flops": 300e12, "link": 160e9, "memory": 2.5e12, "launch": 30e-6}
    theirs = Machine("8 H800", **speeds, merge=9.0, backward_merge=5.0)  # elementwise, in float32
    published = {("ring", False): 0.52, ("ring", True): 0.54, ("zigzag", False): 0.852, ("zigzag", True): 0.902}
    for (scheme, backward), share in published.items():
        found = plan(*meta(8192), mesh=8, scheme=scheme, causal=True, backward=backward, machine=theirs)
        assert abs(found.efficiency - share) < 0.05


def test_a_zigzag_of_eight_ranks_by_the_model():
    """8k tokens a rank on links of an H100's speed: what is left after merging, launches and messages."""
    forward, both = (plan(*meta(8192), mesh=8, causal=True, backward=b).efficiency for b in (False, True))
    assert forward > 0.92
    assert both > 0.94


def test_the_model_gives_what_was_measured_on_one_device():
    """Ranks of a zigzag in turn on an H200, without links: 2k and 8k tokens a rank, forward and backward."""
    at_once, found = Machine(link=1e30, latency=0.0), 0
    for row in json.loads(RING.read_text())["rows"]:
        if row["scheme"] != "zigzag":
            continue
        n, backward = row["tokens a rank"], row["backward"]
        with_it, without = (
            plan(*meta(n), mesh=8, causal=True, machine=at_once, backward=b).seconds for b in (backward, False)
        )
        share = 1e3 * (with_it - without if backward else without) / row["queued ms"]
        assert 0.88 < share < 1.12, row
        found += 1
    assert found == 4


def test_slower_links_and_fewer_tokens_are_no_faster():
    shares = [plan(*meta(n), mesh=8, causal=True).efficiency for n in (512, 2048, 8192, 32768)]
    assert shares == sorted(shares)
    links = [plan(*meta(4096), mesh=8, causal=True, machine=Machine(link=x)).seconds for x in (400e9, 50e9, 5e9)]
    assert links == sorted(links)
    assert all(0 < share <= 1 for share in shares)


def test_what_is_no_mesh():
    with pytest.raises(InvalidArgument, match="mesh: got 4, expected a number of ranks, 1 to 4096, or a pair"):
        plan(*meta(64), mesh=4, scheme="2d")
    for mesh in (0, True, 4097, 10**30, (2.0,), (2, 2)):
        with pytest.raises(InvalidArgument, match="mesh: got "):
            plan(*meta(64), mesh=mesh)


def test_what_attention_refuses_and_machines_that_are_none():
    for mesh in (3, 64):
        with pytest.raises(InvalidArgument, match=f"q: got 32 heads, expected a multiple of {mesh}"):
            plan(*meta(64), mesh=mesh, scheme="ulysses")
    with pytest.raises(InvalidArgument, match=r"q: got torch\.float64"):
        plan(*(x.double() for x in meta(64)), mesh=4)
    lengths = torch.empty(1, dtype=torch.int32, device="meta")
    wrong = [("kv_lengths", lengths), ("machine", 3), ("backward", 1), ("return_lse", 1), ("scheme", "circle")]
    for name, value in wrong:
        with pytest.raises(InvalidArgument, match=f"{name}: got "):
            plan(*meta(64), mesh=4, **{name: value})
    assert plan(*meta(64), mesh=4, return_lse=True) == plan(*meta(64), mesh=4)
    for name, value in (("link", 0), ("flops", float("nan")), ("latency", -1.0), ("memory", "4e12"), ("merge", True)):
        with pytest.raises(InvalidArgument, match=f"{name}: got "):
            Machine(**{name: value})


def test_large_rings_are_counted_or_refused(monkeypatch):
    """Some ranks of a large ring are looked at, each with all of its rounds; more rounds than that are refused."""
    module, computed = sys.modules["tilewise.distributed.plan"], []
    find = module.round_of
    monkeypatch.setattr(module, "round_of", lambda task, rank, t: computed.append((rank, t)) or find(task, rank, t))
    found = plan(*meta(2), mesh=512, scheme="ring", causal=True)
    assert len(computed) == len(set(computed)) == module.LOOKED_AT * 512
    assert [found.ranks[0].rank, found.ranks[-1].rank] == [0, 511]
    computed.clear()
    for mesh, scheme in ((10**6, "zigzag"), (10**9, "ulysses"), ((8, 10**9), "2d"), ((10**6, 8), "2d")):
        with pytest.raises(InvalidArgument, match="expected a number of ranks, 1 to 4096"):
            plan(*meta(64), mesh=mesh, scheme=scheme)
    assert not computed
