"""Caches whose values are the first elements of their keys: one row in memory for both."""

import copy
import pickle

import pytest
import torch

from naive import assert_as_torch
from tilewise import InvalidArgument, KVCache, PagedKVCache, Quantised, attention, plan

STORED = ["f32", "bf16", "int8", "fp8_e4m3"]


def keys(*rows, width=96):
    return torch.randn(*rows, width)


def stored(x, dtype, group=64):
    """What a cache holds of `x`, in float32."""
    if dtype in ("f32", "bf16"):
        return x.to({"f32": torch.float32, "bf16": torch.bfloat16}[dtype]).float()
    return Quantised.from_float(x, dtype, group).dequantise()


def check(found, q, k, latent):
    """Causal attention of the last queries over dense keys `[B, 1, L, D]`, judged by torch's own error."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)

    def plain(q, k):
        s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
        return s.softmax(-1) @ k[..., :latent]

    assert_as_torch(found, plain(q.double(), k.double()), plain(q, k))


@pytest.mark.parametrize("dtype", STORED)
def test_rows_hold_keys_and_values_once(dtype):
    cache = KVCache(2, 1, 70, 96, dtype, latent=64)
    apart = KVCache(2, 1, 70, 96, dtype, value_dim=64)
    k, q = keys(2, 1, 60), keys(2, 48, 3)
    for start, end in ((0, 33), (33, 60)):
        cache.append(k[:, :, start:end])
        apart.append(k[:, :, start:end], k[:, :, start:end, :64])
    x, y = cache.store.operands(60, False)
    assert plan(q, x, y).problem.v_in_k
    assert (cache.bytes_per_token, cache.nbytes) == (cache.k_format.bytes, 2 * 70 * cache.k_format.bytes)
    assert cache.bytes_per_token < apart.bytes_per_token
    for row in range(2):
        assert torch.equal(cache.keys(row), apart.keys(row))
        assert torch.equal(cache.values(row), cache.keys(row)[..., :64])
    check(cache.attend(q), q, stored(k, dtype), 64)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", STORED)
def test_every_writer_stores_the_row_once(dtype, backend, monkeypatch):
    from tilewise.dispatch import planner

    monkeypatch.setattr(planner, "choose_writer", lambda problem: backend)
    k, cache = keys(1, 2, 20), KVCache(1, 2, 32, 96, dtype, latent=40)
    cache.append(k.bfloat16())
    assert torch.equal(cache.keys(0), stored(k.bfloat16().float(), dtype)[0])


def test_counts_rings_and_rows_are_as_ever():
    cache, k, q = KVCache(3, 1, 32, 96, "f32", latent=64, ring=True), keys(3, 1, 50), keys(3, 4, 1)
    for start in range(0, 50, 5):
        cache.append(k[:, :, start : start + 5])
    check(cache.attend(q), q, k[:, :, 18:], 64)
    cache.truncate(1, 45)
    cache.reset(2)
    cache.append(k[:, :, :4], counts=[0, 2, 4])
    assert cache.lengths.tolist() == [50, 47, 4]
    assert torch.equal(cache.values(2), k[2, :, :4, :64])
    assert torch.equal(cache.gather([2, 0]).values(0), cache.values(2))


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_pages_are_forked_matched_and_attended(dtype):
    cache = PagedKVCache(20, 8, 1, 96, dtype, latent=64, layers=2)
    k, q = keys(2, 20, 1), keys(1, 5, 1)
    first = cache.create()
    batch = cache.extend(first, 20, tokens=range(20))
    for layer in range(2):
        batch.write(k[layer], layer=layer)
    second = cache.fork(first)
    new = keys(2, 2, 1)  # a layer, a sequence
    batch = cache.extend([first, second])
    for layer in range(2):
        batch.write(new[layer], None, layer)
        found = batch.attend(q.expand(2, -1, -1, -1), layer)
        for i in range(2):
            whole = torch.cat([k[layer], new[layer, i : i + 1]]).transpose(0, 1)[None]
            check(found[i : i + 1], q, stored(whole, dtype), 64)
    assert cache.stats().shared == 2
    third, held = cache.prefix_match(range(18))
    assert held == 16
    assert torch.equal(cache.values(third, 1), cache.keys(third, 1)[..., :64])
    assert torch.equal(cache.keys(third, 1), stored(k[1, :16].transpose(0, 1), dtype))
    assert cache.nbytes == 2 * 20 * 8 * cache.k_format.bytes


def test_copies_share_nothing_but_their_own_rows():
    rows, pages = KVCache(1, 1, 32, 96, "int8", latent=64), PagedKVCache(4, 8, 1, 96, "bf16", latent=64)
    rows.append(keys(1, 1, 20))
    sequence = pages.create()
    pages.append(sequence, keys(20, 1))
    for cache, args in ((rows, (0,)), (pages, (sequence,))):
        for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            assert (other.latent, other.nbytes) == (64, cache.nbytes)
            before = cache.keys(*args).clone()
            assert torch.equal(other.keys(*args), before)
            other.store.k.data.fill_(1)
            assert torch.equal(cache.keys(*args), before)
            assert torch.equal(other.values(*args), other.keys(*args)[..., :64])


def test_files(tmp_path):
    rows, pages = KVCache(2, 1, 32, 96, "int8", latent=64), PagedKVCache(4, 8, 1, 96, "bf16", latent=64)
    rows.append(keys(2, 1, 20), counts=[20, 3])
    sequence = pages.create()
    pages.append(sequence, keys(20, 1), tokens=range(20))
    rows.save(tmp_path / "rows")
    pages.save(tmp_path / "pages")
    pages.save_prefix(tmp_path / "prefix", sequence)
    again = KVCache.load(tmp_path / "rows")
    assert again.latent == 64
    assert torch.equal(again.values(1), rows.values(1))
    assert torch.equal(PagedKVCache.load(tmp_path / "pages").keys(sequence), pages.keys(sequence))
    other = PagedKVCache(4, 16, 1, 96, "bf16", latent=64)
    assert torch.equal(other.values(other.load_prefix(tmp_path / "prefix")), pages.values(sequence))
    apart = PagedKVCache(4, 16, 1, 96, "bf16", value_dim=64)
    with pytest.raises(InvalidArgument, match="latent 64, expected None, as the cache has"):
        apart.load_prefix(tmp_path / "prefix")


def test_rows_of_656_bytes():
    cache, k, q = (
        PagedKVCache(8, 16, 1, 576, "fp8_latent", latent=512),
        keys(30, 1, width=576),
        keys(1, 3, 2, width=576),
    )
    sequence = cache.create()
    cache.append(sequence, k)
    assert (cache.bytes_per_token, cache.nbytes) == (656, 8 * 16 * 656)
    held = Quantised.from_float(k, "fp8_latent", 128)
    assert torch.equal(cache.keys(sequence), held.dequantise().transpose(0, 1))
    check(cache.attend(sequence, q), q, held.dequantise().transpose(0, 1)[None], 512)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"latent": 96}, "latent: got 96, expected an int, 1 to 95"),
        ({"latent": True}, "latent: got True"),
        ({"latent": 64, "value_dim": 32}, "value_dim: got 32 with latent, expected None or 64"),
        ({"latent": 64, "v_dtype": "f16"}, "v_dtype: got 'f16' with latent"),
        ({"latent": 64, "dtype": "int4"}, "dtype: got 'int4' with latent"),
        ({"latent": 64, "rotate": True}, "rotate: got True with latent"),
        ({"latent": 64, "dtype": "fp8_latent"}, "512 or an even number more for fp8_latent"),
    ],
)
def test_what_is_refused(options, said):
    for make in (lambda **given: KVCache(1, 1, 32, 96, **given), lambda **given: PagedKVCache(4, 8, 1, 96, **given)):
        with pytest.raises(InvalidArgument, match=said):
            make(**{"dtype": "f32", **options})


def test_values_are_given_by_keys_alone():
    cache, pages = KVCache(1, 1, 32, 96, "f32", latent=64), PagedKVCache(4, 8, 1, 96, "f32", latent=64)
    with pytest.raises(InvalidArgument, match="v: got values for a latent cache, expected None"):
        cache.append(keys(1, 1, 5), keys(1, 1, 5, width=64))
    with pytest.raises(InvalidArgument, match="v: got values for a latent cache"):
        pages.append(pages.create(), keys(5, 1), keys(5, 1, width=64))
    with pytest.raises(InvalidArgument, match="v: got None"):
        KVCache(1, 1, 32, 96, "f32").append(keys(1, 1, 5))
    assert cache.lengths.tolist() == [0]
    assert "latent=64" in repr(cache)


def test_bits_are_those_of_the_same_call():
    cache, k, q = KVCache(1, 1, 64, 96, "bf16", latent=64), keys(1, 1, 64).bfloat16(), keys(1, 4, 1).bfloat16()
    cache.append(k)
    assert torch.equal(cache.attend(q), attention(q, k, k[..., :64], causal=True, kv_lengths=torch.tensor([64])))
