"""Trees over caches in which sequences have different numbers of queries: each tree covers its sequence's last keys."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tilewise import AttentionState, InvalidArgument, KVCache, PagedKVCache, alibi_slopes, attention

D, HEADS, HKV, LQ = 16, 4, 2, 4
BEFORE, COUNTS = [10, 7, 3, 0], [4, 2, 1, 3]
B, LONGEST = len(COUNTS), 14


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


KEYS, VALUES = (normal(B, HKV, LONGEST, D, seed=seed) for seed in (0, 1))
TREE = (normal(B, LQ, LQ, seed=2) > 0) | torch.eye(LQ, dtype=torch.bool)
POSITIONS = torch.tensor(BEFORE)[:, None] + torch.tensor([0, 1, 1, 2])
Q = normal(B, HEADS, LQ, D, seed=3) * 3
for b, n in enumerate(COUNTS):
    Q[b, :, n:] = torch.nan  # no queries


def new_tokens(x):
    """`[B, Hkv, LQ, D]`: the rows that each sequence gets, after those that it has."""
    return torch.stack([torch.nn.functional.pad(x[b], (0, 0, 0, LQ))[:, n : n + LQ] for b, n in enumerate(BEFORE)])


def over_rows(**options):
    cache = KVCache(B, HKV, 40, D, "f32")
    cache.append(KEYS, VALUES, BEFORE)
    cache.append(new_tokens(KEYS), new_tokens(VALUES), COUNTS)
    return cache.attend(Q, counts=COUNTS, **options)


def filled():
    cache = PagedKVCache(40, 4, HKV, D, "f32")
    ids = [cache.create() for _ in COUNTS]
    cache.append(ids, KEYS, VALUES, counts=BEFORE)
    return cache, ids


def over_pages(**options):
    cache, ids = filled()
    cache.append(ids, new_tokens(KEYS), new_tokens(VALUES), counts=COUNTS)
    return cache.attend(ids, Q, counts=COUNTS, **options)


def over_a_static_batch(**options):
    cache, ids = filled()
    batch = cache.static_batch(B, 40, LQ)
    batch.extend(ids, COUNTS)
    batch.write(new_tokens(KEYS), new_tokens(VALUES))
    return batch.attend(Q, **options)


def chosen(rows):
    """Key indices `[B, 1 or Hkv, LQ, n]` that differ from row to row."""
    own = [torch.stack([(normal(n + c, seed=i).argsort()[:3]) for i in range(rows * LQ)]).view(rows, LQ, 3)
           for n, c in zip(BEFORE, COUNTS, strict=True)]  # fmt: skip
    return torch.stack(own).int()


PER_ROW = {"positions", "q_bias", "key_indices"}  # options of which an own call of a sequence gets its part
OPTIONS = {
    "plain": {},
    "positions": {"positions": POSITIONS},
    "positions in a window": {"positions": POSITIONS, "window": 3, "alibi_slopes": alibi_slopes(HEADS)},
    "window": {"window": 4, "softcap": 3.0},
    "not causal": {"causal": False},
    "q_bias": {"q_bias": normal(B, HEADS, LQ, seed=5), "sinks": normal(HEADS, seed=6)},
    "broadcast q_bias": {"q_bias": normal(1, 1, LQ, seed=5)},
    "k_bias": {"k_bias": normal(B, HEADS, LONGEST, seed=7) * 2},
    "mask": {"mask": normal(HEADS, LQ, LONGEST, seed=8)},
    "key_indices": {"key_indices": chosen(1)[:, 0]},
    "key_indices of heads": {"key_indices": chosen(HKV)},
    "places": {"k_stride": 2, "k_start": 1},
}


def part(name, x, b):
    """An option for sequence `b` alone."""
    count, length = COUNTS[b], BEFORE[b] + COUNTS[b]
    if not isinstance(x, torch.Tensor) or name in ("sinks", "alibi_slopes"):
        return x
    if name == "mask":
        return x[..., :count, :length]
    x = x[b : b + 1] if len(x) == B else x
    if name == "k_bias":
        return x[..., :length]
    return x[..., :count, :] if name == "key_indices" else x[..., :count]


@pytest.mark.parametrize("call", [over_rows, over_pages, over_a_static_batch])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_tree_covers_its_own_keys(call, name):
    options = {"causal": True, **OPTIONS[name]}
    got = call(tree_mask=TREE, return_lse=True, **options)
    for b, n in enumerate(COUNTS):
        k, v = (x[b : b + 1, :, : BEFORE[b] + n] for x in (KEYS, VALUES))
        own = {name: part(name, x, b) for name, x in options.items()}
        want = attention(Q[b : b + 1, :, :n], k, v, tree_mask=TREE[b : b + 1, :n, :n], return_lse=True, **own)
        for mine, its in zip(got, want, strict=True):
            torch.testing.assert_close(mine[b : b + 1, :, :n], its, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("call", [over_rows, over_pages, over_a_static_batch])
def test_the_form_of_the_result(call):
    want = call(tree_mask=TREE)
    out = torch.full((B, HEADS, LQ, D), torch.nan)
    assert call(tree_mask=TREE, out=out) is out
    assert out.equal(want)
    state = call(tree_mask=TREE, return_lse=True, out=out)
    assert isinstance(state, AttentionState)
    assert state.out is out
    assert state.lse.shape == (B, HEADS, LQ)
    shared = call(tree_mask=TREE[:1])  # one tree for all
    assert shared[0].equal(want[0])
    with pytest.raises(InvalidArgument, match="tree_mask: got shape"):
        call(tree_mask=TREE[:, :3, :3])
    with pytest.raises(InvalidArgument, match="block_indices: got blocks of queries that not all sequences have"):
        call(tree_mask=TREE, block_indices=torch.zeros(B, 1, 1, dtype=torch.int32), block_size=8)
    with pytest.raises(InvalidArgument, match="q_bias: got shape"):
        call(tree_mask=TREE, q_bias=torch.zeros(B, HEADS, LQ + 1))


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_sequence_major_and_quantised(dtype):
    """As rows and as pages: the same numbers are stored, and rotated in the same way."""
    for rotate in (False, True):
        rows = KVCache(B, HKV, 40, D, dtype, rotate=rotate, group=32)
        rows.append(KEYS, VALUES, BEFORE)
        rows.append(new_tokens(KEYS), new_tokens(VALUES), COUNTS)
        got = rows.attend(Q.transpose(1, 2), counts=COUNTS, tree_mask=TREE, layout="blhd").transpose(1, 2)
        for b, n in enumerate(COUNTS):
            k, v = (read(b)[None] for read in (rows.keys, rows.values))
            want = attention(Q[b : b + 1, :, :n], k, v, tree_mask=TREE[b : b + 1, :n, :n], causal=True)
            torch.testing.assert_close(got[b : b + 1, :, :n], want, rtol=1e-4, atol=1e-4)


def test_a_trace_serves_other_counts():
    """Nothing of the counts is in a graph."""
    (cache, ids), (other, theirs) = filled(), filled()
    batch, expected = cache.static_batch(B, 40, LQ), other.static_batch(B, 40, LQ)
    batch.extend(ids, COUNTS), expected.extend(theirs, COUNTS)
    q = Q.nan_to_num()
    graph = make_fx(lambda q: batch.attend(q, tree_mask=TREE))(q)
    for counts in (COUNTS, [1, 4, 0, 2]):
        if counts is not COUNTS:
            batch.extend(ids, counts), expected.extend(theirs, counts)
        for x in (batch, expected):
            x.write(new_tokens(KEYS), new_tokens(VALUES))
        got, want = graph(q), expected.attend(q, tree_mask=TREE)
        for b, n in enumerate(counts):
            assert got[b, :, :n].equal(want[b, :, :n])
