"""`key_indices` and `block_indices`: what they mean, and what is refused."""

import pytest
import torch

import tilewise
from tilewise import (
    InvalidArgument,
    KVCache,
    PagedKVCache,
    Quantised,
    TileMap,
    attention,
    paged_attention,
    varlen_attention,
)

B, H, HKV, LQ, LK, D = 2, 4, 2, 7, 23, 16


def inputs():
    torch.manual_seed(0)
    return torch.randn(B, H, LQ, D) * 2, torch.randn(B, HKV, LK, D), torch.randn(B, HKV, LK, D)


def chosen(rows, keys, count, *outer):
    """Indices `[*outer, rows, count]`, each once, some -1."""
    order = torch.rand(*outer, rows, keys).argsort(-1)[..., :count]
    return torch.where(torch.rand(order.shape) < 0.2, -1, order).int()


def as_mask(indices, block=1):
    """The mask that indices `[B, Hkv, rows, n]` stand for, cell by cell: `[B, H, Lq, Lk]`."""
    mask = torch.zeros(B, H, LQ, LK, dtype=torch.bool)
    for b in range(B):
        for h in range(H):
            for i in range(LQ):
                for index in indices[b, h // (H // HKV), i // block].tolist():
                    if index >= 0:
                        mask[b, h, i, index * block : (index + 1) * block] = True
    return mask


@pytest.mark.parametrize("backend", ["reference", "torch", None])
@pytest.mark.parametrize("heads", [1, HKV])
@pytest.mark.parametrize("block", [1, 3, 40])
def test_they_are_a_mask(backend, heads, block):
    q, k, v = inputs()
    indices = chosen(-(-LQ // block), -(-LK // block), 5, B, heads)
    given = {"key_indices": indices} if block == 1 else {"block_indices": indices, "block_size": block}
    mask = as_mask(indices.expand(-1, HKV, -1, -1), block)
    for rules in ({}, {"causal": True}, {"window": (4, 2), "q_offset": 3, "sinks": torch.randn(H), "softcap": 4.0}):
        got = attention(q, k, v, return_lse=True, backend=backend, **given, **rules)
        want = attention(q, k, v, return_lse=True, backend="reference", mask=mask, **rules)
        torch.testing.assert_close(got.out, want.out, atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(got.lse, want.lse, atol=3e-6, rtol=1e-5)


def test_every_form_of_a_call():
    q, k, v = inputs()
    indices = chosen(LQ, LK, 6, B)
    want = attention(q, k, v, key_indices=indices, causal=True)
    seq = [x.transpose(1, 2) for x in (q, k, v)]
    got = attention(*seq, key_indices=indices, causal=True, layout="blhd")
    torch.testing.assert_close(got.transpose(1, 2), want, atol=3e-6, rtol=1e-5)
    got = attention(q, k, v, key_indices=indices.long()[:, None], causal=True)
    torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-5)
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (LQ, LK))
    for given in (indices.flatten(0, 1), indices.flatten(0, 1)[:, None].expand(-1, HKV, -1)):
        got = varlen_attention(*(x.flatten(0, 1) for x in seq), cu_q, cu_k, key_indices=given, causal=True)
        torch.testing.assert_close(got.unflatten(0, (B, LQ)).transpose(1, 2), want, atol=3e-6, rtol=1e-5)


def test_pages_go_by_positions():
    q, k, v = inputs()
    cache = PagedKVCache(num_pages=20, page_size=4, kv_heads=HKV, head_dim=D, dtype=torch.float32)
    numbers = [cache.create() for _ in range(B)]
    for _ in range(2):  # pages of both, interleaved
        for n, number in enumerate(numbers):
            have = cache.length(number)
            part = slice(have, have + 9 if have == 0 else LK)
            cache.append(number, k[n, :, part].transpose(0, 1), v[n, :, part].transpose(0, 1))
    indices = chosen(LQ, LK, 6, B)
    want = attention(q, k, v, key_indices=indices, causal=True)
    got = cache.attend(numbers, q, key_indices=indices)
    torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-5)
    blocks = chosen(-(-LQ // 4), -(-LK // 4), 3, B)
    want = attention(q, k, v, block_indices=blocks, block_size=4, causal=True)
    got = cache.attend(numbers, q, block_indices=blocks, block_size=4)
    torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-5)
    with pytest.raises(InvalidArgument, match=r"cascade.*key_indices"):
        cache.attend(numbers, q, key_indices=indices, cascade=True)


def test_contiguous_caches():
    q, k, v = inputs()
    indices = chosen(LQ, LK, 6, B)
    cache = KVCache(B, HKV, 32, D, torch.float32)
    cache.append(k, v)
    want = attention(q, k, v, key_indices=indices, causal=True)
    torch.testing.assert_close(cache.attend(q, key_indices=indices), want, atol=3e-6, rtol=1e-5)
    with pytest.raises(InvalidArgument, match="twice"):  # a cache vouches for its lengths, not for these
        cache.attend(q, key_indices=indices.clamp(2, 3))
    ring = KVCache(B, HKV, 32, D, torch.float32, ring=True)
    ring.append(k, v)
    with pytest.raises(InvalidArgument, match="key_indices over a ring"):
        ring.attend(q, key_indices=indices)


def test_unchosen_keys_are_never_read():
    """NaN in them reaches neither a result nor a gradient."""
    q, k, v = inputs()
    indices = chosen(LQ, LK - 3, 6, B)
    spoilt = [x.clone() for x in (k, v)]
    for x in spoilt:
        x[:, :, LK - 3 :] = float("nan")
    results = []
    for keys, values in ((k, v), spoilt):
        leaves = [x.clone().requires_grad_() for x in (q, keys, values)]
        out, lse = attention(*leaves, key_indices=indices, causal=True, return_lse=True)
        results.append([out, lse, *torch.autograd.grad(out.square().sum() + lse[lse.isfinite()].sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert not results[0][3][:, :, LK - 3 :].any()


def test_no_index_at_all():
    q, k, v = inputs()
    sinks = torch.randn(H)
    for count, value in ((0, 0), (3, -1)):
        nothing = torch.full((B, LQ, count), value, dtype=torch.int32)
        out, lse = attention(q, k, v, key_indices=nothing, sinks=sinks, return_lse=True)
        assert not out.any()
        assert torch.equal(lse, sinks[:, None].expand(B, H, LQ))


def test_the_plan_counts_what_is_chosen():
    q, k, v = inputs()
    plan = tilewise.plan(q, k, v, key_indices=torch.tensor([3, 5, -1]).int().expand(B, LQ, 3), causal=True)
    assert plan.cost.cells == B * H * LQ * 2
    assert "3 key indices" in str(plan)
    blocks = torch.tensor([[0], [1]]).int().expand(B, 2, 1)
    plan = tilewise.plan(q, k, v, block_indices=blocks, block_size=4)
    assert plan.cost.cells == B * H * LQ * 4
    assert "1 block indices of 4" in str(plan)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key_indices": torch.zeros(B, LQ, 2).int()}, "key_indices: got 0 twice"),
        ({"key_indices": torch.full((B, LQ, 1), LK).int()}, f"got an index of {LK}.*to {LK - 1}: there are {LK} keys"),
        ({"key_indices": torch.full((B, LQ, 1), -2).int()}, "got an index of -2 or less, expected -1"),
        ({"key_indices": torch.full((B, LQ, 1), -(2**40))}, "got an index of -2 or less, expected -1"),
        ({"key_indices": torch.full((B, LQ, 1), 2**40)}, f"got an index of {2**29} or more, expected -1"),
        (
            {"key_indices": torch.zeros(B, LQ + 1, 1).int()},
            r"shape \(2, 8, 1\), expected \(2, 7, n\) or \(2, 2, 7, n\)",
        ),
        ({"key_indices": torch.zeros(B, 3, LQ, 1).int()}, r"shape \(2, 3, 7, 1\)"),
        ({"key_indices": torch.zeros(B, LQ, 1)}, "key_indices: got torch.float32, expected int32"),
        ({"key_indices": torch.zeros(B, LQ, 1).int(), "block_indices": torch.zeros(B, 2, 1).int()}, "one of them"),
        ({"block_indices": torch.zeros(B, 2, 1).int()}, "block_size: got None"),
        ({"block_indices": torch.zeros(B, 2, 1).int(), "block_size": 0}, "block_size: got 0"),
        ({"block_indices": torch.zeros(B, 1, 1).int(), "block_size": 2**30}, f"block_size: got {2**30}.* 1 to {2**29}"),
        ({"block_indices": torch.zeros(B, 2, 1).int(), "block_size": 5}, None),
        ({"block_indices": torch.full((B, 2, 1), 5).int(), "block_size": 5}, "5 blocks of 5 keys"),
        ({"block_size": 4}, "block_size: got given alone"),
    ],
)
def test_what_is_refused(options, words):
    q, k, v = inputs()
    for again in range(2):
        if words is None:
            attention(q, k, v, **options)
        else:
            with pytest.raises(InvalidArgument, match=words):
                attention(q, k, v, **options)
        if again == 0 and words is not None and "twice" in words:
            attention(q, k, v, **options, validate=False)  # vouched for


def test_blocks_of_packed_queries_are_refused():
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    pages = torch.randn(2, 8, 4, 2, 16)
    table, lengths = torch.tensor([[5, 2], [4, 1]]).int(), torch.tensor([8, 7]).int()
    with pytest.raises(InvalidArgument, match="blocks of packed queries"):
        paged_attention(
            torch.randn(7, 4, 16), *pages, table, lengths, cu_seqlens_q=cu,
            block_indices=torch.zeros(2, 1, 1).int(), block_size=4,
        )  # fmt: skip


def test_quantised_keys():
    q, k, v = inputs()
    indices = chosen(LQ, LK, 6, B)
    k8, v4 = Quantised.from_float(k, "int8", 32), Quantised.from_float(v, "int4", 32)
    want = attention(q, k8.dequantise(), v4.dequantise(), key_indices=indices)
    torch.testing.assert_close(attention(q, k8, v4, key_indices=indices), want, atol=3e-6, rtol=1e-5)


def test_a_map_of_blocks_names_their_size():
    with pytest.raises(
        InvalidArgument, match=f"block_size: got 0, expected the keys of a block, an int of 1 to {2**29}"
    ):
        TileMap.from_blocks(torch.zeros(1, 1, 1).int(), 0, 4, 4)


def test_maps_of_blocks():
    """What a map lists is what it was made of, and a call that is given both takes them for one choice."""
    q, k, v = inputs()
    blocks = torch.tensor([[[0, -1], [1, 4]], [[3, 2], [-1, -1]]]).int()
    chosen_map = TileMap.from_blocks(blocks, 5, LQ, LK)
    assert chosen_map.counts() == (15, 0, 5)
    listed = chosen_map.block_indices()
    assert listed.tolist() == [[[[0, -1], [1, 4]]], [[[2, 3], [-1, -1]]]]
    want = attention(q, k, v, block_indices=blocks, block_size=5)
    for given in (blocks, listed):
        got = attention(q, k, v, block_indices=given, block_size=5, tile_map=chosen_map)
        torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-5)
    with pytest.raises(InvalidArgument, match="a map of chosen blocks, without block_indices"):
        attention(q, k, v, tile_map=chosen_map)
    with pytest.raises(InvalidArgument, match=r"an index of 5, expected -1 \(none\) to 4"):
        TileMap.from_blocks(blocks + 1, 5, LQ, LK)


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_a_map_of_the_blocks_of_each_kv_head(backend):
    """One plane for each KV head, as `block_indices` has; queries of a group share it."""
    q, k, v = inputs()
    blocks = torch.randn(B, HKV, 2, 5, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :3].int()
    chosen_map = TileMap.from_blocks(blocks, 5, LQ, LK)
    options = {"block_indices": blocks, "block_size": 5, "backend": backend}
    got = attention(q, k, v, tile_map=chosen_map, **options)
    torch.testing.assert_close(got, attention(q, k, v, **options), atol=3e-6, rtol=1e-5)
    q = q.clone().requires_grad_()
    if backend != "reference":
        attention(q, k, v, tile_map=chosen_map, **options).sum().backward()
    three = TileMap.from_blocks(torch.zeros(B, 3, 2, 1).int(), 5, LQ, LK)
    with pytest.raises(InvalidArgument, match=r"tile_map: got \(\d, 3\) planes"):
        attention(q.detach(), k, v, tile_map=three, **options)


def test_maps_of_the_best_tiles():
    q, k, v = inputs()
    scores = torch.randn(B, HKV, 2, 6)
    scores[0, 1, 0] = -torch.inf
    scores[1, 0, 1, 2:] = float("nan")
    best = TileMap.from_topk(scores, 3, (4, 4), LQ, LK)
    blocks = best.block_indices()
    for b in range(B):
        for h in range(HKV):
            for i in range(2):
                row = scores[b, h, i]
                usable = [j for j in range(6) if row[j] > -torch.inf]
                want = sorted(sorted(usable, key=lambda j: -row[j])[:3])
                assert [j for j in blocks[b, h, i].tolist() if j >= 0] == want
    rules = TileMap.from_spec(LQ, LK, (4, 4), causal=True)
    fewer = (best & rules).block_indices()  # without what causal hides
    results = [attention(q, k, v, block_indices=x, block_size=4, causal=True) for x in (blocks, fewer)]
    torch.testing.assert_close(*results, atol=3e-6, rtol=1e-5)
    with pytest.raises(InvalidArgument, match="square tiles"):
        best.retile((4, 8)).block_indices()
