"""Tile maps against brute force, cell by cell."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import InvalidArgument, TileMap, attention
from tilewise.core.options import Options
from tilewise.core.tensors import sequences
from tilewise.reference import visible_cells
from tilewise.validation.calls import dense


def brute_force(visible, zero, tile):
    """[B, H, Lq, Lk] cells to [B, H, nq, nk] states."""
    B, H, Lq, Lk = visible.shape
    BQ, BK = tile
    states = torch.zeros(B, H, -(-Lq // BQ), -(-Lk // BK), dtype=torch.uint8)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in states.shape)).view(-1, 4).tolist():
        cells = (b, h, slice(i * BQ, (i + 1) * BQ), slice(j * BK, (j + 1) * BK))
        if visible[cells].any():
            states[b, h, i, j] = 2 if bool((visible[cells] & zero[cells]).all()) else 1
    return states


sizes = st.integers(1, 23)
tiles = st.tuples(st.integers(1, 26), st.integers(1, 26))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_from_mask_equals_brute_force(data):
    rank = data.draw(st.integers(2, 4))
    shape = [data.draw(st.integers(1, 3)) for _ in range(rank - 2)] + [data.draw(sizes), data.draw(sizes)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    share = data.draw(st.sampled_from([0.02, 0.5, 0.98]))
    seen = torch.rand(shape, generator=generator) < share
    mask, zero = seen, torch.ones_like(seen)
    if data.draw(st.booleans()):
        stray = torch.tensor([0.0, -0.0, 1.0, -1e30, math.nan])
        bias = stray[(torch.rand(shape, generator=generator) ** 8 * 5).long()]
        mask = torch.where(seen, bias, -math.inf).to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
        seen, zero = mask != -math.inf, mask == 0
    tile = data.draw(tiles)
    got = TileMap.from_mask(mask, tile)
    lift = (None,) * (4 - rank)
    assert got.states.equal(brute_force(seen[lift], zero[lift], tile))
    assert sum(got.counts()) == got.states.numel()


def test_from_spec_refuses_more_tiles_than_memory_holds():
    with pytest.raises(InvalidArgument, match=r"^tile: .*at most 2147483648 tiles"):
        TileMap.from_spec(2**29, 2**29, (1, 1), causal=True)


def test_from_spec_takes_rules_alone():
    for options, remedy in (({"softcap": 2.0}, "chunk"), ({"is_causal": True}, "did you mean causal")):
        with pytest.raises(InvalidArgument, match=remedy):
            TileMap.from_spec(8, 8, **options)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_from_spec_equals_brute_force(data):
    Lq, Lk = data.draw(sizes), data.draw(sizes)
    side = st.none() | st.integers(0, 9)
    rules = {
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.none() | st.integers(1, 12) | st.tuples(side, side)),
        "chunk": data.draw(st.none() | st.integers(1, 9)),
    }
    batch = data.draw(st.integers(1, 3))
    if data.draw(st.booleans()):
        lengths = data.draw(st.lists(st.integers(0, Lk), min_size=batch, max_size=batch))
        rules["kv_lengths"] = torch.tensor(lengths)
    offset = data.draw(st.sampled_from(["none", "int", "rows"]))
    if offset == "int":
        rules["q_offset"] = data.draw(st.integers(-30, 40))
    elif offset == "rows":
        rules["q_offset"] = torch.tensor(data.draw(st.lists(st.integers(-30, 40), min_size=batch, max_size=batch)))
    tile = data.draw(tiles)
    got = TileMap.from_spec(Lq, Lk, tile, **rules)
    q, k = torch.zeros(batch, 1, Lq, 4), torch.zeros(batch, 1, Lk, 4)
    call = dense(q, k, k, Options(**rules))
    seen = torch.zeros(batch, 1, Lq, Lk, dtype=torch.bool)
    for seq in sequences(call.problem, call.tensors):
        seen[seq.b, :, :, : seq.kv_len] = visible_cells(seq)
    want = brute_force(seen, torch.ones_like(seen), tile)
    assert got.states.expand_as(want).equal(want)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), tiles, tiles, st.integers(0, 1000))
def test_retile_is_safe(Lq, Lk, old, new, seed):
    """A retiled map skips only hidden tiles and calls full only full ones, and keeps what is uniform."""
    mask = torch.rand(Lq, Lk, generator=torch.Generator().manual_seed(seed)) < 0.9
    mask[: Lq // 2, Lk // 3 :] = False
    coarse = TileMap.from_mask(mask, old).retile(new)
    exact = TileMap.from_mask(mask, new)
    assert coarse.states.shape == exact.states.shape
    assert bool(((coarse.states == exact.states) | (coarse.states == 1)).all())
    everything = TileMap.from_mask(torch.ones(Lq, Lk, dtype=torch.bool), old).retile(new)
    assert bool((everything.states == 2).all())


def test_and():
    mask = torch.rand(40, 50) < 0.9
    mask[:, :10] = True
    both = TileMap.from_mask(mask, (8, 8)) & TileMap.from_spec(40, 50, (8, 8), causal=True)
    seen = mask & (torch.arange(50) <= 10 + torch.arange(40)[:, None])
    exact = TileMap.from_mask(seen, (8, 8)).states
    assert bool(((both.states == exact) | ((both.states == 1) & (exact == 0))).all())
    assert both.mask_kind == "bool"
    assert both.spec is not None


def test_and_refuses_what_does_not_fit():
    mask = TileMap.from_mask(torch.ones(8, 8).bool(), (4, 4))
    with pytest.raises(InvalidArgument, match="tiles of"):
        mask & TileMap.from_spec(8, 8, (2, 4), causal=True)
    with pytest.raises(InvalidArgument, match="map of"):
        mask & TileMap.from_spec(8, 12, (4, 4), causal=True)
    rules = TileMap.from_spec(8, 8, (4, 4), causal=True)
    with pytest.raises(InvalidArgument, match="second map"):
        rules & rules
    for first, second in (((2, 1), (3, 1)), ((1, 2), (1, 3)), ((2, 4), (4, 2))):
        a, b = (TileMap.from_mask(torch.ones(*planes, 8, 8).bool(), (4, 4)) for planes in (first, second))
        with pytest.raises(InvalidArgument, match=rf"other: got a map of \({second[0]}, {second[1]}\) planes"):
            a & b
    both = TileMap.from_mask(torch.ones(2, 1, 8, 8).bool(), (4, 4)) & TileMap.from_mask(
        torch.ones(3, 8, 8).bool(), (4, 4)
    )
    assert both.states.shape == (2, 3, 2, 2)
    with pytest.raises(InvalidArgument, match="other: got a map on meta, expected one on cpu"):
        mask & TileMap(mask.states.to("meta"), mask.tile, mask.shape, "bool")


def test_broadcast_dims_stay_one():
    padding = torch.arange(100) < torch.tensor([[30], [100]])
    tile_map = TileMap.from_mask(padding[:, None, None], (16, 32))
    assert tile_map.states[:, 0, 0].tolist() == [[1, 0, 0, 0], [2, 2, 2, 2]]
    q, k = torch.randn(2, 3, 50, 8), torch.randn(2, 3, 100, 8)
    dense(q, k, k, Options(mask=padding[:, None, None], tile_map=tile_map))


def test_picture_and_counts():
    tile_map = TileMap.from_spec(6, 6, (2, 2), causal=True, window=2)
    assert str(tile_map).splitlines() == [
        "TileMap 6 x 6 in tiles of 2 x 2: 4 skip, 5 mixed, 0 full",
        "▒..",
        "▒▒.",
        ".▒▒",
    ]
    assert tile_map.counts() == (4, 5, 0)
    assert tile_map.density == 5 / 9
    large = str(TileMap.from_spec(16384, 16384, (64, 64), causal=True)).splitlines()
    assert len(large) == 65
    assert large[0].endswith("full; each mark is 4 x 4 of them")
    assert str(TileMap.from_spec(1, 16384, (1, 64))).splitlines()[0].endswith("full; each mark is 1 x 4 of them")
    assert all(len(line) == 64 for line in large[1:])
    planes = TileMap.from_mask(torch.ones(2, 3, 4, 4).bool(), (2, 2))
    assert "5 more planes" in str(planes)


def test_plot():
    import matplotlib

    matplotlib.use("Agg")
    ax = TileMap.from_spec(64, 64, (8, 8), causal=True).plot()
    assert ax.get_xlabel() == "key"
    assert ax.images[0].get_array().shape == (8, 8)


def test_a_plot_that_is_saved_has_its_whole_legend(tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    ax = TileMap.from_spec(64, 64, (8, 8), causal=True).plot()
    ax.figure.savefig(tmp_path / "tiles.png")
    legend, page = ax.get_legend().get_window_extent(), ax.figure.bbox
    assert page.x0 <= legend.x0
    assert legend.x1 <= page.x1
    assert page.y0 <= legend.y0
    assert legend.y1 <= page.y1


@pytest.mark.parametrize(("Lq", "Lk"), [(0, 5), (5, 0), (0, 0)])
def test_empty(Lq, Lk):
    for tile_map in (
        TileMap.from_spec(Lq, Lk, (4, 4), causal=True),
        TileMap.from_mask(torch.ones(Lq, Lk).bool(), (4, 4)),
    ):
        assert tile_map.counts() == (0, 0, 0)
        assert tile_map.density == 0.0
        assert str(tile_map)


@pytest.mark.parametrize(
    "rules",
    [{}, {"window": 5}, {"chunk": 4}, {"kv_lengths": torch.tensor([9])}, {"q_offset": 15}, {"q_offset": 3},
     {"q_offset": torch.tensor([15])}, {"k_stride": 2, "q_offset": 30}],
    ids=str,
)  # fmt: skip
def test_a_map_of_one_query_belongs_to_its_call(rules):
    """Causal hides nothing from a query at the last position, and is left out of the call's plan."""
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 16, 8)
    tile_map = TileMap.from_spec(1, 16, (4, 4), causal=True, **rules)
    out = attention(q, k, k, causal=True, tile_map=tile_map, **rules)
    assert torch.equal(out, attention(q, k, k, causal=True, **rules))
    with pytest.raises(InvalidArgument, match="tile_map"):
        attention(q, k, k, causal=True, tile_map=tile_map, **rules | {"window": 3})
