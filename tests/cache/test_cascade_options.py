"""Every option that a cascade takes, on each way to compute one: beside attention over each whole sequence."""

import pytest
import torch

from naive import Row, assert_close
from tilewise import PagedKVCache
from tilewise.dispatch import cascade, planner

D, HEADS = 16, 4
# One launch for the shared and the own keys, or two calls that are merged.
WAYS = {"one launch": "cpu", "two calls": "cpu", "torch": "torch"}
OPTIONS = {
    "plain": {},
    "sinks": {"sinks": torch.tensor([3.0, -2.0, 0.5, 6.0])},
    "sinks of no and of all weight": {"sinks": torch.tensor([-torch.inf, torch.inf, 1.0, -torch.inf])},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.7},
    "scale below 0": {"scale": -0.4},
    "not causal": {"causal": False},
    "sinks and softcap": {"sinks": torch.tensor([3.0, -2.0, 0.5, 6.0]), "softcap": 2.0, "causal": False},
}


def filled(dtype):
    """Four sequences: two share five pages, three of them four, one shares none. Some end in the middle of a page."""
    g = torch.Generator().manual_seed(0)

    def put(sequences, count):
        cache.append(sequences, *torch.randn(2, len(sequences), 2, count, D, generator=g))

    cache = PagedKVCache(60, 4, 2, D, dtype, group=32)
    a = cache.create()
    put([a], 16)
    b = cache.fork(a)
    put([a], 4)
    c, alone = cache.fork(a), cache.create()
    put([alone], 9)
    for n, s in enumerate((a, b, c, alone)):
        put([s], 3 + n)
    return cache, [c, alone, b, a]


@pytest.mark.parametrize("dtype", ["f32", "int8"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_each_option_on_each_way(way, option, dtype, monkeypatch):
    """Twice: a repeated one is launched from the call cache. With one query and with three, packed and in rows."""
    cache, sequences = filled(dtype)
    launches, attend = [], cascade.attend

    def counted(*args):
        launches.append(attend(*args))
        return launches[-1]

    monkeypatch.setattr(cascade, "attend", counted)
    if way == "two calls":
        monkeypatch.setattr(planner, "runs_cascades", lambda device: False)
    causal = {"causal": True} | OPTIONS[option]
    rows = [Row.held_by(cache, s) for s in sequences]
    for count in (1, 3):
        q = 3 * torch.randn(4, HEADS, count, D, generator=torch.Generator().manual_seed(count))
        given = OPTIONS[option] | {"cascade": True, "return_lse": True, "backend": WAYS[way]}
        states = [cache.attend(sequences, q, **given) for _ in range(2)]
        packed = cache.attend(sequences, q.transpose(1, 2).flatten(0, 1), **given)
        states.append([x.unflatten(0, (4, count)).transpose(1, 2) for x in packed])
        first = cache.attend(sequences, q.transpose(1, 2), layout="blhd", **given)
        states.append([x.transpose(1, 2) for x in first])
        for b, row in enumerate(rows):
            want = row.attend(q[b], **causal)
            for out, lse in states:
                assert_close(out[b], want[0])
                assert_close(lse[b], want[1])
    assert all((x is not None) == (way == "one launch") for x in launches)
    assert len(launches) == 8
