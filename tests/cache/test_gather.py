"""`KVCache.gather`: rows as they are stored, in another order, from another start, in other room."""

import pytest
import torch

from tilewise import CacheFull, InvalidArgument, KVCache


def filled(dtype, counts=(7, 4, 9), **options):
    cache = KVCache(3, 2, 12, 32, dtype, value_dim=16, **options)
    g = torch.Generator().manual_seed(0)
    longest = max(counts)
    k, v = (torch.randn(3, 2, longest, width, generator=g) for width in (32, 16))
    cache.append(k, v, counts=list(counts))
    return cache


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8", "int4", "fp8_e4m3"])
@pytest.mark.parametrize("rows", [None, [2, 0, 0, 1], [1], []])
def test_rows(dtype, rows):
    cache = filled(dtype)
    made = cache.gather(rows, start=2, capacity=20)
    which = range(3) if rows is None else rows
    assert (made.batch, made.capacity) == (len(which), 20)
    assert made.lengths.tolist() == [cache.lengths.tolist()[row] - 2 for row in which]
    for new, row in enumerate(which):
        assert made.keys(new).equal(cache.keys(row)[:, 2:])
        assert made.values(new).equal(cache.values(row)[:, 2:])


def test_it_is_a_copy_that_can_be_used():
    cache = filled("int8")
    made = cache.gather([2, 0])
    before = cache.keys(2).clone()
    made.truncate(0, 1)
    more = torch.randn(2, 2, 3, 32)
    made.append(more, more[..., :16])
    assert cache.keys(2).equal(before)
    assert made.lengths.tolist() == [4, 10]
    q = torch.randn(2, 4, 3, 32)
    alone = cache.gather([0])
    alone.append(more[1:], more[1:, ..., :16])
    assert made.attend(q, split_size=64)[1].equal(alone.attend(q[1:], split_size=64)[0])


def test_a_ring_keeps_all():
    cache = filled("int8", ring=True)
    more = torch.randn(3, 2, 6, 32)
    cache.append(more, more[..., :16])
    made = cache.gather([1, 2])
    assert made.keys(1).equal(cache.keys(2))
    q = torch.randn(3, 4, 1, 32)
    assert made.attend(q[1:], window=5, split_size=64).equal(cache.attend(q, window=5, split_size=64)[1:])
    with pytest.raises(InvalidArgument, match="ring"):
        cache.gather(start=1)


def test_what_is_refused():
    cache = filled("f32")
    for rows in ([3], [-1], [[0]], [0.5], [True], 1):
        with pytest.raises(InvalidArgument, match="rows"):
            cache.gather(rows)
    for start in (-1, 5, 0.5):
        with pytest.raises(InvalidArgument, match="start"):
            cache.gather(start=start)
    with pytest.raises(CacheFull, match="9 tokens does not fit into 8"):
        cache.gather(capacity=8)
