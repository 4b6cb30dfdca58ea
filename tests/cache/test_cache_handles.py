"""`PagedKVCache` misused: stale batches, wrong ids, writers that fail, ids that are not known."""

import numpy as np
import pytest
import torch

from tilewise import CacheFull, InvalidArgument, KVCache, PagedKVCache


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2


def cache_of(pages=20, page_size=4, layers=1, **options):
    return PagedKVCache(pages, page_size, 2, 32, "f32", layers=layers, **options)


def put(cache, sequence, count, seed=0, tokens=None):
    cache.append(sequence, *rows(2, count, 2, 32, seed=seed), tokens=tokens)


def everything(cache):
    """All bookkeeping, and what every sequence holds."""
    s = cache.store.sequences
    numbers = [
        s.length.tolist(),
        s.known.tolist(),
        s.pool.refs.tolist(),
        s.pool.free,
        list(s.pool.kept),
        dict(s.slot_of),
    ]
    pages = [s.pages(slot).tolist() for slot in s.slot_of.values()]
    free = s.pool._stack[: s.pool.free].tolist()
    return [*numbers, pages, free, cache.store.k.data.numpy().tobytes(), cache.store.v.data.numpy().tobytes()]


class TestPrefixes:
    """What `prefix_match` finds are the keys of these very tokens."""

    def test_ids_of_a_copied_page_are_copied_with_it(self):
        cache = cache_of()
        a = cache.create()
        put(cache, a, 5, tokens=[10, 11, 12, 13, 14])
        b = cache.fork(a)
        put(cache, b, 1, seed=1)  # its page is copied, and no id is given
        cache.truncate(b, 5)
        put(cache, b, 3, seed=2, tokens=[15, 16, 17])
        assert cache.prefix_match([10, 11, 12, 13, 0, 15, 16, 17])[1] == 4
        found, held = cache.prefix_match([10, 11, 12, 13, 14, 15, 16, 17])
        assert held == 8
        assert cache.keys(found).equal(cache.keys(b))

    @pytest.mark.parametrize("layers", [1, 2])
    def test_tokens_that_were_never_written_are_not_found(self, layers):
        cache = cache_of(layers=layers)
        a = cache.create()
        cache.extend(a, 4, tokens=[1, 2, 3, 4])  # and lost
        batch = cache.extend(a, 4, tokens=[5, 6, 7, 8])
        for layer in range(layers):
            batch.write(*rows(2, 4, 2, 32), layer=layer)
        assert cache.prefix_match([1, 2, 3, 4, 5, 6, 7, 8])[1] == 0
        cache.truncate(a, 0)
        batch = cache.extend(a, 4, tokens=[1, 2, 3, 4])
        for layer in range(layers):
            assert cache.prefix_match([1, 2, 3, 4])[1] == 0
            batch.write(*rows(2, 4, 2, 32, seed=layer), layer=layer)
        assert cache.prefix_match([1, 2, 3, 4])[1] == 4

    def test_numbers_of_gone_prefixes_are_not_given_again_after_loading(self, tmp_path):
        """A sequence that stood at a prefix which left must not stand at the next one that gets its number."""
        cache = cache_of(pages=4)
        a, b = cache.create(), cache.create()
        cache.append([a, b], *rows(2, 8, 2, 32), tokens=[1, 2, 3, 4] * 2)  # b stands at a's page
        cache.free(a)
        c = cache.create()
        put(cache, c, 12, seed=3)  # takes it
        cache.free(c)
        cache.save(tmp_path / "x")
        again = PagedKVCache.load(tmp_path / "x")
        d = again.create()
        put(again, d, 4, seed=4, tokens=[7, 7, 7, 7])
        put(again, b, 4, seed=5, tokens=[5, 6, 7, 8])
        assert again.prefix_match([7, 7, 7, 7, 5, 6, 7, 8])[1] == 4


