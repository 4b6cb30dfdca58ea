"""Tile classes of functions, without evaluating a cell: never a skip too many, and few mixed tiles too many."""

import tracemalloc
from contextlib import suppress
from itertools import pairwise

import pytest
import torch

from tilewise import InvalidArgument, TileMap, attention, paged_attention, plan, varlen_attention
from tilewise.core.expression import bounds, intervals
from tilewise.core.expression.bounds import Range, point
from tilewise.core.expression.build import cast, make
from tilewise.core.expression.evaluate import evaluate
from tilewise.core.expression.intervals import HIDDEN, MIXED, SEEN, classes, ranges
from tilewise.core.expression.mods import bind, mods_of
from tilewise.core.expression.node import FLOAT_1, in_order, load, source
from tilewise.core.expression.text import to_text
from tilewise.core.mod_tiles import mod_states
from tilewise.core.options import Options
from tilewise.validation import calls

CPU = torch.device("cpu")
N, HEADS, BATCH = 64, 4, 2
random = torch.Generator().manual_seed(0)
DOC = torch.arange(N) // 13
LENGTHS = torch.tensor([40, 64])
WIDTHS = torch.tensor([3, 9, 20, 64])
KINDS = torch.randint(0, 3, (N,), generator=random)
GRID = torch.randn(8, 8, generator=random)
SIDE = 8
BLOCKS = torch.randint(0, 2, (HEADS, 10, 6), generator=random)


