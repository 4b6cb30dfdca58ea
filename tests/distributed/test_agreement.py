"""Calls that differ between ranks, or are wrong on one of them: every rank says so, and the group stays of use."""

import pytest
import torch
from torch import distributed as dist
from torch.nn import functional as F  # noqa: N812

from ranks import Pool, mesh_of
from tilewise import InvalidArgument, distributed
from tilewise.distributed import agreement, exchange, pair_call

TIMEOUT = 60  # seconds that a rank waits for another: only where a test fails
X = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def two():
    with Pool(2, timeout=TIMEOUT) as ranks:
        yield ranks


def said(function, *args, **options):
    """What a call raises."""
    try:
        function(*args, **options)
    except (InvalidArgument, distributed.RankLost) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def attend(q=X, scheme="ring", mesh=None, backward=False, **options):
    k = X.clone().requires_grad_(backward)
    q = k if q is X else q
    mesh = dist.group.WORLD if mesh is None else mesh
    out = distributed.attention(q, k, k, mesh=mesh, scheme=scheme, backend="torch", **options)
    if backward:
        out.sum().backward()
    return out


def a_cache():
    cache = distributed.ShardedKVCache(dist.group.WORLD, 8, 4, 4, 8, "f32")
    cache.append([cache.create()], X, X)
    return cache


def _other_values(name, common, both, scheme):
    """What a call says whose options have other values on each rank, after one in which they were the same."""
    rank = dist.get_rank()
    if scheme == "cache":
        cache = a_cache()
        call = lambda **options: cache.attend([0], X[:, :, -1:], backend="torch", **options)  # noqa: E731
    else:
        call = lambda **options: attend(scheme=scheme, backward=name == "scale", **options)  # noqa: E731
    agreed = said(call, **common)
    return agreed, said(call, **common | {name: both[rank]}), said(call, **common)


@pytest.mark.parametrize("scheme", ["ring", "ulysses", "cache"])
@pytest.mark.parametrize(
    ("name", "common", "both"),
    [
        ("window", {"causal": True, "window": 3}, (9, 3)),
        ("window", {"causal": True, "window": (3, 0)}, ((3, 0), (4, 0))),
        ("causal", {"causal": False}, (True, False)),
        ("scale", {"scale": 0.25}, (0.5, 0.25)),
        ("softcap", {"softcap": 3.0}, (3.0, None)),
    ],
    ids=["window", "pair", "causal", "scale", "softcap"],
)
def test_other_values_of_an_option_than_before(two, scheme, name, common, both):
    for rank, (agreed, differs, again) in enumerate(two(_other_values, name, common, both, scheme)):
        assert (agreed, again) == ("fine", "fine")
        assert differs.startswith(f"InvalidArgument: {name}: got "), differs
        assert f"on rank {rank}, but not the same on rank {1 - rank}, expected the same on all ranks" in differs


def _known_calls(which):
    """What calls say that are known to the ranks, or to one alone, where each rank makes another."""
    last = dist.get_rank() == 1
    if which == "cache":
        cache = a_cache()
        calls = [lambda n=n: cache.attend([0], X[:, :n, -1:], backend="torch") for n in (2, 4)]
    elif which == "offset":
        calls = [lambda n=n: attend(causal=True, window=3, q_offset=n) for n in (0, 4)]
    elif which == "grad":
        calls = [lambda grad=grad: attend(causal=True, backward=grad) for grad in (False, True)]
    else:
        calls = [lambda n=n: attend(scheme=which, causal=True, window=n) for n in (3, 9)]
    before = [said(call) for call in (calls[:1] if which == "grad" else calls)]
    return [*before, said(calls[last]), said(calls[0])]


@pytest.mark.parametrize(
    ("which", "name"),
    [("ring", "window"), ("ulysses", "window"), ("cache", "q"), ("offset", "q_offset"), ("grad", "q")],
)
def test_calls_that_ranks_have_made_before(two, which, name):
    """In messages of other sizes, they would end a process; in others, they would compute with the wrong rows."""
    for *before, differs, again in two(_known_calls, which):
        assert {*before, again} == {"fine"}
        assert differs.startswith(f"InvalidArgument: {name}: got "), differs