class TestStaleHandles:
    def change(self, cache, sequence, how):
        if how == "freed":
            cache.free(sequence)
        elif how == "freed, its slot used again":
            cache.free(sequence)
            put(cache, cache.create(), 9, seed=7)
        elif how == "truncated":
            cache.truncate(sequence, 4)
        elif how == "truncated and appended to":
            cache.truncate(sequence, 5)
            put(cache, sequence, 1, seed=8)
        else:
            cache.extend(sequence)

    @pytest.mark.parametrize("kind", ["extend", "view"])
    @pytest.mark.parametrize(
        "how", ["freed", "freed, its slot used again", "truncated", "truncated and appended to", "appended to"]
    )
    def test_refused(self, kind, how):
        cache = cache_of()
        a, b, c = (cache.create() for _ in range(3))
        for s in (a, b, c):
            put(cache, s, 5, seed=s)
        batch = cache.extend([c, a, b], tokens=[1, 2, 3]) if kind == "extend" else cache.view([c, a, b])
        self.change(cache, a, how)
        before = everything(cache)
        message = (
            f"batch: got one made before sequence {a} was {'freed' if 'freed' in how else 'changed'}, .*call extend"
        )
        q = rows(3, 4, 1, 32)
        for use in (
            lambda: batch.write(*rows(2, 3, 2, 32)), lambda: batch.attend(q), lambda: batch.shared_prefixes(4, True),
        ):  # fmt: skip
            with pytest.raises(InvalidArgument, match=message):
                use()
        assert everything(cache) == before

    def test_room_that_was_taken_back_is_given_out_once(self):
        """extend with ids, truncate, write: the page that was to be written is free, and another's next."""
        cache = cache_of()
        a, b = cache.create(), cache.create()
        batch = cache.extend(a, 8, tokens=range(8))
        cache.truncate(a, 4)
        with pytest.raises(InvalidArgument, match="one made before sequence 0 was changed"):
            batch.write(*rows(2, 8, 2, 32))
        assert cache.prefix_match(range(8))[1] == 0
        put(cache, b, 4, tokens=range(50, 54))
        found, held = cache.prefix_match(range(50, 54))
        assert held == 4
        assert cache.keys(found).equal(cache.keys(b))
        assert len(set(cache.store.sequences.pool._stack[: cache.stats().free].tolist())) == cache.stats().free

    def test_others_may_change(self):
        cache = cache_of()
        a, b = cache.create(), cache.create()
        put(cache, a, 5)
        put(cache, b, 5, seed=1)
        batch, view = cache.extend(a, 2), cache.view(b)
        q = rows(1, 4, 1, 32)
        want = view.attend(q)
        other = cache.fork(b)
        put(cache, other, 3, seed=2)
        cache.truncate(other, 2)
        cache.free(other)
        cache.create()
        cache.truncate(b, 5)  # shortens nothing
        cache.extend([b], 0)
        batch.write(*rows(2, 2, 2, 32, seed=3))
        assert view.attend(q).equal(want)
        assert cache.keys(a)[:, 5:].equal(rows(2, 2, 2, 32, seed=3)[0].transpose(0, 1))

    def test_a_fork_does_not_share_a_handle(self):
        cache = cache_of()
        a = cache.create()
        put(cache, a, 5)
        b = cache.fork(a)
        batch = cache.extend(b, 1)
        put(cache, a, 1, seed=3)
        batch.write(*rows(2, 1, 2, 32, seed=4))
        assert cache.keys(a)[:, 5].equal(rows(2, 1, 2, 32, seed=3)[0][0])
        assert cache.keys(b)[:, 5].equal(rows(2, 1, 2, 32, seed=4)[0][0])
        batch = cache.extend(b, 1)
        cache.free(a)
        batch.write(*rows(2, 1, 2, 32, seed=5))
        assert cache.keys(b)[:, 6].equal(rows(2, 1, 2, 32, seed=5)[0][0])


class TestUnwrittenTokens:
    def test_they_are_neither_read_nor_shared(self, tmp_path):
        """Their slots hold whatever was there before: another sequence's keys."""
        cache = cache_of(layers=2)
        a = cache.create()
        batch = cache.extend(a, 5)
        batch.write(*rows(2, 5, 2, 32), layer=0)
        q = rows(1, 4, 1, 32)
        batch.attend(rows(5, 4, 32), layer=0)
        cache.attend(a, q, layer=0)
        for use in (
            lambda: batch.attend(rows(5, 4, 32), layer=1), lambda: cache.attend(a, q, layer=1),
            lambda: cache.view(a, 2).attend(rows(2, 4, 32), layer=1), lambda: cache.keys(a, 1),
            lambda: cache.fork(a), lambda: cache.save(tmp_path / "x"), lambda: cache.save_prefix(tmp_path / "x", a),
        ):  # fmt: skip
            with pytest.raises(InvalidArgument, match=r"got 0, whose last 5 tokens are not all written"):
                use()
        assert not list(tmp_path.iterdir())
        batch.write(*rows(2, 5, 2, 32, seed=1), layer=1)
        batch.attend(rows(5, 4, 32), layer=1)
        assert cache.keys(cache.fork(a), 1).equal(rows(2, 5, 2, 32, seed=1)[0].transpose(0, 1))

    def test_a_gap_stays_until_it_is_truncated(self):
        cache = cache_of()
        a = cache.create()
        put(cache, a, 3)
        cache.extend(a, 2)
        put(cache, a, 1, seed=1)
        with pytest.raises(
            InvalidArgument, match=r"whose last 3 tokens are not all written.* truncate the sequence to 3"
        ):
            cache.attend(a, rows(1, 4, 1, 32))
        cache.truncate(a, 3)
        cache.attend(a, rows(1, 4, 1, 32))


