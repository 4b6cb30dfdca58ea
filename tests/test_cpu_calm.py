"""Prefill without a maximum: rows from whose scores nothing is subtracted, and how they stop being that."""

import pytest
import torch

from tilewise import attention

ROWS, KEYS, D = 192, 300, 64  # 300 keys: tiles of 96, and one whose last block is not full


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, n, D, generator=generator) for n in (ROWS, KEYS, KEYS)]


def ask(q, k, v, **options):
    return attention(q, k, v, return_lse=True, backend="cpu", **options)


def check(q, k, v, **options):
    """Against float64, and torch's own error there."""
    got = ask(q, k, v, **options)
    scores = (q.double() @ k.double().mT) * options.get("scale", D**-0.5)
    want = scores.softmax(-1) @ v.double()
    least = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=options.get("scale"))
    error, allowed = (got.out - want).abs().max(), (least - want).abs().max()
    assert error <= 2 * allowed + 1e-6 * want.abs().max()
    torch.testing.assert_close(got.lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("factor", [0.0, 1.0, 6.0, 30.0, 1e4])
def test_scores_of_any_size(factor):
    q, k, v = inputs()
    check(q * factor, k, v)


@pytest.mark.parametrize("start", [-2000.0, -90.0, -25.0, 0.0, 25.0, 90.0])
@pytest.mark.parametrize("step", [-1.0, -0.1, 0.1, 1.0])
def test_scores_that_rise_or_fall_from_tile_to_tile(start, step):
    """Rows become too large, or are too small from the first key on; the last keys weigh most, or least."""
    q, k, v = inputs(1)
    q[..., 0] = 1.0
    k[..., 0] = start + step * torch.arange(KEYS)
    check(q, k, v, scale=1.0)


@pytest.mark.parametrize("wild", [1e3, float("inf"), float("nan")])
@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_a_row_does_not_depend_on_its_neighbours(wild, options):
    """One row of each panel takes the other way; to the bit, the others get what they would have got without it."""
    q, k, v = inputs(2)
    want = ask(q, k, v, **options)
    others = torch.arange(ROWS) % 64 != 17
    q[:, :, ~others] *= wild
    got = ask(q, k, v, **options)
    assert got.out[:, :, others].equal(want.out[:, :, others])
    assert got.lse[:, :, others].equal(want.lse[:, :, others])
    assert not got.out[:, :, ~others].equal(want.out[:, :, ~others])


def test_a_mask_that_hides_whole_tiles_from_some_rows():
    q, k, v = inputs(3)
    mask = torch.ones(1, 1, ROWS, KEYS, dtype=torch.bool)
    mask[..., 40:90, :200] = False  # these rows begin late
    mask[..., 5, :] = False  # and this one sees nothing
    got = ask(q, k, v, mask=mask)
    scores = ((q.double() @ k.double().mT) * D**-0.5).masked_fill(~mask, -torch.inf)
    want = scores.softmax(-1).nan_to_num() @ v.double()
    torch.testing.assert_close(got.out.double(), want, rtol=0, atol=5e-6)
    torch.testing.assert_close(got.lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=5e-6)


def test_large_values_do_not_overflow():
    q, k, v = inputs(4)
    v *= 1e25
    got = ask(q * 4, k, v).out
    want = ask(q * 4, k, v / 1e25).out * 1e25
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e20)
