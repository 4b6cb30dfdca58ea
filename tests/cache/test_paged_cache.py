"""`PagedKVCache`: pages, forks, prefixes, layers, threads, cascades. Random operations: see test_cache_machines.py."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from naive import Row, assert_as_torch, assert_close
from tilewise import AttentionState, CacheFull, InvalidArgument, PagedKVCache, merge, paged_attention
from tilewise.backends import cpu, triton
from tilewise.backends.cpu.config import key_time
from tilewise.backends.torch.kv_write import Append as InTorch
from tilewise.core.problem import CascadeProblem
from tilewise.dispatch import planner
from tilewise.kv_cache import hadamard
from tilewise.kv_cache.cascade import _merged, shared

CPU = torch.device("cpu")


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2


def cache_of(pages=40, page_size=4, heads=2, width=64, dtype="f32", **options):
    return PagedKVCache(pages, page_size, heads, width, dtype, **options)


def put(cache, sequence, tokens, seed=0):
    """Appends tokens whose rows follow from all ids before them, as a model's do."""
    k, v = rows(2, len(tokens), cache.kv_heads, cache.k_format.width, seed=seed)
    cache.append(sequence, k, v, tokens=tokens)


def test_packed_and_padded_rows_are_the_same():
    k, v = rows(2, 9, 2, 64)
    counts = [4, 0, 5]
    packed, padded = cache_of(), cache_of()
    for cache in (packed, padded):
        for _ in counts:
            cache.create()
    packed.append([0, 1, 2], k, v, counts=counts)
    wide = torch.full((2, 3, 2, 6, 64), torch.nan)
    for x, y in zip(wide, (k, v), strict=True):
        x[0, :, :4], x[2, :, :5] = y[:4].transpose(0, 1), y[4:].transpose(0, 1)
    padded.append([0, 1, 2], *wide, counts=counts)
    q = rows(9, 4, 64, seed=3)
    out = packed.attend([0, 1, 2], q, counts=counts)
    wide_q = torch.zeros(3, 4, 6, 64)
    wide_q[0, :, :4], wide_q[2, :, :5] = q[:4].transpose(0, 1), q[4:].transpose(0, 1)
    wide_out = padded.attend([0, 1, 2], wide_q, counts=counts)
    seq_major = padded.attend([0, 1, 2], wide_q.transpose(1, 2), counts=counts, layout="blhd")
    for b, (start, n) in enumerate(((0, 4), (4, 0), (4, 5))):
        assert packed.keys(b).equal(padded.keys(b))
        assert packed.keys(b).equal(k[start : start + n].transpose(0, 1))
        if n:
            want, _ = Row.held_by(packed, b).attend(q[start : start + n].transpose(0, 1), causal=True)
            for got in (out[start : start + n].transpose(0, 1), wide_out[b, :, :n], seq_major[b, :n].transpose(0, 1)):
                assert_close(got, want)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8", "int4", "fp8_e4m3"])
def test_every_layer_has_its_own_rows(dtype):
    cache = cache_of(layers=3, dtype=dtype, value_dim=32, v_dtype="int8", group=32)
    models = {(layer, s): Row(dtype, "int8", 32) for layer in range(3) for s in range(2)}
    ids = [cache.create(), cache.create()]
    for step, counts in enumerate([(5, 3), (1, 1), (4, 0)]):
        batch = cache.extend(ids, counts)
        for layer in range(3):
            k, v = rows(sum(counts), 2, 64, seed=9 * step + layer), rows(sum(counts), 2, 32, seed=step - layer)
            batch.write(k, v, layer=layer)
            q = rows(sum(counts), 4, 64, seed=step)
            out = batch.attend(q, layer=layer)
            start = 0
            for s, n in enumerate(counts):
                part = slice(start, start + n)
                models[layer, s].append(k[part].transpose(0, 1), v[part].transpose(0, 1))
                if n:
                    want = models[layer, s].attend(q[part].transpose(0, 1), causal=True)[0]
                    assert_close(out[part].transpose(0, 1), want)
                start += n
    for (layer, s), model in models.items():
        assert cache.keys(s, layer).equal(model.held(0))
    with pytest.raises(InvalidArgument, match="layers: got 3 layers, expected one, to append; extend, then write"):
        cache.append(ids, k, v)
    with pytest.raises(InvalidArgument, match="layer: got 3"):
        batch.attend(q, layer=3)
    with pytest.raises(InvalidArgument, match="layer: got 2, which has no new tokens to write"):
        batch.write(k, v, layer=2)


