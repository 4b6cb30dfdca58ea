"""Who has which page, and which prefixes are found, after evictions, failed steps and steps of several layers.

Each is a case in which a wrong line would give one prompt the keys of another, or take a page twice.
"""

import numpy as np
import pytest
import torch

from naive import Row, assert_close
from tilewise import InvalidArgument, PagedKVCache

D = 8
FIRST, SECOND, THIRD = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]  # pages of ids


def cache_of(pages=40, layers=1, **options):
    return PagedKVCache(pages, 4, 1, D, layers=layers, **options)


def rows(count, seed):
    """Keys and values of packed tokens."""
    return 2 * torch.randn(2, count, 1, D, generator=torch.Generator().manual_seed(seed))


def put(cache, sequence, ids, seed=0):
    cache.append(sequence, *rows(len(ids), seed), tokens=ids)


def evict(cache):
    """Takes all pages that are not used, and gives them back: no prefix of freed sequences is kept."""
    stats = cache.stats()
    other = cache.create()
    cache.extend(other, 4 * (stats.free + stats.kept))
    cache.free(other)
    assert cache.stats().kept == 0


def found(cache, ids):
    """How many of these tokens `prefix_match` finds."""
    sequence, matched = cache.prefix_match(ids)
    cache.free(sequence)
    return matched


def books(cache):
    """Every number that says who has which page."""
    s = cache.store.sequences
    slots = s.slot_of.values()
    return [
        [x.tolist() for x in (s.length, s.known, s.depth, s.node, s.written, s.pool.refs)],
        [s.pages(slot).tolist() for slot in slots],
        cache.stats(),
    ]


def two_that_know_one_page(cache):
    """Sequences of equal ids, each with a page of its own; only the page of the first is in the index."""
    a, b = cache.create(), cache.create()
    put(cache, a, FIRST)
    put(cache, b, FIRST)
    return a, b


def test_nothing_follows_a_prefix_that_was_evicted():
    cache = cache_of()
    a, b = two_that_know_one_page(cache)
    cache.free(a)
    evict(cache)
    put(cache, b, SECOND)
    assert found(cache, SECOND) == 0  # it is b's second page, not the first of any prompt
    assert found(cache, FIRST + SECOND) == 0


def test_nothing_follows_an_evicted_prefix_after_truncation():
    cache = cache_of()
    a, b = two_that_know_one_page(cache)
    put(cache, a, SECOND, 1)
    put(cache, b, SECOND, 1)
    cache.free(a)
    evict(cache)
    cache.truncate(b, 4)
    put(cache, b, THIRD)
    assert found(cache, THIRD) == 0


def test_what_follows_a_truncated_page_is_found_there():
    cache = cache_of()
    a = cache.create()
    put(cache, a, FIRST + SECOND)
    cache.truncate(a, 4)
    put(cache, a, THIRD, 1)
    assert found(cache, FIRST + THIRD) == 8
    assert found(cache, FIRST + SECOND) == 8
    assert found(cache, FIRST + SECOND + THIRD) == 8


def test_a_page_is_evicted_after_the_one_that_followed_it():
    cache = cache_of(pages=3)
    a = cache.create()
    put(cache, a, FIRST + SECOND)
    cache.truncate(a, 6)
    put(cache, a, [90, 91], 1)  # in place: what was its second page is forgotten
    cache.free(a)
    evict(cache)
    assert found(cache, FIRST + SECOND) == 0
    put(cache, cache.create(), FIRST + SECOND + THIRD)
    assert found(cache, FIRST + SECOND + THIRD) == 12


def test_a_fork_knows_what_its_source_knew():
    cache = cache_of()
    a = cache.create()
    put(cache, a, FIRST)
    b = cache.fork(a)
    put(cache, b, SECOND, 1)
    assert found(cache, FIRST + SECOND) == 8
    assert found(cache, SECOND) == 0