class TestWrongIds:
    WRONG = (
        True,
        False,
        np.True_,
        torch.tensor(True),
        [True],
        [0, True],
        np.array([True]),
        1.0,
        "1",
        None,
        [[1]],
        [1.5],
    )

    @pytest.mark.parametrize("wrong", WRONG, ids=repr)
    def test_ids_that_are_no_ints(self, wrong):
        cache = cache_of()
        for s in (cache.create(), cache.create()):
            put(cache, s, 3)
        before = everything(cache)
        k = rows(2, 1, 2, 32)
        for call in (
            cache.free, cache.extend, cache.view, lambda x: cache.append(x, *k),
            lambda x: cache.attend(x, rows(1, 4, 1, 32)),
        ):  # fmt: skip
            with pytest.raises(InvalidArgument, match=r"sequences: got .*, expected an id or a list of ids"):
                call(wrong)
        for call in (
            cache.fork, cache.length, cache.keys, lambda x: cache.truncate(x, 0), lambda x: cache.truncate(0, x),
            lambda x: cache.view(0).attend(rows(1, 4, 1, 32), layer=x), lambda x: cache.extend(0).write(*k, layer=x),
        ):  # fmt: skip
            with pytest.raises(InvalidArgument, match=r"expected (a live sequence|0 to 3|a layer)"):
                call(wrong)
            cache.truncate(0, 3)
        assert everything(cache) == before

    @pytest.mark.parametrize(
        "wrong", [True, [True, 1], [1, True], np.array([True, False]), 1.5, [[1], [1, 2]], 2**31, "a"]
    )
    def test_counts_that_are_no_ints(self, wrong):
        cache = cache_of()
        ids = [cache.create(), cache.create()]
        with pytest.raises(InvalidArgument, match="counts"):
            cache.extend(ids, wrong)
        with pytest.raises(InvalidArgument, match="counts"):
            KVCache(2, 1, 8, 8, "f32").append(*torch.zeros(2, 2, 1, 2, 8), counts=wrong)
        assert cache.length(0) == 0

    @pytest.mark.parametrize("wrong", [[True, 2], [[1], [1, 2]], np.array([2**63], np.uint64), "ab", [1.0]])
    def test_tokens_that_are_no_ints(self, wrong):
        cache = cache_of()
        with pytest.raises(InvalidArgument, match="tokens: got"):
            cache.prefix_match(wrong)

    def test_ints_of_numpy_and_torch_are_ints(self):
        cache = PagedKVCache(np.int64(20), np.int32(4), np.uint8(2), np.int16(32), "f32", layers=np.int64(1))
        cache.create()
        for one in (np.int64(0), np.uint8(0), torch.tensor(0), np.array([0]), torch.tensor([0]), (0,), [np.int32(0)]):
            put(cache, one, 2)
        assert cache.length(np.int64(0)) == 14
        cache.truncate(torch.tensor(0), np.int64(3))
        assert cache.keys(np.uint8(0), np.int64(0)).shape[1] == 3
        assert cache.length(cache.fork(np.int32(0))) == 3
        cache.extend(np.array([0, 1]), torch.tensor([1, 2]))
        cache.free(torch.tensor([0, 1]))
        rows_ = KVCache(np.int64(1), 1, np.int32(8), 8, "f32")
        rows_.append(*torch.zeros(2, 1, 1, 3, 8), counts=np.int64(3))
        rows_.truncate(np.int64(0), np.int64(1))
        rows_.reset(torch.tensor(0))
        assert rows_.lengths.tolist() == [0]