OPTION_TENSORS = {
    "sinks": lambda: torch.zeros(4),
    "alibi_slopes": lambda: torch.ones(4),
    "mask": lambda: torch.zeros(8, 16),
    "q_bias": lambda: torch.zeros(1, 4, 8),
    "k_bias": lambda: torch.zeros(1, 4, 16),
}


def _gradients_on_one_rank(name, scheme):
    """What is said where an option requires grad on the last rank alone; before and after it does on both."""
    last, found = dist.get_rank() == 1, []
    for wanted in (True, last, False):
        x = OPTION_TENSORS[name]().requires_grad_(wanted)
        found.append(said(attend, scheme=scheme, **{name: x}))
    return found


@pytest.mark.parametrize(("name", "scheme"), [*((name, "ring") for name in OPTION_TENSORS), ("sinks", "ulysses")])
def test_an_option_that_requires_grad_on_one_rank(two, name, scheme):
    """Its backward pass sends messages that the other rank would never ask for."""
    for before, differs, after in two(_gradients_on_one_rank, name, scheme):
        assert (before, after) == ("fine", "fine")
        assert differs.startswith(f"InvalidArgument: {name}: got "), differs


def _an_error_midway(direction):
    """The messages that are still in transit after an error in a ring, and what a call says then."""
    made, kept, messages = [], getattr(pair_call.Call, direction), exchange.Messages

    class Recorded(messages):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(len(self.works))
            posted.append(self)

    def fails(*args, **options):
        raise MemoryError

    posted = []
    exchange.Messages = Recorded
    setattr(pair_call.Call, direction, fails)
    try:
        attend(backward=True)
        raised = False
    except MemoryError:
        raised = True
    finally:
        exchange.Messages = messages
        setattr(pair_call.Call, direction, kept)
    return raised, sum(made) > 0, sum(len(x.works) for x in posted), said(attend, backward=True)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_messages_are_waited_for_after_an_error(two, direction):
    """Memory that is received into, or sent, must outlive the messages."""
    assert two(_an_error_midway, direction) == [(True, True, 0, "fine")] * 2


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, distributed.RankLost])
def test_what_is_in_transit_is_drained_after_an_error_alone(error):
    """All of it, also what a lost rank sends no more; the error stays the first one."""
    waited = []

    class InTransit:
        def __init__(self, number):
            self.messages, self.number = self, number

        def wait(self):
            waited.append(self.number)
            if self.number == 0:
                raise distributed.RankLost("rank 1")

    in_transit = [InTransit(0), InTransit(1)]
    if error is None:
        with exchange.drained_on_error(in_transit):
            pass
        assert not waited
        return
    first = error("the first")
    with pytest.raises(error) as raised, exchange.drained_on_error(in_transit):
        raise first
    assert raised.value is first
    assert waited == [0, 1]


def _faults(size, scheme, mesh):
    """What is said where the last rank alone has a wrong argument; at last, of a right call."""
    last, tokens = dist.get_rank() == size - 1, 8 * size
    mesh = mesh_of(mesh) if mesh else None
    calls = [
        {"mask": torch.ones(9 if last else 8, tokens, dtype=torch.bool)},
        {"sinks": torch.zeros(5 if last else 4)},
        {"key_indices": torch.full((1, 8, 2), tokens if last else 0)},
        {"kv_lengths": torch.tensor([1], device="meta" if last else "cpu")},
        {"q": 3 if last else X},
        {},
    ]
    return [said(attend, scheme=scheme, mesh=mesh, **options) for options in calls]


def judge_faults(answers):
    """The argument on all ranks; its own error on the ranks that have it."""
    *others, last = answers
    names = ["mask", "sinks", "key_indices", "kv_lengths"]
    for answer in others:
        for name, told, own in zip(names, answer, last, strict=False):
            what = own.removeprefix(f"InvalidArgument: {name}: ")
            assert own != what
            assert "fault on" not in own
            assert f"InvalidArgument: {name}: got a fault on rank {len(others)} ({what})" in told
        assert all(x[4].startswith("InvalidArgument: q: got ") for x in (answer, last))
        assert (answer[5], last[5]) == ("fine", "fine")


@pytest.mark.parametrize("scheme", ["ring", "ulysses"])
def test_a_wrong_argument_on_one_rank(two, scheme):
    judge_faults(two(_faults, 2, scheme, None))