def test_tables_are_the_device_tensors_of_paged_attention():
    cache = cache_of()
    ids = [cache.create() for _ in range(3)]
    cache.append(ids, *rows(2, 3, 2, 7, 64))
    batch = cache.view(ids)
    assert batch.block_table.dtype == batch.context_lens.dtype == torch.int32
    assert batch.context_lens.tolist() == [7, 7, 7]
    q = rows(3, 4, 1, 64, seed=1)
    k, v = cache.store.k.data[0], cache.store.v.data[0]
    assert paged_attention(q, k, v, batch.block_table, batch.context_lens).equal(batch.attend(q))


def test_copy_on_write_is_exact():
    cache = cache_of()
    first = cache.create()
    cache.append(first, *rows(2, 6, 2, 64))  # a full page and a half
    forks = [cache.fork(first) for _ in range(3)]
    assert (cache.stats().used, cache.stats().shared) == (2, 2)
    half = cache.store.sequences.pages(cache.store.sequences.slot_of[first])[1]
    before = cache.store.k.data[0, half].view(torch.uint8).clone()
    cache.append(forks[:2], *rows(2, 2, 2, 1, 64, seed=1))  # two of four write: both get a copy
    assert cache.stats().used == 4
    assert cache.store.sequences.pool.refs[half] == 2
    assert cache.store.k.data[0, half].view(torch.uint8).equal(before)
    cache.append([first, forks[2]], *rows(2, 2, 2, 1, 64, seed=2))  # the last two: one copy, one in place
    assert cache.stats().used == 5
    assert cache.store.sequences.pool.refs[half] == 1
    cache.append(forks[0], *rows(2, 1, 2, 64, seed=3))  # its own: in place
    assert cache.stats().used == 5
    for number in (first, *forks):
        assert cache.keys(number)[:, :6].equal(cache.keys(first)[:, :6])
    cache.free([forks[1], first])
    cache.free(forks[0])
    cache.free(forks[2])
    assert cache.stats().free == 40


def test_a_full_pool_says_so_before_it_changes():
    cache = cache_of(pages=4)
    a, b = cache.create(), cache.create()
    cache.append([a, b], *rows(2, 10, 2, 64), counts=[6, 4])
    fork = cache.fork(a)
    with pytest.raises(CacheFull, match="2 pages are needed, 1 of 4 are free; free or truncate"):
        cache.append([a, fork, b], *rows(2, 3, 2, 1, 64))  # one copy, and a new page for b
    assert [cache.length(s) for s in (a, fork, b)] == [6, 6, 4]
    cache.append([a, fork], *rows(2, 2, 2, 1, 64))
    with pytest.raises(CacheFull):
        cache.extend(b)
    cache.truncate(fork, 4)
    cache.extend(b)
    assert cache.stats().free == 0


def test_a_sequence_that_there_is_no_memory_for_changes_nothing(monkeypatch):
    cache = cache_of()

    def full(*_, **__):
        raise MemoryError

    with monkeypatch.context() as without:
        without.setattr(np, "pad", full)
        with pytest.raises(MemoryError):
            cache.create()
    assert cache.stats().sequences == 0
    put(cache, cache.create(), [1, 2, 3])
    assert cache.length(0) == 3