@pytest.mark.parametrize("layers", [1, 2])
def test_ids_of_a_copied_page_are_known(layers):
    cache = cache_of(layers=layers)
    a = cache.create()
    batch = cache.extend(a, 2, FIRST[:2])
    for layer in range(layers):
        batch.write(*rows(2, layer), layer)
    b = cache.fork(a)
    batch = cache.extend(b, 2, FIRST[2:])  # into a copy of the page
    for layer in range(layers):
        batch.write(*rows(2, layer + 5), layer)
        assert cache.keys(b, layer)[:, :2].equal(cache.keys(a, layer))
    assert found(cache, FIRST) == 4


def fails(cache, layer):
    """The kernel that writes a layer fails, once it has written."""
    kept = cache.store.writer(layer)

    def partly(*arguments):
        kept(*arguments)
        raise RuntimeError("no kernel")

    cache.store.writers[layer] = partly


@pytest.mark.parametrize("forks", [0, 1, 4])
@pytest.mark.parametrize("told", [True, False])
def test_a_failed_append_is_undone(forks, told):
    """Also of several forks of one sequence: each had copied the same page."""
    cache = cache_of()
    a = cache.create()
    put(cache, a, FIRST[:3])
    cache.append(cache.create(), *rows(3, 1))
    sequences = [a, *(cache.fork(a) for _ in range(forks))]
    held, before = cache.keys(a), books(cache)
    fails(cache, 0)
    count = 2 * len(sequences)
    with pytest.raises(RuntimeError, match="no kernel"):
        cache.append(sequences, *rows(count, 2), tokens=list(range(20, 20 + count)) if told else None)
    assert books(cache) == before
    assert all(cache.keys(s).equal(held) for s in sequences)
    del cache.store.writers[0]
    put(cache, a, FIRST[3:], 3)
    assert found(cache, FIRST) == 4
    q = 2 * torch.randn(1, 2, 1, D)
    assert_close(cache.attend([a], q)[0], Row.held_by(cache, a).attend(q[0], causal=True)[0])
    cache.free(list(cache.store.sequences.slot_of))
    assert cache.stats().used == 0
    assert cache.stats().free + cache.stats().kept == 40


def test_a_page_whose_second_layer_was_never_written_is_not_found():
    """A later batch that writes both layers does not make it whole."""
    cache = cache_of(layers=2)
    a = cache.create()
    cache.extend(a, 4, FIRST).write(*rows(4, 0), layer=0)
    assert found(cache, FIRST) == 0
    batch = cache.extend(a, 4, SECOND)
    for layer in (1, 0):
        batch.write(*rows(4, layer), layer)
        assert found(cache, FIRST) == 0
    assert found(cache, FIRST + SECOND) == 0
    with pytest.raises(InvalidArgument, match="not all written"):
        cache.fork(a)
    assert cache.keys(a, layer=0).shape[1] == 8
    with pytest.raises(InvalidArgument, match="whose last 8 tokens are not all written in layer 1"):
        cache.keys(a, layer=1)


def test_tokens_that_follow_truncated_ones_are_not_written():
    cache = cache_of()
    a = cache.create()
    put(cache, a, FIRST + SECOND)
    cache.truncate(a, 4)
    cache.extend(a, 4)
    with pytest.raises(InvalidArgument, match="whose last 4 tokens are not all written"):
        cache.keys(a)


def test_tokens_of_an_undone_batch_are_not_written():
    cache = cache_of(layers=2)
    a = cache.create()
    batch = cache.extend(a, 4)
    batch.write(*rows(4, 0), layer=0)
    batch.undo()
    cache.extend(a, 4)
    for layer in (0, 1):
        with pytest.raises(InvalidArgument, match="whose last 4 tokens are not all written"):
            cache.keys(a, layer=layer)


def judged(cache, sequences, count, layer=0, **options):
    """`attend` of the last tokens of sequences, beside what the cache holds of each."""
    q = 2 * torch.randn(len(sequences), 2, count, D)
    out = cache.attend(sequences, q, layer=layer, **options)
    for b, s in enumerate(sequences):
        row = Row(cache.k_format.name)
        row.append(cache.keys(s, layer), cache.values(s, layer))
        assert_close(out[b], row.attend(q[b], causal=True)[0])


