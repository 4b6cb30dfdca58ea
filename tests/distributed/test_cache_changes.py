"""Changes of a sharded cache: ranks agree on each, and one that any of them refuses has changed nothing on all."""

import random

import pytest
import torch
from torch import distributed as dist

from ranks import Pool
from tilewise import CacheFull, InvalidArgument, PagedKVCache, distributed
from tilewise.distributed.cache import tokens_on_rank

TIMEOUT = 60  # seconds that a rank waits for another: only where a test fails
HKV, D = 2, 8


@pytest.fixture(scope="module")
def two():
    with Pool(2, timeout=TIMEOUT) as ranks:
        yield ranks


def new(count, batch=1, width=D, dtype=torch.float32):
    return torch.randn(batch, HKV, count, width, dtype=dtype)


def made(pages=8, layers=1, **options):
    return distributed.ShardedKVCache(dist.group.WORLD, pages, 2, HKV, D, "f32", layers=layers, **options)


def error_of(call):
    try:
        call()
    except (InvalidArgument, CacheFull) as error:
        return type(error).__name__, getattr(error, "argument", "")
    return "fine", ""


def _refused(only):
    """The errors of wrong changes, on all ranks or on the last alone, and what each has changed."""
    torch.manual_seed(0)
    wrong = only is None or dist.get_rank() == only
    cache, deep = made(), made(layers=2)
    a, b = cache.create(), cache.create()
    cache.append([a, b], new(3, 2), new(3, 2))
    room = deep.extend([deep.create()], 3)
    room.write(new(3), new(3))
    x, wide, double = new(1), new(1, width=D + 1), new(1, dtype=torch.float64)
    calls = {
        "k": [
            lambda: cache.append(a, wide if wrong else x, x),
            lambda: cache.append(a, double if wrong else x, x),
            lambda: room.write(new(2 if wrong else 3), new(3), 1),
        ],
        "v": [
            lambda: cache.append(a, x, None if wrong else x),
            lambda: room.write(new(3), wide if wrong else new(3), 1),
        ],
        "sequences": [lambda: cache.append([b, b] if wrong else [a, b], new(1, 2), new(1, 2))],
        "sequence": [
            lambda: cache.free(iter([a, 9 if wrong else b])),
            lambda: cache.fork(9 if wrong else a),
            lambda: cache.extend([a, 9 if wrong else b], 1),
        ],
        "count": [lambda: cache.extend([a], -1 if wrong else 1)],
        "length": [lambda: cache.truncate(a, 4 if wrong else 2)],
        "layers": [lambda: deep.append([0], x, x)],
        "sequences[0]": [lambda: deep.fork(0), lambda: deep.attend([0], new(1), layer=1)],  # a layer was not written
        "layer": [lambda: room.write(new(3), new(3), 7 if wrong else 1)],
    }
    found = []
    for name, these in calls.items():
        for call in these:
            before = [(dict(c.lengths), c.cache.stats()) for c in (cache, deep)]
            kind, argument = error_of(call)
            same = before == [(dict(c.lengths), c.cache.stats()) for c in (cache, deep)]
            found.append((name, kind == "InvalidArgument", argument, same))
    room.write(new(3), new(3), 1)
    after = [error_of(call)[0] for call in (lambda: cache.append(a, x, x), lambda: deep.attend([0], new(1), layer=1))]
    return found, after, cache.create() == cache.fork(a) - 1


@pytest.mark.parametrize("only", [None, 0, 1])
def test_a_refused_change_has_changed_nothing_on_any_rank(two, only):
    for found, after, ids in two(_refused, only):
        assert all(refused and same for _, refused, _, same in found), found
        assert {argument for name, _, argument, _ in found if name == argument} >= {
            "k",
            "v",
            "count",
            "length",
            "layer",
        }
        assert after == ["fine", "fine"]
        assert ids


def _full():
    """Rank 0 gets three of five tokens and has room for two, in extend and in append; then a prompt that fits."""
    cache = distributed.ShardedKVCache(dist.group.WORLD, 2, 1, HKV, D, "f32")
    a = cache.create()
    said = [error_of(call)[0] for call in (lambda: cache.extend(a, 5), lambda: cache.append(a, new(5), new(5)))]
    empty = cache.length(a), cache.cache.length(a), cache.cache.stats().used
    cache.append(iter([a]), new(3), new(3))
    lengths = cache.length(a), cache.cache.length(a)
    cache.free(iter([a]))
    return said, empty, lengths, dict(cache.lengths), cache.cache.stats().used


def test_a_full_rank_is_full_on_all(two):
    for rank, answer in enumerate(two(_full)):
        assert answer == (["CacheFull"] * 2, (0, 0, 0), (3, tokens_on_rank(3, rank, 2, 1)), {}, 0)


def _machine(seed):
    """Random changes, a third of them wrong on some rank, beside one cache that gets those that were made."""
    draw, rank = random.Random(seed), dist.get_rank()
    torch.manual_seed(seed)
    many = made(6, interleave=draw.choice([1, 3]))
    one = PagedKVCache(64, 2, HKV, D, "f32")
    ids, seen = {}, set()
    for _ in range(40):
        wrong = draw.choice([None, None, 0, 1]) == rank
        sequences = draw.sample(sorted(ids), min(len(ids), draw.randint(1, 2)))
        count, change = draw.randint(0, 4), draw.choice(["create", "append", "append", "append", "free", "fork", "cut"])
        k, v = new(count, len(sequences)), new(count, len(sequences))
        at = draw.randint(0, 6)
        bad = draw.choice([k.double(), k[..., 1:], k[:, 1:], None])
        result = []
        if change == "create":
            kind, _ = error_of(lambda: result.append(many.create()))  # noqa: B023
        elif not sequences:
            continue
        elif change == "append":
            kind, _ = error_of(lambda: many.append(iter(sequences), bad if wrong else k, v))  # noqa: B023
        elif change == "free":
            kind, _ = error_of(lambda: many.free(iter([99, *sequences] if wrong else sequences)))  # noqa: B023
        elif change == "fork":
            kind, _ = error_of(lambda: result.append(many.fork(99 if wrong else sequences[0])))  # noqa: B023
        else:
            at = min(at, one.length(ids[sequences[0]]))
            kind, _ = error_of(lambda: many.truncate(sequences[0], -1 if wrong else at))  # noqa: B023
        seen.add((change, kind))
        if kind == "fine":
            if change == "create":
                ids[result[0]] = one.create()
            elif change == "append":
                one.append([ids[s] for s in sequences], k, v)
            elif change == "fork":
                ids[result[0]] = one.fork(ids[sequences[0]])
            elif change == "free":
                one.free([ids.pop(s) for s in sequences])
            else:
                one.truncate(ids[sequences[0]], at)
        assert many.lengths == {s: one.length(other) for s, other in ids.items()}
        for s, n in many.lengths.items():
            assert many.cache.length(s) == tokens_on_rank(n, rank, 2, many.interleave)
        held = [s for s, n in many.lengths.items() if n]
        if held:
            q = 3 * torch.randn(len(held), 4, 1, D)
            got = many.attend(held, q, gather=False, backend="torch")
            want = one.attend([ids[s] for s in held], q, backend="torch")
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    return seen


def test_random_changes(two):
    seen = set()
    for seed in range(6):
        here, there = two(_machine, seed)
        assert here == there  # refused on both or on none
        seen |= here
    assert {kind for change, kind in seen if change == "append"} == {"fine", "InvalidArgument", "CacheFull"}
    assert seen >= {(change, kind) for change in ("free", "fork", "cut") for kind in ("fine", "InvalidArgument")}