def test_wrong_rows_leave_no_trace():
    cache = cache_of()
    a = cache.create()
    for call, message in (
        (lambda: cache.append(a, rows(1, 2, 3, 64), rows(1, 2, 2, 64)), "v: got"),
        (lambda: cache.append(a, rows(3, 2, 64), rows(3, 2, 64), counts=[2]), "k: got 3 packed rows, expected 2"),
        (lambda: cache.append(a, rows(2, 2, 3, 64), rows(2, 2, 3, 64)), "k: got shape"),
        (lambda: cache.append(a, rows(1, 2, 3, 64), rows(1, 2, 3, 64), counts=[4]), "k: got 1 rows of 3 tokens"),
        (lambda: cache.append(a, rows(3, 1, 64), rows(3, 1, 64)), "k: got 1 heads"),
        (lambda: cache.append(a, rows(3, 2, 64), rows(3, 2, 64), tokens=[1, 2]), "tokens: got 2 ids, expected 3"),
        (lambda: cache.append(a, rows(3, 2, 64), rows(3, 2, 64), tokens=[1.5, 2, 3]), "tokens: got float64"),
        (lambda: cache.extend(a, -1), r"counts\[0\]: got -1"),
        (lambda: cache.extend("a"), "sequences: got 'a'"),
        (lambda: cache.attend(a, rows(1, 2, 1, 64), cu_seqlens_q=[0, 1]), "cu_seqlens_q: got an option of attend"),
        (lambda: cache.attend(a, rows(3, 4, 1, 64)), "q: got shape"),
        (lambda: cache.attend(a, rows(1, 4, 1, 64), cascade=True), "cascade: got True with a lone sequence"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=message):
            call()
    assert cache.length(a) == 0
    assert cache.stats().free == 40


class TestPrefixes:
    def test_equal_prefixes_share_pages(self):
        cache = cache_of()
        first, matched = cache.prefix_match(range(10))
        assert matched == 0
        put(cache, first, list(range(10)))
        second, matched = cache.prefix_match([*range(9), 77])
        assert matched == 8
        assert cache.keys(second).equal(cache.keys(first)[:, :8])
        assert (cache.stats().used, cache.stats().shared) == (3, 2)
        assert cache.prefix_match([0, 1, 2, 3, 9, 9, 9, 9])[1] == 4
        assert cache.prefix_match([1, 2, 3, 4])[1] == 0  # equal ids elsewhere are no prefix
        assert cache.prefix_match([4, 5, 6, 7])[1] == 0

    def test_pages_outlive_their_sequences_until_room_is_needed(self):
        cache = cache_of(pages=6)
        for start in (0, 100, 200):
            sequence = cache.create()
            put(cache, sequence, list(range(start, start + 8)), seed=start)
            cache.free(sequence)
        assert (cache.stats().kept, cache.stats().free, cache.stats().used) == (6, 0, 0)
        sequence, matched = cache.prefix_match(range(8))  # used again: the youngest now
        assert matched == 8
        cache.free(sequence)
        other = cache.create()
        put(cache, other, [5] * 12)  # takes three: those of 100, which nobody used for longest, and a half of 200's
        assert cache.prefix_match(range(8))[1] == 8
        assert cache.prefix_match(range(100, 108))[1] == 0
        assert cache.prefix_match(range(200, 208))[1] == 4
        assert cache.stats().kept == 0

    def test_ids_are_compared_not_only_hashed(self, monkeypatch):
        """Were all hashes the same, nothing would be shared wrongly: equal keys are what counts."""

        class Same(bytes):
            __slots__ = ()

            def __hash__(self):
                return 1

        cache = cache_of()
        index = cache.store.sequences.pool.index
        find, add = index.find, index.add
        monkeypatch.setattr(index, "find", lambda parent, ids: find(parent, Same(ids)))
        monkeypatch.setattr(index, "add", lambda parent, ids, page: add(parent, Same(ids), page))
        for start in range(0, 32, 4):
            put(cache, cache.create(), list(range(start, start + 4)), seed=start)
        for start in range(0, 32, 4):
            sequence, matched = cache.prefix_match(range(start, start + 4))
            assert matched == 4
            assert cache.keys(sequence).equal(rows(2, 4, 2, 64, seed=start)[0].transpose(0, 1))
        assert cache.prefix_match(range(1, 5))[1] == 0

    def test_a_page_is_found_when_all_layers_are_written(self):
        cache = cache_of(layers=2)
        batch = cache.extend(cache.create(), 4, tokens=[1, 2, 3, 4])
        k = rows(4, 2, 64)
        batch.write(k, k, layer=1)
        assert cache.prefix_match([1, 2, 3, 4])[1] == 0
        batch.write(k, k, layer=0)
        assert cache.prefix_match([1, 2, 3, 4])[1] == 4

    def test_tokens_without_ids_are_never_found(self):
        cache = cache_of()
        a = cache.create()
        put(cache, a, [1, 2, 3, 4])
        cache.append(a, *rows(2, 1, 2, 64))
        put(cache, a, [6, 7, 8, 9, 10, 11])
        assert cache.prefix_match([1, 2, 3, 4, 0, 6, 7, 8])[1] == 4

    def test_writing_after_truncation_does_not_change_what_others_find(self):
        cache = cache_of()
        a = cache.create()
        put(cache, a, list(range(8)), seed=1)
        cache.truncate(a, 6)
        found, matched = cache.prefix_match(range(8))
        assert matched == 8  # all of it is still there
        cache.free(found)
        put(cache, a, [90, 91], seed=2)  # written in place: the page is a's alone
        assert cache.stats().used == 2
        assert cache.prefix_match(range(8))[1] == 4
        assert cache.prefix_match([0, 1, 2, 3, 4, 5, 90, 91])[1] == 8
        b, _ = cache.prefix_match(range(4))
        cache.truncate(b, 2)
        put(cache, b, [50, 51], seed=3)  # b writes into a page that a and others hold
        assert cache.prefix_match(range(4))[1] == 4
        assert cache.keys(a)[:, :4].equal(rows(2, 8, 2, 64, seed=1)[0].transpose(0, 1)[:, :4])

    def test_sharers_that_all_write_at_once_leave_nothing_wrong_to_find(self):
        """All but the last copy the half filled page; the last writes in place, so the page is known for nothing."""
        cache = cache_of()
        a = cache.create()
        put(cache, a, list(range(8)), seed=1)
        cache.truncate(a, 6)
        b = cache.fork(a)
        k, v = rows(2, 4, 2, 64, seed=2)
        batch = cache.extend([a, b], 2, tokens=[90, 91, 92, 93])
        batch.write(k, v)
        assert cache.prefix_match(range(8))[1] == 4
        for tail in ([90, 91], [92, 93]):
            assert cache.prefix_match([0, 1, 2, 3, 4, 5, *tail])[1] == 8

    def test_a_known_prefix_that_left_takes_what_followed_along(self):
        """Two sequences compute the same pages; only one set is known, and what follows the other's is found by it."""
        cache = cache_of(pages=5)
        a, b = cache.create(), cache.create()
        k, v = rows(2, 8, 2, 64)
        cache.append([a, b], k, v, tokens=[1, 2, 3, 4] * 2)
        put(cache, b, [5, 6, 7, 8], seed=5)
        c, matched = cache.prefix_match([1, 2, 3, 4, 5, 6, 7, 8])
        assert matched == 8
        assert (
            cache.store.sequences.pages(cache.store.sequences.slot_of[c])[0]
            == cache.store.sequences.pages(cache.store.sequences.slot_of[a])[0]
        )
        cache.free([a, c])
        assert cache.stats().kept == 1
        d = cache.create()
        put(cache, d, [9] * 12, seed=6)  # takes the kept page
        assert cache.prefix_match([1, 2, 3, 4, 5, 6, 7, 8])[1] == 0
        put(cache, b, [], seed=7)
        cache.free(d)
        put(cache, b, [9, 9, 9, 9], seed=8)  # what b stood at has left: nothing follows it
        assert cache.prefix_match([9, 9, 9, 9])[1] == 4  # d's own, and not b's
        assert cache.prefix_match([1, 2, 3, 4])[1] == 0


def test_stats():
    cache = cache_of(dtype="int8")
    a = cache.create()
    cache.append(a, *rows(2, 9, 2, 64))
    b = cache.fork(a)
    stats = cache.stats()
    assert (stats.pages, stats.used, stats.shared, stats.free, stats.sequences, stats.tokens) == (40, 3, 3, 37, 2, 9)
    assert stats.fragmentation == pytest.approx(0.25)
    cache.append([a, b], *rows(2, 2, 2, 2, 64))
    stats = cache.stats()
    assert (stats.used, stats.shared, stats.tokens) == (4, 2, 14)
    assert stats.fragmentation == pytest.approx(2 / 16)
    assert stats.nbytes == 40 * 4 * cache.bytes_per_token == 40 * 4 * 2 * 2 * (64 + 4)


def test_repr():
    cache = cache_of(layers=3)
    assert repr(cache) == (
        "PagedKVCache(num_pages=40, page_size=4, layers=3, sequences=0, tokens=0, used=0, kept=0, free=40, kv_heads=2, "
        "head_dim=64, dtype='f32', device='cpu', nbytes=491520)"
    )
    cache = PagedKVCache(40, 4, 2, 64)
    cache.append(cache.create(), *rows(2, 9, 2, 64), tokens=range(9))
    cache.free(0)
    assert "sequences=0, tokens=0, used=0, kept=2, free=38, kv_heads=2" in repr(cache)


def test_the_kernel_stores_the_same_bytes_as_torch():
    for dtype in ("f16", "int8", "int4", "fp8_e4m3"):
        caches = [cache_of(dtype=dtype, layers=2, group=32) for _ in range(2)]
        for cache in caches:
            for x in (cache.store.k, cache.store.v):
                for part in (x.data, x.scales):
                    if part is not None:
                        part.view(torch.uint8).fill_(77)
        plain = caches[1]
        for layer in range(2):
            k, v = (
                store.map(lambda x, layer=layer: x[layer].transpose(1, 2)) for store in (plain.store.k, plain.store.v)
            )
            plain.store.writers[layer] = InTorch(k, v, 4)
        for cache in caches:
            ids = [cache.create() for _ in range(3)]
            for step, counts in enumerate([(9, 0, 3), (1, 1, 1)]):
                batch = cache.extend(ids, counts)
                for layer in range(2):
                    batch.write(*rows(2, sum(counts), 2, 64, seed=step + layer), layer=layer)
        for kernel, plain_part in (
            (caches[0].store.k.data, caches[1].store.k.data), (caches[0].store.v.data, caches[1].store.v.data),
            (caches[0].store.k.scales, caches[1].store.k.scales), (caches[0].store.v.scales, caches[1].store.v.scales),
        ):  # fmt: skip
            if kernel is not None:
                assert kernel.view(torch.uint8).equal(plain_part.view(torch.uint8))


def test_tables_grow_with_sequences_and_pages():
    cache = cache_of(pages=600, page_size=1, heads=1, width=8)
    ids = [cache.create() for _ in range(100)]
    for step in range(3):
        cache.append(ids, *rows(2, 100, 1, 1, 8, seed=step))
    long = cache.create()
    x = rows(2, 200, 1, 8, seed=9)
    cache.append(long, *x)
    assert cache.keys(long).equal(x[0].transpose(0, 1))
    for i in (0, 50, 99):
        want = torch.stack([rows(2, 100, 1, 1, 8, seed=step)[0][i, :, 0] for step in range(3)], 1)
        assert cache.keys(ids[i]).equal(want)


def test_rotation():
    cache, k, v = cache_of(rotate=True, value_dim=32), rows(2, 2, 9, 64), rows(2, 2, 9, 32, seed=1)
    q = rows(2, 4, 3, 64, seed=5)
    ids = [cache.create(), cache.create()]
    cache.append(ids, k, v)
    got = cache.attend(ids, q, return_lse=True)
    for b in ids:
        model = Row()
        model.append(k[b], v[b])
        out, lse = model.attend(q[b], causal=True, rotated=True)
        assert_close(got.out[b], out)
        assert_close(got.lse[b], lse)
        assert_as_torch(cache.keys(b), k[b].double(), hadamard.rotate_back(hadamard.rotate(k[b])))


@pytest.fixture
def _restless():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_restless")
class TestThreads:
    def test_threads_with_sequences_of_their_own(self):
        """Four threads create, extend, fork, match, attend and free; each sequence keeps its own rows."""
        cache = cache_of(pages=300, heads=1, width=16)
        errors = []

        def work(seed):
            rng = np.random.default_rng(seed)
            live = {}
            for step in range(120):
                kind = rng.integers(5)
                if kind == 0 or not live:
                    number, held = cache.prefix_match([seed % 2] * 8)
                    live[number] = prompt(seed % 2)[:, :held]
                    continue
                number = int(rng.choice(list(live)))
                if kind == 1:
                    live[cache.fork(number)] = live[number].clone()
                elif kind == 2 and len(live) > 2:
                    cache.free(number)
                    del live[number]
                elif kind == 3:
                    length = int(rng.integers(live[number].shape[1] + 1))
                    cache.truncate(number, length)
                    live[number] = live[number][:, :length]
                else:
                    n = int(rng.integers(1, 7))
                    new, ids = rows(n, 1, 16, seed=1000 * seed + step), None
                    if live[number].shape[1] == 0:  # the prompt of its kind, so that threads meet in the index
                        new, ids = prompt(seed % 2).transpose(0, 1), [seed % 2] * 8
                    cache.append(number, new, new, tokens=ids)
                    live[number] = torch.cat([live[number], new.transpose(0, 1)], 1)
                if number in live and live[number].shape[1]:
                    want = live[number]
                    if not cache.keys(number).equal(want):
                        errors.append((seed, step, "rows"))
                    q = rows(1, 2, 1, 16, seed=step)
                    got = cache.attend(number, q)
                    exact = torch.softmax(q[0] @ want.transpose(1, 2) / 4, -1) @ want
                    if not torch.allclose(got[0], exact, atol=1e-4):
                        errors.append((seed, step, "attention"))
            cache.free(list(live))

        def prompt(kind):
            return rows(1, 8, 16, seed=77 + kind)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert not errors
        assert cache.stats().used == 0
        assert cache.stats().free + cache.stats().kept == 300

    def test_room_is_given_out_once(self):
        """More threads than pages: some get theirs, the others raise, and the block manager stays right."""
        cache = cache_of(pages=500, heads=1, width=8)
        start, full = threading.Barrier(8), []

        def work(_):
            start.wait()
            for _ in range(100):
                number = cache.create()
                try:
                    cache.extend(number, 4)
                except CacheFull:
                    full.append(number)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert len(full) == 300
        assert cache.stats().sequences == 800
        pages = [cache.store.sequences.pages(slot).tolist() for slot in cache.store.sequences.slot_of.values()]
        assert sorted(page for row in pages for page in row) == list(range(500))
        assert len(set(cache.store.sequences.slot_of.values())) == 800


class TestCascade:
    def family(self, cache, lengths=(3, 0, 9, 1), prefix=24):
        """Sequences that share a prefix, each with a rest of its own."""
        root = cache.create()
        cache.append(root, *rows(2, prefix, 2, 64))
        ids = [cache.fork(root) for _ in lengths]
        for i, (number, n) in enumerate(zip(ids, lengths, strict=True)):
            cache.append(number, *rows(2, n + 1, 2, 64, seed=i + 1))
        cache.free(root)
        return ids

    def right(self, cache, ids, q, got, dtype=torch.float32, **options):
        """q and out [B, H, Lq, D] with lse, judged by the oracle over what the cache holds."""
        for b, number in enumerate(ids):
            out, lse = Row.held_by(cache, number).attend(q[b], causal=True, dtype=dtype, **options)
            assert_close(got.out[b], out)
            assert_close(got.lse[b], lse)

    @pytest.mark.parametrize("form", ["padded", "packed", "blhd"])
    @pytest.mark.parametrize("dtype", ["f32", "int8"])
    def test_the_result_is_right(self, form, dtype):
        cache = cache_of(dtype=dtype, pages=60)
        ids = self.family(cache)
        other = self.family(cache, (2, 5), prefix=11)
        lone = cache.create()
        cache.append(lone, *rows(2, 5, 2, 64, seed=50))
        ids = [ids[0], other[0], ids[1], lone, ids[2], other[1], ids[3]]  # groups are not neighbours
        q = rows(7, 4, 1, 64, seed=60)
        given = {"padded": q, "packed": q[:, :, 0], "blhd": q.transpose(1, 2)}[form]
        layout = {"layout": "blhd"} if form == "blhd" else {}
        for options in ({}, {"softcap": 8.0, "scale": 0.3}, {"sinks": rows(4, seed=61)}):
            result = cache.attend(ids, given, cascade=True, return_lse=True, **layout, **options)
            got = result
            if form != "padded":
                got = AttentionState(*(x.unsqueeze(2) if form == "packed" else x.transpose(1, 2) for x in result))
            self.right(cache, ids, q, got, **options)
            out = torch.empty_like(result.out)
            assert cache.attend(ids, given, cascade=True, out=out, **layout, **options) is out
            assert out.equal(result.out)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_queries_of_16_bits(self, dtype):
        """Both states are merged in float32 and rounded once."""
        cache = cache_of(dtype={torch.float16: "f16", torch.bfloat16: "bf16"}[dtype])
        ids = self.family(cache)
        q = rows(4, 4, 1, 64, seed=60).to(dtype)
        got = cache.attend(ids, q, cascade=True, return_lse=True)
        assert got.out.dtype == dtype
        self.right(cache, ids, q, got, dtype)

    @pytest.mark.parametrize("threads", [1, 2, 3])
    @pytest.mark.parametrize("dtype", ["f32", "bf16"])
    def test_long_prefixes_in_parts(self, dtype, threads):
        """One KV head: the prefix is split over its keys and so are the rests, whose parts are merged too."""
        count, kind = torch.get_num_threads(), {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
        cache = cache_of(500, 16, heads=1, width=32, dtype=dtype)
        root = cache.create()
        cache.append(root, *rows(2, 2000, 1, 32))
        ids = [cache.fork(root) for _ in range(9)]
        for i, number in enumerate(ids):
            cache.append(number, *rows(2, 1300 if i == 4 else 20 + i, 1, 32, seed=i + 1))
        q = rows(9, 4, 1, 32, seed=60).to(kind)
        try:
            torch.set_num_threads(threads)
            got = cache.attend(ids, q, cascade=True, return_lse=True)
        finally:
            torch.set_num_threads(count)
        self.right(cache, ids, q, got, kind)

    def test_rows_of_no_sequence(self):
        cache = cache_of()
        ids = self.family(cache)
        q = rows(6, 4, 64, seed=60)
        got = cache.attend([ids[0], ids[2], ids[1], ids[3]], q, counts=[1] * 4, cascade=True, return_lse=True)
        assert not got.out[4:].any()
        assert (got.lse[4:] == -torch.inf).all()
        self.right(
            cache, [ids[0], ids[2], ids[1], ids[3]], q[:4, :, None], AttentionState(*(x[:4, :, None] for x in got))
        )

    def test_an_infinite_query(self):
        """Matrix tiles leave it to vectors, in the same call; nobody else's result changes."""
        cache = cache_of(dtype="f16", pages=60)
        ids = self.family(cache, tuple(range(9)))
        q = rows(9, 4, 1, 64, seed=60).half()
        plain = cache.attend(ids, q, cascade=True)
        q[3, 1, 0, 5] = torch.inf
        want, got = (cache.attend(ids, q, cascade=cascade) for cascade in (False, True))
        assert got[3, 1].isnan().any() == want[3, 1].isnan().any()
        others = [b for b in range(9) if b != 3]
        for b in others:
            want, _ = Row.held_by(cache, ids[b]).attend(q[b], causal=True, dtype=torch.float16)
            assert_close(got[b], want)
            assert_close(plain[b], want)

    @pytest.mark.parametrize("rotate", [False, True])
    def test_chunks_of_queries_of_different_lengths(self, rotate):
        cache = cache_of(rotate=rotate)
        ids = self.family(cache)
        counts = [3, 1, 4, 2]
        batch = cache.extend(ids, counts)
        batch.write(*rows(2, 10, 2, 64, seed=9))
        q = rows(10, 4, 64, seed=10)
        assert [group.pages for group in batch.shared_prefixes(4, always=True)] == [6]
        got = batch.attend(q, cascade=True).split(counts)
        for number, part, out in zip(ids, q.split(counts), got, strict=True):
            want, _ = Row.held_by(cache, number).attend(part.transpose(0, 1), causal=True, rotated=rotate)
            assert_close(out.transpose(0, 1), want)

    def test_queries_within_the_prefix_are_not_shared(self):
        """A query sees no later key: what is shared must come before all queries."""
        cache = cache_of()
        a = cache.create()
        cache.append(a, *rows(2, 8, 2, 64))
        b = cache.fork(a)
        batch = cache.view([a, b], 5)
        assert batch.shared_prefixes(4, always=True) == []
        assert [g.pages for g in cache.view([a, b], 4).shared_prefixes(4, always=True)] == [1]
        q = rows(2, 4, 5, 64)
        self.right(cache, [a, b], q, batch.attend(q, cascade=True, return_lse=True))

    def test_groups_stay_right_while_sequences_change(self):
        cache = cache_of(pages=100)
        ids = self.family(cache)
        for step in range(12):
            cache.append(ids, *rows(2, 4, 2, 1, 64, seed=step))
            q = rows(4, 4, 1, 64, seed=step)
            self.right(cache, ids, q, cache.attend(ids, q, cascade=True, return_lse=True))
            if step == 6:
                cache.truncate(ids[1], 10)
                cache.append(ids[1], *rows(2, 3, 2, 64, seed=99))

    @pytest.mark.parametrize("name", ["window", "chunk", "split_size", "q_offset"])
    def test_options_that_forbid_it(self, name):
        cache = cache_of()
        ids = self.family(cache)
        q = rows(4, 4, 1, 64)
        with pytest.raises(InvalidArgument, match=f"cascade: got True with {name}"):
            cache.attend(ids, q, cascade=True, **{name: 7})
        cache.attend(ids, q, **{name: 7})

    def test_merging_is_that_of_merge(self):
        a, b = (AttentionState(rows(5, 3, 8, seed=s), rows(5, 3, seed=s + 5) * 20) for s in (1, 2))
        a.lse[0], b.lse[1], a.lse[2, 0], b.lse[2, 0] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
        a.out[0], b.out[1] = torch.nan, torch.nan  # what an empty state holds does not matter
        a.out[2, 0] = b.out[2, 0] = 0.0
        lse = torch.stack([a.lse, b.lse]).double()
        weights = lse.softmax(0).nan_to_num(0.0)[..., None]
        exact = (weights * torch.stack([a.out, b.out]).nan_to_num(0.0)).sum(0)
        plain = merge([a, b])
        for pair in ((a, b), (b, a)):
            got = _merged(*(AttentionState(x.out.clone(), x.lse.clone()) for x in pair))
            assert_as_torch(got.out, exact, plain.out, "out")
            assert_as_torch(got.lse, lse.logsumexp(0), plain.lse, "lse")
            assert got.out[0].equal(b.out[0])
            assert got.out[1].equal(a.out[1])

    def test_groups_are_those_that_gain_most(self):
        """Eight sequences: all share 2 pages, two halves share 10 each, one pair shares 30."""
        table = np.full((8, 40), -1)
        table += np.arange(8)[:, None] * 1000 + np.arange(40)
        table[:, :2] = [1, 2]
        table[:4, 2:10], table[4:, 2:10] = np.arange(8) + 50, np.arange(8) + 60
        table[:2, 10:30] = np.arange(20) + 80
        full = np.full(8, 40)

        def pick(cost):
            groups = shared(table, full, lambda members, pages: (len(members) - 1) * pages - cost)
            return sorted((group.members.tolist(), group.pages) for group in groups)

        assert pick(0) == [([0, 1, 2, 3], 10), ([4, 5, 6, 7], 10)]
        assert pick(29.5) == [([0, 1, 2, 3], 10), ([4, 5, 6, 7], 10)]
        assert pick(30) == []
        full[:4] = 1
        assert pick(0) == [([4, 5, 6, 7], 10)]
        full[:] = [40, 40, 0, 40, 40, 0, 0, 0]
        assert pick(0) == [([0, 1], 30)]

    def test_it_is_chosen_where_it_pays(self):
        shape = CascadeProblem(CPU, kv_heads=8, group=4, width=256, bytes=1024, threads=2)
        ones = np.ones(32, dtype=np.int64)
        assert planner.cascade_gain(shape, ones, 2048) == cpu.cascade_gain(shape, ones, 2048) > 5e-3
        assert cpu.cascade_gain(shape, ones[:2], 16) < 0  # less than what merging takes
        assert cpu.cascade_gain(shape, ones[:1], 100_000) < 0
        gains = [cpu.cascade_gain(shape, ones[:n], 2048) for n in (2, 4, 8, 16, 32)]
        assert gains == sorted(gains)
        on_gpu = CascadeProblem(torch.device("cuda"), 8, 4, 256, 512, 1)
        assert triton.cascade_gain(on_gpu, ones, 65536) > 0 > triton.cascade_gain(on_gpu, ones, 4096)
        nowhere = replace(shape, device=torch.device("meta"))
        assert planner.cascade_gain(nowhere, ones, 1 << 20) == 0, "no backend that knows, no cascade by itself"

    def test_the_cost_of_a_key_is_what_was_measured(self):
        """Within a factor of 1.5 of the measurements named in `key_time`."""
        large, small, odd = (
            CascadeProblem(CPU, *x, 2) for x in ((8, 4, 256, 1024), (12, 1, 128, 512), (3, 3, 128, 512))
        )
        times = [(large, 4, 43), (large, 8, 82), (large, 32, 210), (large, 128, 518), (small, 1, 21), (small, 8, 52)]
        for shape, rows_, measured in (*times, (small, 32, 138), (odd, 3, 28), (odd, 24, 164), (odd, 96, 305)):
            assert 1 / 1.5 < key_time(shape, rows_) / measured < 1.5

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "width", "sequences", "tokens", "saved"),
        [
            (32, 8, 128, 2, 256, -103), (32, 8, 128, 8, 64, -162), (32, 8, 128, 8, 1024, 666), (9, 3, 64, 32, 64, -111),
            (32, 8, 128, 32, 256, 524), (32, 8, 128, 32, 1024, 3150), (9, 3, 64, 2, 1024, -71), (9, 3, 64, 8, 256, -93),
            (32, 8, 128, 32, 64, -244), (9, 3, 64, 32, 1024, 749), (12, 12, 64, 2, 1024, -30), (12, 12, 64, 8, 64, -94),
            (12, 12, 64, 8, 1024, 519), (12, 12, 64, 32, 64, -122), (12, 12, 64, 32, 256, 473),
        ],
    )  # fmt: skip
    def test_it_is_chosen_where_it_was_faster(self, heads, kv_heads, width, sequences, tokens, saved):
        """Microseconds that a step of float32 took less with a cascade, on two cores."""
        shape = CascadeProblem(CPU, kv_heads, heads // kv_heads, 2 * width, 8 * width, 2)
        assert (cpu.cascade_gain(shape, np.ones(sequences, dtype=np.int64), tokens) > 0) == (saved > 0)