@pytest.mark.parametrize("what", ["append", "static", "truncate", "undo", "fork", "import"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_step_after_another_sees_what_is_there(what, count):
    """`attend` reuses the batch of the last `append`, unless anything has happened since."""
    cache = cache_of()
    a, b = cache.create(), cache.create()
    put(cache, a, FIRST)
    put(cache, b, SECOND + THIRD[:2])
    cache.append([a, b], *rows(2 * count, 1))
    judged(cache, [a, b], count)
    if what == "append":
        cache.append(b, *rows(3, 2))
    elif what == "static":
        static = cache.static_batch(3, 40, count)
        static.extend([a, b], count)
        k, v = torch.full((2, 3 * count, 1, D), torch.nan)
        k[: 2 * count], v[: 2 * count] = rows(2 * count, 3)
        static.write(k, v)
    elif what == "truncate":
        cache.truncate(a, 3)
    elif what == "undo":
        cache.extend([a, b], count).undo()
    elif what == "fork":
        put(cache, cache.fork(a), SECOND)
    else:
        cache.import_(cache.export(b))
    judged(cache, [a, b], count)
    cache.free(b)
    with pytest.raises(InvalidArgument, match="freed"):
        cache.attend([a, b], torch.zeros(2, 2, count, D))


def test_cascades_after_a_prefix_was_shortened():
    """Which pages sequences share is remembered from step to step."""
    cache = cache_of()
    a = cache.create()
    put(cache, a, FIRST + SECOND)
    sequences = [a, cache.fork(a), cache.fork(a)]
    for s in sequences:
        put(cache, s, [s], s)
    judged(cache, sequences, 1, cascade=True)
    for s in sequences:
        cache.truncate(s, 4)
        put(cache, s, [*THIRD, s], 10 + s)
    judged(cache, sequences, 1, cascade=True)


@pytest.mark.parametrize("kind", ["f32", "int8"])
def test_copies_of_shared_pages_are_of_all_layers(kind):
    cache = cache_of(layers=3, dtype=kind)
    a = cache.create()
    batch = cache.extend(a, 6)
    for layer in range(3):
        batch.write(*rows(6, layer), layer)
    b = cache.fork(a)
    batch = cache.extend(b, 1)
    for layer in range(3):
        batch.write(*rows(1, layer), layer)
        assert cache.keys(b, layer)[:, :6].equal(cache.keys(a, layer))
        assert cache.values(b, layer)[:, :6].equal(cache.values(a, layer))
        judged(cache, [a, b], 1, layer)


def test_a_static_step_writes_nothing_for_rows_without_a_sequence():
    """Rows past the sequences, and rows past the tokens of each: in every layer, and every table."""
    cache = cache_of(layers=2)
    ids = [cache.create() for _ in range(3)]
    batch = cache.extend(ids, 3)
    for layer in range(2):
        batch.write(*rows(9, layer), layer)
    static = cache.static_batch(4, 40, 2)
    for numbers, counts in ((ids, [2, 0, 1]), (ids[:2], [1, 2]), (ids[1:], [0, 0]), (ids[2:], [2])):
        static.extend(numbers, counts)
        total = sum(counts)
        assert static.cu_seqlens.tolist() == np.pad(np.cumsum([0, *counts]), (0, 4 - len(counts)), "edge").tolist()
        assert static.context_lens.tolist() == [cache.length(n) for n in numbers] + [0] * (4 - len(numbers))
        before = [[cache.keys(n, layer) for n in ids] for layer in range(2)]
        for layer in range(2):
            k, v = torch.full((2, 8, 1, D), torch.nan)
            k[:total], v[:total] = rows(total, 20 + layer)
            static.write(k, v, layer)
            assert torch.isfinite(static.attend(torch.ones(8, 2, D), layer)[:total]).all()
            assert torch.cat([cache.keys(n, layer)[:, -c:] for n, c in zip(numbers, counts, strict=True) if c] or
                             [k[:0].transpose(0, 1)], 1).transpose(0, 1).equal(k[:total])  # fmt: skip
            for n, old in zip(ids, before[layer], strict=True):
                new = dict(zip(numbers, counts, strict=True)).get(n, 0)
                assert cache.keys(n, layer)[:, : cache.length(n) - new].equal(old[:, : cache.length(n) - new])
