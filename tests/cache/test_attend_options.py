"""`attend` takes of the caller what the attention functions take, and refuses what they refuse."""

import pytest
import torch

from tilewise import InvalidArgument, KVCache, PagedKVCache, TileMap, attention
from tilewise.dispatch import call_cache
from tilewise.validation import calls

D, HEADS, HKV, LENGTH, LQ = 16, 4, 2, 17, 3  # a `KVCache` of 17 tokens hands 20 slots to a call
K, V = torch.randn(2, 1, HKV, LENGTH, D, generator=torch.Generator().manual_seed(0))
Q = torch.randn(1, HEADS, LQ, D, generator=torch.Generator().manual_seed(1)) * 3


def over_rows(**options):
    cache = KVCache(1, HKV, 64, D, "f32")
    cache.append(K, V)
    return cache.attend(Q, **options)


def over_pages(**options):
    cache = PagedKVCache(20, 4, HKV, D, "f32")
    sequence = cache.create()
    cache.append(sequence, K, V)
    return cache.attend(sequence, Q, **options)


def over_a_static_batch(**options):
    cache = PagedKVCache(20, 4, HKV, D, "f32")
    batch = cache.static_batch(1, 40, LQ)
    sequence = cache.create()
    cache.append(sequence, K[:, :, :-LQ], V[:, :, :-LQ])
    batch.extend(sequence, LQ)
    batch.write(K[:, :, -LQ:], V[:, :, -LQ:])
    return batch.attend(Q, **options)


def over_a_ring(**options):
    cache = KVCache(1, HKV, 8, D, "f32", ring=True)
    cache.append(K, V)
    return cache.attend(Q, **options)


CACHES = [over_rows, over_pages, over_a_static_batch]
TREE = torch.ones(1, LQ, LQ).tril().bool()
BLOCKS = torch.tensor([[[[0, 3]], [[1, 4]]]], dtype=torch.int32)  # of each KV head
CAUSAL = TileMap.from_spec(LQ, LENGTH, (2, 4), causal=True, kv_lengths=torch.tensor([LENGTH]))
MASK = torch.rand(HEADS, LQ, LENGTH, generator=torch.Generator().manual_seed(2)) > 0.4
OPTIONS = {
    "k_bias": {"k_bias": torch.linspace(-2, 2, LENGTH).expand(1, HEADS, -1)},
    "rules as tiles": {"tile_map": CAUSAL},
    "mask as tiles": {"mask": MASK, "tile_map": TileMap.from_mask(MASK, (2, 4)) & CAUSAL},
    "blocks as tiles": {"tile_map": TileMap.from_blocks(BLOCKS, 4, LQ, LENGTH), "block_indices": BLOCKS,
                        "block_size": 4},
    "all": {"k_bias": torch.zeros(1, 1, LENGTH), "mask": MASK, "q_offset": torch.tensor([12]), "k_start": -1},
}  # fmt: skip


@pytest.mark.parametrize("call", CACHES)
@pytest.mark.parametrize("name", OPTIONS)
def test_tensors_as_long_as_the_rows(call, name):
    """As many keys as there are tokens, whatever room the cache has for more."""
    options = dict(OPTIONS[name])
    want = attention(Q, K, V, causal=True, **options)
    torch.testing.assert_close(call(**options), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", CACHES)
@pytest.mark.parametrize("name", ["mask", "k_bias", "tile_map"])
def test_tensors_that_do_not_cover_all_keys(call, name, monkeypatch):
    """Also where no backend reads lengths, as on a GPU."""
    monkeypatch.setattr("tilewise.validation.values.readable", lambda x, validate: False)
    short = {
        "mask": torch.ones(LQ, 5).bool(), "k_bias": torch.zeros(1, 1, 5),
        "tile_map": TileMap.from_spec(LQ, 5, (2, 4), causal=True),
    }[name]  # fmt: skip
    want = "keys, its last dim, expected 17"
    if call is over_a_static_batch:  # whose lengths are those of any step
        monkeypatch.undo()
        want = "expected 0 to 5"
    with pytest.raises(InvalidArgument, match=want):
        call(**{name: short})


REFUSED = {
    "k_stride": ({"k_stride": torch.tensor([0])}, r"k_stride\[0\]: got 0"),
    "q_stride": ({"q_stride": torch.tensor([-1])}, r"q_stride\[0\]: got -1"),
    "k_start": ({"k_start": torch.tensor([2**40])}, r"k_start\[0\]: got 1099511627776"),
    "q_offset": ({"q_offset": torch.tensor([2**40])}, r"q_offset\[0\]: got 1099511627776"),
    "int32 q_offset": ({"q_offset": torch.tensor([-(2**31)], dtype=torch.int32)}, r"q_offset\[0\]: got -2147483648"),
    "positions": (
        {"tree_mask": TREE, "positions": torch.tensor([[3, 4, 5]])},
        r"positions\[0\]: got 3, expected 14 to",
    ),
    "key_indices": ({"key_indices": torch.full((1, LQ, 2), 4, dtype=torch.int32)}, "key_indices: got 4 twice"),
    "block_indices": ({"block_indices": torch.tensor([[[-2]]]), "block_size": 4}, "block_indices: got an index of -2"),
}


@pytest.mark.parametrize("call", CACHES)
@pytest.mark.parametrize("name", REFUSED)
def test_values_that_attention_refuses(call, name):
    """`validate` is off for the cache's own tables alone; the caller can turn all of it off."""
    options, message = REFUSED[name]
    for _ in range(2):  # a repeated call too
        with pytest.raises(InvalidArgument, match=message):
            call(**options)
    with pytest.raises(InvalidArgument, match=message):
        attention(Q, K, V, causal=True, **options)


def test_what_a_ring_refuses():
    for offset in (torch.tensor([2**40]), 2**33, [-(2**32)]):
        with pytest.raises(InvalidArgument, match=r"q_offset\[0\]: got -?[0-9]{10}"):
            over_a_ring(q_offset=offset)
    with pytest.raises(InvalidArgument, match="tile_map: got tile_map over a ring"):
        over_a_ring(tile_map=CAUSAL)
    with pytest.raises(InvalidArgument, match="tile_map: got tile_map over a ring"):
        KVCache(1, HKV, 8, D, ring=True).attend(Q, tile_map=CAUSAL)  # before it is full


def test_repeated_cascades_are_in_the_call_cache(monkeypatch):
    """They are validated and planned once; another split of the same shapes gets its own tables."""
    call_cache.forget()
    cache = PagedKVCache(80, 4, HKV, D, "f32")
    first = cache.create()
    cache.append(first, *torch.randn(2, 1, HKV, 32, D))
    ids = [first, *(cache.fork(first) for _ in range(3))]
    checked = []
    plain = calls.paged
    monkeypatch.setattr(calls, "paged", lambda *args: checked.append(1) or plain(*args))
    sinks = torch.randn(HEADS)
    for step in range(4):
        cache.append(ids, *torch.randn(2, len(ids), HKV, 1, D))
        q = torch.randn(len(ids), HEADS, 1, D) * 3
        before = len(checked)
        got = cache.attend(ids, q, cascade=True, sinks=sinks, return_lse=True)
        assert len(checked) - before == (2 if step == 0 else 0)
        want = cache.attend(ids, q, cascade=False, sinks=sinks, return_lse=True)
        torch.testing.assert_close(got.out, want.out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=1e-5)
        ids = ids[1:] + ids[:1]
