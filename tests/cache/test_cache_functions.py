"""`score_mod` and `mask_mod` over caches: indices are positions and sequences, whatever the slots."""

import pytest
import torch

from tilewise import InvalidArgument, KVCache, PagedKVCache, attention

H, HKV, D = 4, 2, 16
random = torch.Generator().manual_seed(0)
SLOPE = torch.randn(3, H, generator=random)
DOC = (torch.arange(64) // 5) % 3
TABLE = torch.randn(128, generator=random)


def draw(*shape):
    return torch.randn(shape, generator=random) * 2


def score_mod(s, b, h, q, k):
    return s + SLOPE[b, h] * (q - k) / 8 + TABLE[q - k + 64]


def mask_mod(b, h, q, k):
    return (DOC[k] != b) | (q - k < 3)


FUNCTIONS = {"score_mod": score_mod, "mask_mod": mask_mod}
OPTIONS = [
    FUNCTIONS,
    {"mask_mod": mask_mod, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    FUNCTIONS | {"window": 7, "softcap": 5.0},
]


def want(b, q, keys, values, first=0, **options):
    """The queries `[H, n, D]` at the end of one sequence, by the oracle."""
    own = {
        name: (lambda s, _, *at, f=f: f(s, b, *at)) if name == "score_mod" else (lambda _, *at, f=f: f(b, *at))
        for name, f in options.items()
        if name in FUNCTIONS
    }
    offset = first + keys.shape[1] - q.shape[1]
    return attention(q[None], keys[None], values[None], causal=True, q_offset=offset, k_start=first,
                     backend="reference", **options | own)[0]  # fmt: skip


def check(out, b, q, cache, row, options, first=0):
    """Against what the cache says that it holds, as if nothing were cached."""
    expected = want(b, q, cache.keys(row), cache.values(row), first, **options)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("options", OPTIONS, ids=["both", "sinks", "window"])
@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_contiguous(options, stored):
    cache = KVCache(3, HKV, 48, D, stored)
    for counts in ([9, 4, 20], [1, 3, 2], [1, 1, 1]):
        new = max(counts)
        cache.append(draw(3, HKV, new, D), draw(3, HKV, new, D), counts=counts)
        q = draw(3, H, new, D)
        out = cache.attend(q, counts=counts, **options)
        for b, n in enumerate(counts):
            check(out[b, :, :n], b, q[b, :, :n], cache, b, options)


@pytest.mark.parametrize("options", OPTIONS[:2], ids=["both", "sinks"])
def test_ring(options):
    cache = KVCache(3, HKV, 12, D, ring=True)
    lengths = [0, 0, 0]
    for counts in ([9, 4, 11], [2, 1, 2], [1, 1, 1], [5, 6, 5], [1, 1, 1]):
        new = max(counts)
        cache.append(draw(3, HKV, new, D), draw(3, HKV, new, D), counts=counts)
        lengths = [n + m for n, m in zip(lengths, counts, strict=True)]
        q = draw(3, H, 1, D)
        out = cache.attend(q, **options)
        for b, n in enumerate(lengths):
            check(out[b], b, q[b], cache, b, options, first=max(0, n - 12))


def test_ring_with_a_window_and_several_queries():
    cache = KVCache(3, HKV, 12, D, ring=True)
    for start in range(0, 30, 3):
        cache.append(draw(3, HKV, 3, D), draw(3, HKV, 3, D))
        q, options = draw(3, H, 3, D), FUNCTIONS | {"window": 10}
        out = cache.attend(q, **options)
        for b in range(3):
            check(out[b], b, q[b], cache, b, options, first=max(0, start + 3 - 12))


@pytest.mark.parametrize("options", OPTIONS, ids=["both", "sinks", "window"])
@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_paged(options, stored):
    cache = PagedKVCache(24, 4, HKV, D, stored)
    first = cache.create()
    cache.append([first], draw(1, HKV, 8, D), draw(1, HKV, 8, D))
    ids = [first, cache.fork(first), cache.create()]  # two share pages
    for counts in ([3, 5, 6], [2, 2, 2], [1, 1, 1]):
        total = sum(counts)
        batch = cache.extend(ids, counts)
        batch.write(draw(total, HKV, D), draw(total, HKV, D))
        q = draw(total, H, D)
        out = batch.attend(q, **options)
        at = 0
        for b, n in enumerate(counts):
            rows = slice(at, at + n)
            check(out[rows].transpose(0, 1), b, q[rows].transpose(0, 1), cache, ids[b], options)
            at += n
    q = draw(3, H, 2, D)
    out = cache.attend(ids, q, **options)
    for b in range(3):
        check(out[b], b, q[b], cache, ids[b], options)


def test_latent():
    cache = PagedKVCache(16, 4, 1, D, latent=12)
    ids = [cache.create(), cache.create()]
    cache.append(ids, draw(2, 1, 9, D))
    q = draw(2, H, 3, D)
    out = cache.attend(ids, q, **FUNCTIONS)
    for b in range(2):
        check(out[b], b, q[b], cache, ids[b], FUNCTIONS)


def test_static_batch():
    cache = PagedKVCache(24, 4, HKV, D)
    ids = [cache.create(), cache.create()]
    cache.append(ids, draw(2, HKV, 7, D), draw(2, HKV, 7, D))
    batch = cache.static_batch(3, 20, count=2)
    for counts in ([2, 2], [1, 2]):
        batch.extend(ids, counts)
        k, v, q = draw(3, HKV, 2, D), draw(3, HKV, 2, D), draw(3, H, 2, D)
        batch.write(k, v)
        out = batch.attend(q, **FUNCTIONS)
        for b, n in enumerate(counts):
            check(out[b, :, :n], b, q[b, :, :n], cache, ids[b], FUNCTIONS)


def test_trees_of_uneven_counts():
    cache = KVCache(2, HKV, 32, D)
    cache.append(draw(2, HKV, 6, D), draw(2, HKV, 6, D))
    counts = [4, 2]
    cache.append(draw(2, HKV, 4, D), draw(2, HKV, 4, D), counts=counts)
    q = draw(2, H, 4, D)
    tree = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    out = cache.attend(q, counts=counts, tree_mask=tree, **FUNCTIONS)
    for b, n in enumerate(counts):
        check(out[b, :, :n], b, q[b, :, :n], cache, b, FUNCTIONS)


def test_a_cascade_is_never_one_with_functions():
    cache = PagedKVCache(24, 4, HKV, D)
    first = cache.create()
    cache.append([first], draw(1, HKV, 12, D), draw(1, HKV, 12, D))
    ids = [first, cache.fork(first)]
    cache.append(ids, draw(2, HKV, 1, D), draw(2, HKV, 1, D))
    q = draw(2, H, 1, D)
    for name, function in FUNCTIONS.items():
        with pytest.raises(InvalidArgument, match=f"True with {name}"):
            cache.attend(ids, q, cascade=True, **{name: function})
        out = cache.attend(ids, q, **{name: function})
        for b in range(2):
            check(out[b], b, q[b], cache, ids[b], {name: function})