class TestFailingWriters:
    """Whatever raises inside `append` and `extend`, the cache is as before."""

    def fail(self, *_):
        raise RuntimeError("no kernel")

    @pytest.mark.parametrize("tokens", [None, [21, 22, 23, 24, 25, 26]])
    def test_append(self, tokens):
        cache = cache_of(pages=12)
        a = cache.create()
        put(cache, a, 6, tokens=range(6))
        b, c = cache.fork(a), cache.create()
        put(cache, c, 2, seed=1)
        before, kept = everything(cache), cache.store.writer(0)
        k, v = rows(2, 6, 2, 32, seed=2)

        def partly(k, v, places):
            kept(k, v, places)
            self.fail()

        for broken in (self.fail, partly):
            cache.store.writers[0] = broken
            with pytest.raises(RuntimeError, match="no kernel"):
                cache.append([a, b, c], k, v, tokens=tokens)
            assert everything(cache)[:8] == before[:8]
            assert [cache.keys(s).shape[1] for s in (a, b, c)] == [6, 6, 2]
            assert cache.keys(a).equal(rows(2, 6, 2, 32)[0].transpose(0, 1))
        cache.store.writers[0] = kept
        cache.append([a, b, c], k, v, tokens=tokens)
        for i, s in enumerate((a, b, c)):
            assert cache.keys(s)[:, -2:].equal(k[2 * i : 2 * i + 2].transpose(0, 1))
        assert cache.keys(a)[:, :6].equal(rows(2, 6, 2, 32)[0].transpose(0, 1))
        assert cache.prefix_match([*range(6), 21, 22])[1] == (8 if tokens else 4)

    def test_while_others_change_the_cache(self):
        """The page that was shared has gone meanwhile: then the copy stays."""
        cache = cache_of(pages=4)
        a = cache.create()
        put(cache, a, 6)
        b = cache.fork(a)

        def meanwhile(*_):
            cache.free(b)
            put_writer, cache.store.writers[0] = cache.store.writers[0], kept
            put(cache, cache.create(), 4, seed=5)
            cache.store.writers[0] = put_writer
            self.fail()

        kept, cache.store.writers[0] = cache.store.writer(0), meanwhile
        with pytest.raises(RuntimeError, match="no kernel"):
            put(cache, a, 3, seed=4)
        assert cache.keys(a).equal(rows(2, 6, 2, 32)[0].transpose(0, 1))
        assert (cache.stats().used, cache.stats().shared) == (3, 0)
        assert sorted(np.flatnonzero(cache.store.sequences.pool.refs)) != []
        cache.free([a, 2])
        assert cache.stats().free == 4

    @pytest.mark.parametrize("where", ["sent", "of"])
    def test_extend(self, where, monkeypatch):
        cache = cache_of()
        a = cache.create()
        put(cache, a, 6, tokens=range(6))
        b = cache.fork(a)
        before = everything(cache)
        kept, failed = getattr(cache.store.sequences.table, where), []

        def once(*arguments):
            failed.append(1)
            return self.fail() if len(failed) == 1 else kept(*arguments)

        monkeypatch.setattr(cache.store.sequences.table, where, once)
        with pytest.raises(RuntimeError, match="no kernel"):
            cache.extend([a, b], 5, tokens=range(10))
        monkeypatch.undo()
        assert everything(cache)[:8] == before[:8]

    def test_write_may_be_tried_again(self):
        cache = cache_of()
        a = cache.create()
        batch, kept = cache.extend(a, 3), cache.store.writer(0)
        cache.store.writers[0] = self.fail
        with pytest.raises(RuntimeError, match="no kernel"):
            batch.write(*rows(2, 3, 2, 32))
        cache.store.writers[0] = kept
        batch.write(*rows(2, 3, 2, 32))
        assert cache.keys(a).equal(rows(2, 3, 2, 32)[0].transpose(0, 1))

    def test_rows(self, monkeypatch):
        cache = KVCache(2, 1, 8, 8, "f32")
        cache.append(*torch.ones(2, 2, 1, 3, 8))
        monkeypatch.setattr(cache.store, "write", self.fail)
        with pytest.raises(RuntimeError, match="no kernel"):
            cache.append(*torch.zeros(2, 2, 1, 3, 8))
        assert cache.lengths.tolist() == [3, 3]
        assert cache.keys(0).equal(torch.ones(1, 3, 8))


def test_positions_do_not_wrap():
    ring = KVCache(1, 1, 4, 8, "f32", ring=True)
    ring.store.set(np.array([2**31 - 3]), np.array([2**31 - 7]))
    with pytest.raises(CacheFull, match="positions end at 2147483647"):
        ring.append(*torch.zeros(2, 1, 1, 4, 8))
    ring.append(*torch.zeros(2, 1, 1, 2, 8))
    assert ring.lengths.tolist() == [2**31 - 1]


def test_a_view_outlives_an_append_that_failed():
    cache = cache_of()
    a = cache.create()
    put(cache, a, 5)
    b = cache.fork(a)
    view, q = cache.view([a, b]), rows(2, 4, 1, 32)
    want = view.attend(q)
    kept, cache.store.writers[0] = cache.store.writer(0), TestFailingWriters().fail
    with pytest.raises(RuntimeError, match="no kernel"):
        put(cache, a, 3, seed=1)
    assert view.attend(q).equal(want)
    cache.store.writers[0] = kept
    put(cache, a, 3, seed=1)
    with pytest.raises(InvalidArgument, match="one made before sequence 0 was changed"):
        view.attend(q)