def natten(b, h, q, k):
    return ((q % SIDE - k % SIDE).abs() <= 2) & ((q // SIDE - k // SIDE).abs() <= 2)


MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q - k).abs() <= 9,
    "documents": lambda b, h, q, k: (DOC[q] == DOC[k]) & (q >= k),
    "prefix": lambda b, h, q, k: (k < 20) | (q >= k),
    "dilated": lambda b, h, q, k: (q - k) % 4 == 0,
    "natten": natten,
    "chunks": lambda b, h, q, k: q // 16 == k // 16,
    "heads": lambda b, h, q, k: q - k <= WIDTHS[h],
    "sinks": lambda b, h, q, k: ((q - k < 10) | (k < 4)) & (q >= k),
    "lengths": lambda b, h, q, k: k < LENGTHS[b],
    "blocks": lambda b, h, q, k: BLOCKS[h, q // 7, k // 11] > 0,  # tiles reach into several
    "nothing": lambda b, h, q, k: q < 0,
}


def tiles(n, size, dim):
    starts = torch.arange(0, n, size)
    shape = [1, 1, 1, 1]
    shape[dim] = -1
    return Range(starts.view(shape), (starts + size).clamp_max(n).view(shape) - 1)


def grid(BQ=8, BK=8):
    b, h = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(HEADS).view(-1, 1, 1)
    return {"b": point(b), "h": point(h), "q": tiles(N, BQ, 2), "k": tiles(N, BK, 3)}


def cells():
    given = grid(1, 1)
    return {name: x.lo for name, x in given.items()}


def by_cells(root, captured, BQ, BK):
    """The classes that dense evaluation finds."""
    seen = evaluate([root], cells(), captured, torch.float64)[0].expand(BATCH, HEADS, N, N)
    seen = seen.unflatten(3, (-1, BK)).unflatten(2, (-1, BQ))
    return seen.any(-1).any(3).int() + seen.all(-1).all(3).int()


@pytest.mark.parametrize("tile", [(8, 8), (4, 16), (16, 4)])
@pytest.mark.parametrize("name", MASKS)
def test_known_masks_have_no_mixed_tile_too_many(name, tile):
    bound = bind(None, MASKS[name], CPU)
    found = classes(bound.mods, grid(*tile), bound.tensors).expand(BATCH, HEADS, N // tile[0], N // tile[1])
    assert torch.equal(found.int(), by_cells(bound.mods.mask, bound.tensors, *tile))


# Any expression

CAPTURED = (
    torch.randn(N, generator=random) * 3,
    torch.randint(-5, 90, (N,), generator=random),
    torch.rand(N, generator=random) < 0.7,
    torch.randn(HEADS, 2 * N, generator=random).bfloat16(),
    torch.tensor([1.0, -torch.inf, torch.nan, 0.0, -2.0, torch.inf, 3.0, 0.5]),
)
DECLARED = [("float32", 1), ("int64", 1), ("bool", 1), ("bfloat16", 2), ("float32", 1)]
INTS = ("add", "sub", "mul", "max", "min", "floordiv", "mod", "and", "or", "xor", "neg", "abs", "not", "where")
FLOATS = (*FLOAT_1, "add", "sub", "mul", "max", "min", "div", "neg", "abs", "where")


class Drawn:
    """A random expression: blocks of it are computed from indices, numbers and captured tensors."""

    def __init__(self, seed):
        self.random = torch.Generator().manual_seed(seed)

    def below(self, n):
        return int(torch.randint(n, (), generator=self.random))

    def one(self, of):
        return of[self.below(len(of))]

    def condition(self, depth):
        if depth and self.below(2):
            op = self.one(("and", "or", "xor", "not", "where"))
            count = {"not": 1, "where": 3}.get(op, 2)
            return make(op, *(self.condition(depth - 1) for _ in range(count)))
        if not self.below(5):
            return load(2, [self.integer(depth - 1)], "bool")
        op, kind = self.one(("eq", "ne", "lt", "le")), self.one((self.integer, self.number))
        return make(op, kind(depth - 1), kind(depth - 1))

    def integer(self, depth):
        if depth <= 0:
            number = self.one((2**30, -(2**31))) if not self.below(8) else self.below(41) - 8
            return source(self.one("bhqkqk")) if self.below(3) else cast(number, "int")
        if not self.below(5):
            return load(1, [self.integer(depth - 1)], "int")
        if not self.below(8):
            return cast(self.number(depth - 1), "int")
        op = self.one(INTS)
        parts = [self.integer(depth - 1) for _ in range({"neg": 1, "abs": 1, "not": 1}.get(op, 2))]
        return make(op, self.condition(depth - 1), *parts) if op == "where" else make(op, *parts)

    def number(self, depth):
        if depth <= 0:
            return cast(self.one((-2.5, 0.0, 0.5, 3.0)), "float") if self.below(2) else cast(self.integer(0), "float")
        if not self.below(3):
            which = self.one((0, 3, 4))
            at = [self.integer(depth - 1)] if which != 3 else [source("h"), self.integer(depth - 1)]
            return load(which, at, "float")
        op = self.one(FLOATS)
        parts = [self.number(depth - 1) for _ in range(1 if op in (*FLOAT_1, "neg", "abs") else 2)]
        return make(op, self.condition(depth - 1), *parts) if op == "where" else make(op, *parts)


def fault(seeds):
    """The first seed whose expression is not where its bounds say; None if all are."""
    for seed in seeds:
        root = Drawn(seed).condition(3)
        nodes = [x for x in in_order(root) if x.args]
        sizes = (1, 64) if seed % 3 == 0 else (8, 8)
        bounds = ranges(nodes, grid(*sizes), CAPTURED)
        for dtype in (torch.float32, torch.float64):
            values = evaluate(nodes, cells(), CAPTURED, dtype)
            if not all(_holds(x, bound, sizes) for x, bound in zip(values, bounds, strict=True)):
                return seed
    return None


def _holds(values, bound, sizes):
    """Whether values of all cells are within the bounds of their tiles."""

    def of_cells(x):
        x = x.expand(*torch.broadcast_shapes(x.shape, (1, 1, 1, 1)))
        for dim, size in zip((2, 3), sizes, strict=True):
            x = x.repeat_interleave(size, dim) if x.shape[dim] > 1 else x
        return x

    nan = values.isnan()
    if bool((nan & ~of_cells(bound.maybe_nan)).any()):
        return False
    inside = (of_cells(bound.lo) <= values) & (values <= of_cells(bound.hi))
    return bool((inside | nan).all())


def test_bounds_hold_for_any_expression():
    assert fault(range(300)) is None


MUTANTS = {
    "sub": lambda a, b: Range(a.lo - b.lo, a.hi - b.hi),
    "mod": lambda a, b: Range(a.lo % b.lo.clamp_min(1), a.hi % b.lo.clamp_min(1)),
    "floordiv": lambda a, b: Range(a.lo // b.lo.clamp_min(1), a.hi // b.hi.clamp_min(1)),
    "mul": lambda a, b: Range(a.lo * b.lo, a.hi * b.hi, bounds._nan_of(a, b)),
    "abs": lambda a: Range(a.lo.abs(), a.hi.abs(), a.nan),
    "max": lambda a, b: Range(torch.maximum(a.lo, b.lo), torch.minimum(a.hi, b.hi), bounds._nan_of(a, b)),
    "sin": lambda a: Range(a.lo.sin(), a.hi.sin(), a.nan),
    "log": lambda a: Range(a.lo.clamp_min(1e-9).log(), a.hi.clamp_min(1e-9).log(), a.nan),
    "div": lambda a, b: Range(a.lo / b.hi, a.hi / b.lo, bounds._nan_of(a, b)),
    "where": lambda c, a, b: Range(torch.where(c.lo, a.lo, b.lo), torch.where(c.lo, a.hi, b.hi), a.nan),
}


@pytest.mark.parametrize("op", [*MUTANTS, "lt", "eq", "wrap", "load", "nan", "around"])
def test_wrong_bounds_are_found(op, monkeypatch):
    if op in MUTANTS:
        monkeypatch.setitem(bounds.NUMBERS, op, MUTANTS[op])
    elif op == "lt":
        monkeypatch.setitem(bounds.BOOLS, "lt", lambda a, b: Range(a.hi < b.lo, a.hi < b.hi))
    elif op == "eq":
        monkeypatch.setitem(bounds.BOOLS, "eq", lambda a, b: Range(a.lo == b.hi, (a.lo <= b.hi) & (b.lo <= a.hi)))
    elif op == "wrap":
        monkeypatch.setattr(intervals, "wrapped", lambda x: x)
    elif op == "load":
        monkeypatch.setattr(intervals, "extremes", lambda x, ends, wide, largest: x[tuple(lo for lo, _ in ends)])
    elif op == "nan":
        monkeypatch.setattr(bounds, "_nan_of", lambda *args, more=None: None)
    else:
        monkeypatch.setattr(intervals, "_inside", lambda at, n: tuple(intervals.clamped(x, n) for x in (at.lo, at.hi)))
    with suppress(RuntimeError, IndexError):  # a range that ends before it begins
        assert fault(range(1500)) is not None


def test_a_score_that_is_minus_infinity_whatever_it_was_hides():
    def kept(s, b, h, q, k):
        return torch.where((q >= k) & (DOC[q] == DOC[k]), s + 1, -torch.inf)

    bound = bind(kept, None, CPU)
    states = classes(bound.mods, grid(), bound.tensors)
    want = by_cells(bind(None, MASKS["documents"], CPU).mods.mask, (DOC, DOC), 8, 8)[0, 0]
    assert torch.equal(states.expand(1, 1, -1, -1)[0, 0] == HIDDEN, want == HIDDEN)
    unsure = bind(lambda s, b, h, q, k: s + torch.where(q >= k, 0.0, -torch.inf), None, CPU)  # a NaN stays NaN
    assert (classes(unsure.mods, grid(), ()) == SEEN).all()


# Calls


def attend(form, score, mask, heads=2):
    """A call of each form with documents of uneven places, over keys that hold NaN where everything is hidden."""
    g = torch.Generator().manual_seed(3)
    n = 1100
    doc = torch.cat([torch.zeros(600), torch.ones(n - 600)]).long()

    def functions(hide):
        mod = (lambda b, h, q, k: (doc[q] == doc[k]) & mask(b, h, q, k)) if hide else mask
        return {"score_mod": score, "mask_mod": mod}

    q, k, v = (torch.randn(1, heads, n, 16, generator=g) for _ in range(3))
    if form == "dense":
        return lambda hide: attention(q[:, :, -150:], k, v, backend="torch", **functions(hide))
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    cu = torch.tensor([0, n - 5, n], dtype=torch.int32)
    if form == "varlen":
        return lambda hide: varlen_attention(*packed, cu, cu, backend="torch", **functions(hide))
    pages = [x.unflatten(0, (-1, 4)) for x in packed[1:]]
    table = torch.arange(n // 4, dtype=torch.int32).flip(0)[None]
    lengths = torch.tensor([n - 3], dtype=torch.int32)
    return lambda hide: paged_attention(q[:, :, :9], *pages, table, lengths, backend="torch", **functions(hide))


@pytest.mark.parametrize("form", ["dense", "varlen", "paged"])
def test_skipped_tiles_change_no_bit(form, monkeypatch):
    call = attend(form, lambda s, b, h, q, k: s * 2, lambda b, h, q, k: (q - k) % 3 != b + 1)
    skipping = call(True)
    from tilewise.backends.torch import tiles as torch_tiles

    asked = []
    real = torch_tiles.mod_states
    monkeypatch.setattr(torch_tiles, "mod_states", lambda *args: asked.append(real(*args)))
    assert torch.equal(skipping, call(True))
    assert (asked[0] == HIDDEN).any()
    assert not torch.equal(skipping, call(False))


def test_states_go_by_the_positions_of_each_sequence():
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 40], [0, 30, 61]))
    q, k = torch.randn(40, 2, 8), torch.randn(61, 2, 8)
    options = Options(mask_mod=lambda b, h, q, k: (k % 5 < 4) & (q - k < 6 + 9 * b) & (q >= k), window=99)
    call = calls.varlen(q, k, k, cu_q, cu_k, options)
    states = mod_states(call.problem, call.tensors, (8, 8))
    for b, (n, m) in enumerate(((9, 30), (31, 31))):
        i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)
        dense = TileMap.from_mask((i - j < 6 + 9 * b) & (j % 5 < 4), (8, 8)).states[0, 0]
        own = states[b, 0, : dense.shape[0], : dense.shape[1]]
        assert torch.equal(own == 0, dense == 0), b


