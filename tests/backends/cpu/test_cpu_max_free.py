"""Max-free softmax of bounded logits in prefill, and rows that leave the bound."""

import pytest
import torch

from tilewise import attention
from tilewise.testing.case import Inputs
from tilewise.testing.check import check_call

ROWS, KEYS, D = 192, 300, 64  # 300 keys: tiles of 96, and one whose last block is not full


KINDS, INF = [torch.float32, torch.bfloat16, torch.float16], float("inf")
DTYPES = pytest.mark.parametrize("dtype", KINDS)


def inputs(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, n, D, generator=generator).to(dtype) for n in (ROWS, KEYS, KEYS)]


def attend(q, k, v, **options):
    return attention(q, k, v, return_lse=True, backend="cpu", **options)


def check(q, k, v, **options):
    """Against the oracle, with twice torch's own error."""
    check_call(Inputs(attention, (q, k, v), options).checked(), *attend(q, k, v, **options))


@DTYPES
@pytest.mark.parametrize("factor", [0.0, 1.0, 6.0, 30.0, 1e4])
def test_scores_of_any_size(factor, dtype):
    q, k, v = inputs(dtype=dtype)
    check(q * factor, k, v)


@DTYPES
@pytest.mark.parametrize("start", [-2000.0, -90.0, -25.0, 0.0, 25.0, 90.0])
@pytest.mark.parametrize("step", [-1.0, -0.1, 0.1, 1.0])
def test_scores_that_rise_or_fall_from_tile_to_tile(start, step, dtype):
    """Logits leave the bound upwards, or are below it from the first key on; the last keys weigh most, or least."""
    q, k, v = inputs(1, dtype)
    q[..., 0] = 1.0
    k[..., 0] = start + step * torch.arange(KEYS)
    check(q, k, v, scale=1.0)


# An infinite query has no bf16 parts: float16 rows beside it take the fp32 mainloop, which rounds otherwise.
@pytest.mark.parametrize(
    ("dtype", "wild"),
    [(dtype, wild) for dtype in KINDS for wild in (1e3, INF, float("nan")) if (dtype, wild) != (torch.float16, INF)],
)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 20)}])
def test_a_row_does_not_depend_on_its_neighbours(wild, options, dtype):
    """One row of each panel takes the online softmax; the bits of the others stay as without it."""
    q, k, v = inputs(2, dtype)
    want = attend(q, k, v, **options)
    others = torch.arange(ROWS) % 64 != 17
    q[:, :, ~others] *= wild
    got = attend(q, k, v, **options)
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