def _differs_on_one():
    return said(attend, scheme="2d", mesh=mesh_of("2x2"), causal=True, softcap=3.0 if dist.get_rank() == 1 else 4.0)


def test_a_wrong_argument_on_one_rank_of_two_dims(pool):
    judge_faults(pool(_faults, 4, "2d", "2x2"))
    assert all(x.startswith("InvalidArgument: softcap: got ") for x in pool(_differs_on_one))


def _wrong_lengths():
    return [said(attend, length=15), said(distributed.unshard, X, dist.group.WORLD, 2, length=15), said(attend)]


def test_a_wrong_length_on_all_ranks(two):
    """8 tokens on each of 2 ranks: those of 15 would be 7 and 8, so one rank alone is wrong."""
    for rank, (call, whole, right) in enumerate(two(_wrong_lengths)):
        for found, name in ((call, "q"), (whole, "x")):
            assert found.startswith(f"InvalidArgument: {name}: got " + "a fault on rank 0 (got " * rank + "8 tokens")
            assert "8 tokens, expected 7" in found
        assert right == "fine"


def _other_places():
    """Wrong on the last rank alone: caches, `unshard` and models; and another function on each."""
    mesh, last, cache = dist.group.WORLD, dist.get_rank() == 1, a_cache()
    step = X[:, :, -1:]
    found = [
        said(cache.attend, [5 if last else 0], step, backend="torch"),
        said(cache.attend, [0], step, sinks=torch.zeros(3 if last else 4), backend="torch"),
        said(cache.attend, [0], None if last else step, backend="torch"),
        said(distributed.unshard, X, mesh, 7 if last else 2),
        said(distributed.unshard, X, mesh, 2) if last else said(attend),
    ]
    with distributed.context_parallel(mesh):
        mask = torch.ones(8, 8 if last else 16, dtype=torch.bool)
        found.append(said(F.scaled_dot_product_attention, X, X, X, attn_mask=mask))
        found.append(said(F.scaled_dot_product_attention, X, X, X))
    return [*found, said(cache.attend, [0], step, backend="torch")]


def test_wrong_on_one_rank_in_caches_and_models(two):
    names = ["sequence", "sinks", "q", "dim", "function", "attn_mask"]
    for answer in two(_other_places):
        assert answer[6:] == ["fine", "fine"]
        for name, found in zip(names, answer, strict=False):
            assert found.startswith(f"InvalidArgument: {name}: got "), found


def _padding():
    """A model's mask in which one rank has padding."""
    from transformers import masking_utils

    from tilewise.compat import mask_patterns, transformers

    real = torch.ones(1, 8, dtype=torch.bool)
    real[:, 6:] = dist.get_rank() == 0
    with distributed.context_parallel(dist.group.WORLD):
        mask = mask_patterns.make_mask(1, 8, 8, mask_function=masking_utils.causal_mask_function, attention_mask=real)
        return said(transformers.attention_forward, torch.nn.Module(), X, X, X, mask)


def test_padding_on_one_rank_of_a_model(two):
    pytest.importorskip("transformers")
    assert all(x.startswith("InvalidArgument: attention_mask: got ") for x in two(_padding))


def _equal_calls():
    """Exchanges of digests, with a GPU's rule, up to each of some calls that are equal but for a rank's own rows."""
    rank, count, gather, always = dist.get_rank(), 0, dist.all_gather, agreement.ALWAYS

    def counted(*args, **options):
        nonlocal count
        count += 1
        gather(*args, **options)

    found = []
    dist.all_gather, agreement.ALWAYS = counted, ()
    try:
        for n in range(3):
            rows = 8 - (rank == 0)
            x = X[:, :, :rows]
            options = {"key_indices": torch.zeros(1, rows, 1 + n * rank, dtype=torch.int64), "q_offset": n}
            distributed.attention(
                x, x, x, mesh=dist.group.WORLD, scheme="ring", length=15, window=(n % 2, 0), backend="torch", **options
            )
            found.append(count)
    finally:
        dist.all_gather, agreement.ALWAYS = gather, always
    return found


def test_equal_calls_are_compared_once(two):
    """A window's value is part of a kind; an offset's, and the number of a rank's own indices, are not."""
    assert two(_equal_calls) == [[1, 2, 2]] * 2
