"""Copies and pickles of caches: equal, deep and independent, in this process and in others."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from tilewise import InvalidArgument, KVCache, PagedKVCache

KINDS = {
    "f32": {"dtype": "f32"}, "f16": {"dtype": "f16"}, "fp8": {"dtype": "fp8_e4m3", "group": 32},
    "int8 with f16 values": {"dtype": "int8", "v_dtype": "f16"}, "rotated int4": {"dtype": "int4", "rotate": True},
}  # fmt: skip
WAYS = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "pickle 2": lambda x: pickle.loads(pickle.dumps(x, protocol=2)),
}  # fmt: skip


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2


def poison(cache):
    """Overwrites all memory of a cache's keys and values."""
    for store in (cache.store.k, cache.store.v):
        for x in (store.data, store.scales):
            if x is not None:
                x.view(torch.uint8).fill_(0x7F)


def filled_rows(ring, options):
    cache = KVCache(2, 2, 9, 64, ring=ring, **options)
    cache.append(rows(2, 2, 7, 64), rows(2, 2, 7, 64, seed=1), [7, 3])
    if ring:
        cache.append(rows(2, 2, 6, 64, seed=2), rows(2, 2, 6, 64, seed=3))
    return cache


def filled_pages(options):
    """Two sequences that share pages, one that is gone but known, and one freed."""
    cache = PagedKVCache(20, 4, 2, 64, **options)
    a, gone, freed = cache.create(), cache.create(), cache.create()
    cache.append([a, gone, freed], *rows(2, 3, 2, 6, 64), tokens=range(18))
    fork = cache.fork(a)
    cache.free([gone, freed])
    return cache, a, fork


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_rows(way, kind, ring):
    cache, twin = (filled_rows(ring, KINDS[kind]) for _ in range(2))
    q, new = rows(2, 4, 1, 64, seed=9), rows(2, 2, 2, 1, 64, seed=8)
    other = WAYS[way](cache)
    assert repr(other) == repr(cache)
    for _ in range(2):
        other.append(*new)
        twin.append(*new)
        assert other.attend(q).equal(twin.attend(q))
    assert cache.lengths.equal(filled_rows(ring, KINDS[kind]).lengths)
    assert [cache.keys(b).equal(filled_rows(ring, KINDS[kind]).keys(b)) for b in range(2)] == [True] * 2
    want = other.attend(q)
    cache.reset()
    poison(cache)
    assert other.attend(q).equal(want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_pages(way, kind):
    (cache, a, fork), (twin, *_) = (filled_pages(KINDS[kind]) for _ in range(2))
    before = cache.stats()
    other = WAYS[way](cache)
    assert repr(other) == repr(cache)
    q = rows(2, 4, 1, 64, seed=9)
    for step in range(3):  # what follows is what would follow in the cache itself: ids, copies, prefixes
        for one in (other, twin):
            one.append([a, fork], *rows(2, 2, 2, 1, 64, seed=step), tokens=[50, 51 + step])
        assert other.stats() == twin.stats()
        assert other.attend([a, fork], q).equal(twin.attend([a, fork], q))
    found = [one.prefix_match(range(6, 12)) for one in (other, twin)]
    assert found[0] == found[1] == (fork + 1, 4)
    assert other.keys(fork + 1).equal(twin.keys(fork + 1))
    assert cache.stats() == before
    assert (cache.length(a), cache.length(fork)) == (6, 6)
    want = other.attend([a, fork], q)
    cache.free([a, fork])
    poison(cache)
    assert other.attend([a, fork], q).equal(want)


@pytest.mark.parametrize("way", WAYS)
def test_several_layers_and_tokens_on_their_way(way):
    """Tokens that only some layers have can be taken back in the copy, and are not lost in the original."""
    cache = PagedKVCache(10, 4, 1, 32, "f32", layers=2)
    a = cache.create()
    batch = cache.extend(a, 5)
    for layer in range(2):
        batch.write(*rows(2, 5, 1, 32, seed=layer), layer=layer)
    batch = cache.extend(a, 2)
    batch.write(*rows(2, 2, 1, 32, seed=5), layer=0)
    other = WAYS[way](cache)
    with pytest.raises(
        InvalidArgument, match=r"whose last 2 tokens are not all written in layer 1, .*truncate .* to 5"
    ):
        other.keys(a, layer=1)
    assert other.keys(a, layer=0).equal(cache.keys(a, layer=0))
    other.truncate(a, 5)
    batch.write(*rows(2, 2, 1, 32, seed=6), layer=1)
    assert other.keys(a, layer=1).equal(cache.keys(a, layer=1)[:, :5])
    assert (cache.length(a), other.length(a)) == (7, 5)


@pytest.mark.parametrize("way", WAYS)
def test_empty_caches(way):
    for cache in (KVCache(0, 1, 4, 8, "f32"), KVCache(2, 1, 4, 8, "int8"), PagedKVCache(0, 4, 1, 8, "f32"),
                  PagedKVCache(3, 4, 1, 8, "fp8_e4m3")):  # fmt: skip
        assert repr(WAYS[way](cache)) == repr(cache)


def test_a_copy_among_other_things_is_one_copy():
    cache = KVCache(1, 1, 4, 8, "f32")
    one, two = copy.deepcopy([cache, cache])
    assert one is two
    assert one is not cache


class Named(KVCache):
    """A cache with something of its own."""


@pytest.mark.parametrize("way", WAYS)
def test_attributes_and_classes_stay(way):
    cache = Named(1, 1, 4, 8, "f32")
    cache.model = {"name": "some"}
    other = WAYS[way](cache)
    assert type(other) is Named
    assert other.model == cache.model
    assert other.model is not cache.model


def test_memory_that_holds_no_token_is_not_pickled():
    caches = KVCache(2, 1, 8, 8, "f32"), PagedKVCache(4, 4, 1, 8, "f32")
    secret = torch.tensor(7.25)
    for cache in caches:
        cache.store.k.data.fill_(secret)
        cache.store.v.data.fill_(secret)
    caches[0].append(*torch.zeros(2, 2, 1, 5, 8), [5, 2])
    freed, a = caches[1].create(), caches[1].create()
    caches[1].append([freed, a], *torch.zeros(2, 2, 1, 5, 8), tokens=[*[123456789] * 5, *range(5)])
    caches[1].truncate(freed, 0)
    caches[1].store.sequences.pool.forget(1)  # what is kept for others may be pickled; here nothing is
    for cache in caches:
        data = pickle.dumps(cache)
        assert secret.numpy().tobytes() * 2 not in data
        assert (123456789).to_bytes(8, "little") not in data


def test_a_batch_is_neither_copied_nor_pickled():
    cache, a, fork = filled_pages({"dtype": "f32"})
    for batch in (cache.extend(a), cache.view(fork)):
        for way in WAYS.values():
            with pytest.raises(
                InvalidArgument, match=r"batch: got a copy or a pickle, .* copy the cache, and call view on the copy"
            ):
                way(batch)


ELSEWHERE = """
import pickle, sys, torch
from pathlib import Path
cache, numbers, q, new, path = pickle.loads(Path(sys.argv[1]).read_bytes())
for _ in range(3):
    if numbers is None:
        cache.append(*new)
        out = cache.attend(q)
    else:
        cache.append(numbers, *new)
        out = cache.attend(numbers, q)
Path(path).write_bytes(pickle.dumps((cache, out)))
"""


def test_another_process_goes_on_with_it(tmp_path):
    q, new = rows(2, 4, 1, 64, seed=9), rows(2, 2, 2, 1, 64, seed=8)
    pages, a, fork = filled_pages({"dtype": "int8", "rotate": True})
    ring = filled_rows(True, {"dtype": "int4"})
    for cache, numbers in ((ring, None), (pages, [a, fork])):
        task, answer = tmp_path / "task", tmp_path / "answer"
        task.write_bytes(pickle.dumps((cache, numbers, q, new, str(answer))))
        run = subprocess.run([sys.executable, "-c", ELSEWHERE, str(task)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-2000:]
        back, out = pickle.loads(answer.read_bytes())
        which = [] if numbers is None else [numbers]
        for _ in range(3):
            cache.append(*which, *new)
            want = cache.attend(*which, q)
        assert out.equal(want)
        assert back.attend(*which, q).equal(want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [*WAYS, "file"])
def test_on_a_gpu(way, kind, tmp_path):
    """Copies, files, forks and an append that fails: tables on the device follow those on the host."""
    gpu = torch.device("cuda")
    cache, twin = (PagedKVCache(20, 4, 2, 64, device=gpu, **KINDS[kind]) for _ in range(2))
    for one in (cache, twin):
        one.append(one.create(), *rows(2, 6, 2, 64).to(gpu), tokens=range(6))
        one.fork(0)
    if way == "file":
        cache.save(tmp_path / "cache")
        other = PagedKVCache.load(tmp_path / "cache", device=gpu)
    else:
        other = WAYS[way](cache)
    kept, other.store.writers[0] = other.store.writer(0), lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        other.append([0, 1], *rows(2, 2, 2, 3, 64).to(gpu))
    other.store.writers[0] = kept
    for step in range(6):
        for one in (other, twin):
            one.append([0, 1], *rows(2, 2, 2, 1, 64, seed=step).to(gpu))
        q = rows(2, 4, 1, 64, seed=step).to(gpu)
        assert other.attend([0, 1], q).equal(twin.attend([0, 1], q))
        assert other.keys(1).equal(twin.keys(1))
    assert cache.length(0) == 6