def test_rules_among_the_conditions_take_the_span_path():
    q = torch.randn(1, 2, 90, 16)

    def rules(mask_mod, **options):
        return plan(q, q, q, mask_mod=mask_mod, **options).problem

    found = rules(lambda b, h, q, k: (q >= k) & (q - k < 9))
    assert (found.rules.causal, found.rules.window, found.mods) == (True, (8, None), None)
    assert rules(lambda b, h, q, k: (q - k).abs() <= 4, window=(2, 7)).rules.window == (2, 4)
    assert rules(lambda b, h, q, k: q // 16 == k // 16).rules.chunk == 16
    kept = rules(lambda b, h, q, k: (q - k >= 0) & (DOC[q % N] == DOC[k % N]))
    assert kept.rules.causal
    assert kept.mods.mask.op == "eq"
    for mask_mod in (
        lambda b, h, q, k: q > k,  # not itself: no window says so
        lambda b, h, q, k: (q - k < 9) | (k < 2),
        lambda b, h, q, k: q + k > 3,
        lambda b, h, q, k: q * 2 >= k,
        lambda b, h, q, k: q - k - 2**31 < 2**30,  # it wraps
        lambda b, h, q, k: q // 16 == k // 8,
        lambda b, h, q, k: q >= h,
    ):
        assert rules(mask_mod).mods is not None
    assert rules(lambda b, h, q, k: q // 16 == k // 16, chunk=8).mods is not None
    tree = torch.ones(1, 90, 90, dtype=torch.bool)
    assert rules(lambda b, h, q, k: q >= k, tree_mask=tree).mods is not None
    torch.testing.assert_close(
        attention(q, q, q, mask_mod=lambda b, h, q, k: (q >= k) & (q - k < 9)),
        attention(q, q, q, mask_mod=lambda b, h, q, k: ((q >= k) & (q - k < 9)) | (q < 0), backend="torch"),
    )


def test_plans_count_and_draw_what_functions_hide():
    q = torch.randn(1, 2, 256, 16)
    doc = torch.arange(256) // 50

    def documents(b, h, q, k):
        return (doc[q] == doc[k]) & (q >= k) & (k % 7 > h)

    i, j = torch.arange(256)[:, None], torch.arange(256)
    dense = torch.stack([documents(0, h, i, j) for h in range(2)])
    cost = plan(q, q, q, mask_mod=documents, backend="torch").cost
    assert cost.cells == int(dense.sum())
    mask = torch.rand(256, 256) < 0.5
    assert plan(q, q, q, mask_mod=documents, mask=mask).cost.cells == int((dense & mask).sum())
    text = str(plan(q, q, q, mask_mod=lambda b, h, q, k: doc[q] == doc[k], backend="torch"))
    assert "▒" in text
    assert sum(cost.tiles) == sum(plan(q, q, q, backend="torch").cost.tiles)


def test_maps_of_functions():
    tile_map = TileMap.from_mod(MASKS["heads"], N, N, (8, 8), heads=HEADS)
    assert tile_map.states.shape == (1, HEADS, 8, 8)
    offset = TileMap.from_mod(MASKS["documents"], 16, N, (8, 8))
    assert torch.equal(offset.states[0, 0], TileMap.from_mod(MASKS["documents"], N, N, (8, 8)).states[0, 0, -2:])
    q = torch.randn(1, HEADS, N, 16)
    score = {"score_mod": lambda s, b, h, q, k: s + GRID[q % 8, k % 8]}
    plain = attention(q, q, q, mask_mod=MASKS["heads"], **score)
    assert torch.equal(attention(q, q, q, mask_mod=MASKS["heads"], tile_map=tile_map, **score), plain)
    for other in ({}, {"mask_mod": MASKS["window"]}, score):
        with pytest.raises(InvalidArgument, match="a map of a mask_mod"):
            attention(q, q, q, tile_map=tile_map, **other)
    with pytest.raises(InvalidArgument, match="another mask_mod"):
        tile_map & TileMap.from_mod(MASKS["window"], N, N, (8, 8))
    both = tile_map & TileMap.from_spec(N, N, (8, 8), causal=True)
    assert torch.equal(
        attention(q, q, q, causal=True, mask_mod=MASKS["heads"], tile_map=both.retile((16, 16))),
        attention(q, q, q, causal=True, mask_mod=MASKS["heads"]),
    )


def test_maps_need_no_memory_for_cells():
    """32 documents in 16k: as many tiles as 128k has in tiles of 1024."""
    doc = torch.arange(16384) // 512
    tracemalloc.start()
    tile_map = TileMap.from_mod(lambda b, h, q, k: (doc[q] == doc[k]) & (q >= k), 16384, 16384, (128, 128))
    assert tile_map.counts() == (128 * 128 - 32 * 10, 32 * 4, 32 * 6)
    ends = list(pairwise(range(0, 16385, 512)))
    assert all((tile_map.states[0, 0, a // 128 : b // 128, b // 128 :] == 0).all() for a, b in ends)
    tracemalloc.stop()


def test_reads_outside_are_named_if_they_are_asked_for():
    q = torch.randn(2, 2, 20, 8)
    table = torch.randn(2, 24)

    def near(s, b, h, q, k):
        return s + table[h, q - k]

    attention(q, q, q, score_mod=near, mask_mod=lambda b, h, q, k: (q >= k) & (q - k < 30), validate=True)
    with pytest.raises(InvalidArgument, match=r"index 24 of dim 1 at b=0, h=0, q_idx=4, kv_idx=0"):
        attention(q, q, q, score_mod=lambda s, b, h, q, k: s + table[h, q - k + 20], validate=True)
    with pytest.raises(InvalidArgument, match=r"index 2 of dim 0 at b=1, h=1"):
        attention(q, q, q, score_mod=lambda s, b, h, q, k: s + table[h + b, k], validate=True)
    clamped = attention(q, q, q, score_mod=lambda s, b, h, q, k: s + table[h, q - k + 20])
    want = attention(q, q, q, score_mod=lambda s, b, h, q, k: s + table[h, (q - k + 20).clamp(max=23)], validate=True)
    assert torch.equal(clamped, want)


def test_states_are_named_alike():
    from tilewise.core import tile_map

    assert (HIDDEN, MIXED, SEEN) == (tile_map.SKIP, tile_map.MIXED, tile_map.FULL)
    assert mods_of(to_text((None, MASKS and bind(None, natten, CPU).mods.mask), [])).mask is not None
    assert len(DECLARED) == len(CAPTURED)
