"""`positions` beside `tree_mask`: what the conformance suite has no case for."""

import pytest
import torch

from beside import judge_beside, sdpa
from naive import assert_as_torch
from tilewise import InvalidArgument, KVCache, Unsupported, alibi_slopes, attention, plan

L, OWN = 60, 7
TREE = torch.eye(OWN).bool()
for child, parent in enumerate((0, 0, 1, 1, 3, 2), start=1):
    TREE[child] |= TREE[parent]
PLACES = L - OWN + TREE.sum(-1) - 1  # depths
KEYS = torch.cat([torch.arange(L - OWN), PLACES])
BEHIND = PLACES[:, None] - KEYS
SEEN = torch.cat([torch.ones(OWN, L - OWN).bool(), TREE], 1)


def inputs():
    torch.manual_seed(0)
    return torch.randn(2, 4, OWN, 32), torch.randn(2, 2, L, 32), torch.randn(2, 2, L, 32)


def given(**options):
    return {"tree_mask": TREE[None], "positions": PLACES[None], **options}


def test_alibi_goes_by_them_in_plain_torch():
    q, k, v = inputs()
    slopes = alibi_slopes(4)
    bias = (-slopes[:, None, None] * BEHIND.abs()).masked_fill(~SEEN, -torch.inf)
    for backend in ("torch", "reference", None):
        judge_beside(
            lambda q, k, v, backend=backend: attention(q, k, v, **given(alibi_slopes=slopes), backend=backend),
            lambda q, k, v: sdpa(q, k, v, bias.to(q.dtype)),
            q, k, v,
        )  # fmt: skip
    assert plan(q, k, v, **given(alibi_slopes=slopes)).backend == "torch"
    with pytest.raises(Unsupported, match="no alibi_slopes by positions of a tree"):
        attention(q, k, v, **given(alibi_slopes=slopes), backend="cpu")


def test_gradients_are_those_of_the_mask_that_it_stands_for():
    mask = SEEN & (BEHIND < 3)
    judge_beside(lambda *x: attention(*x, **given(window=3)), lambda *x: sdpa(*x, mask), *inputs())
    assert not torch.equal(mask, SEEN)


def test_they_are_checked_in_repeated_calls():
    q, k, v = inputs()
    wrong = (PLACES - 1)[None]
    for _ in range(3):
        attention(q, k, v, **given(window=3))
    with pytest.raises(InvalidArgument, match="53 keys come first"):
        attention(q, k, v, tree_mask=TREE[None], positions=wrong, window=3)
    unchecked = attention(q, k, v, tree_mask=TREE[None], positions=wrong, window=3, validate=False)
    assert torch.equal(
        unchecked, attention(q, k, v, tree_mask=TREE[None], positions=wrong.clamp_min(L - OWN), window=3)
    )


def test_over_a_cache():
    q, k, v = inputs()
    cache = KVCache(2, 2, 100, 32, "f32")
    cache.append(k, v)
    exact, plain = (sdpa(*(x.to(dtype) for x in (q, k, v)), SEEN & (BEHIND < 3)) for dtype in (torch.float64, q.dtype))
    assert_as_torch(cache.attend(q, **given(window=3)), exact, plain)


def test_a_plan_counts_the_cells_that_they_leave():
    q, k, v = inputs()
    assert plan(q, k, v, **given(window=3)).cost.cells == 2 * 4 * int((SEEN & (BEHIND < 3)).sum())
