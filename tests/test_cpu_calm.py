"""Prefill without a maximum: rows from whose scores nothing is subtracted, and how they stop being that."""

import pytest
import torch

from tilewise import attention
from tilewise.conformance.case import Inputs
from tilewise.conformance.check import check_call

ROWS, KEYS, D = 192, 300, 64  # 300 keys: tiles of 96, and one whose last block is not full


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, n, D, generator=generator) for n in (ROWS, KEYS, KEYS)]


def ask(q, k, v, **options):
    return attention(q, k, v, return_lse=True, backend="cpu", **options)


def check(q, k, v, **options):
    """Against the oracle, with twice torch's own error."""
    check_call(Inputs(attention, (q, k, v), options).checked(), *ask(q, k, v, **options))


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
    check(q, k, v, mask=mask)


def test_large_values_do_not_overflow():
    q, k, v = inputs(4)
    check(q * 4, k, v * 1e25)
