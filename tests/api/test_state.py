"""Merging partial results."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from tilewise import AttentionState, InvalidArgument, attention, merge
from tilewise.core.options import Options
from tilewise.testing.check import check_call, judge, largest_error
from tilewise.validation.calls import dense

ROWS = 64  # of a head: torch's own error, by which results are judged, may be small by chance on few


def parts(q, k, v, edges, **options):
    return [attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True, **options) for a, b in pairwise(edges)]


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_any_number_of_parts(count):
    q, k, v = (torch.randn(2, 3, n, 16) * 2 for n in (ROWS, 200, 200))
    edges = [round(i * 200 / count) for i in range(count + 1)]
    merged = merge(parts(q, k, v, edges))
    check_call(dense(q, k, v, Options()), merged.out, merged.lse)


def test_empty_states_drop_out_to_the_bit():
    state = AttentionState(torch.randn(4, 8), torch.randn(4) * 50)
    empty = AttentionState(torch.full((4, 8), math.nan), torch.full((4,), -math.inf))
    for states in ([state], [state, empty], [empty, state], [empty, empty, state, empty]):
        merged = merge(states)
        assert merged.out.equal(state.out)
        assert merged.lse.equal(state.lse)
    nothing = merge([empty, empty])
    assert nothing.out.equal(torch.zeros(4, 8))
    assert nothing.lse.equal(empty.lse)


def test_far_apart_and_huge():
    """Weights of e^-200 vanish, and lse of 1e4 neither overflows nor loses its parts."""
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    lse = torch.tensor([0.0, 1e4, -1e4])
    far = merge([AttentionState(a, lse), AttentionState(b, lse - 200)])
    assert far.out.equal(a)
    even = merge([AttentionState(a, lse), AttentionState(b, lse)])
    mean, more = (a.double() + b.double()) / 2, lse.double() + math.log(2)
    judge("out", even.out, mean, 2 * largest_error((a + b) / 2, mean), torch.float32)
    judge("lse", even.lse, more, 2 * largest_error(torch.logaddexp(lse, lse), more), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_values(dtype):
    """Their sum passes float32's range, their mean does not."""
    signs = torch.where(torch.arange(8) % 2 == 0, 1.0, -1.0).expand(4, 8)
    merged = merge([AttentionState((3e38 * signs).to(dtype), torch.randn(4)) for _ in range(5)])
    torch.testing.assert_close(merged.out.float() / 3e38, signs, atol=1e-2, rtol=0)


def test_order_does_not_matter_beyond_rounding():
    states = [AttentionState(torch.randn(6, 8), torch.randn(6) * 5) for _ in range(5)]
    outs, lses = torch.stack([s.out for s in states]), torch.stack([s.lse for s in states])
    plain = (lses.softmax(0)[..., None] * outs).sum(0)
    exact = (lses.double().softmax(0)[..., None] * outs.double()).sum(0)
    for order in (states, states[::-1]):
        judge("out", merge(order).out, exact, 2 * largest_error(plain, exact), torch.float32)


def test_result_has_the_first_dtype_and_half_states_merge_in_float32():
    a = AttentionState(torch.randn(2, 4).half(), torch.zeros(2))
    b = AttentionState(torch.randn(2, 4).half(), torch.zeros(2))
    merged = merge([a, b])
    assert merged.out.dtype == torch.float16
    assert merged.lse.dtype == torch.float32
    assert merged.out.equal(((a.out.float() + b.out.float()) / 2).half())


def test_layouts_merge_as_they_come():
    q, k, v = (torch.randn(2, n, 2, 8) for n in (ROWS, 30, 30))
    halves = [attention(q, k[:, s], v[:, s], layout="blhd", return_lse=True) for s in (slice(0, 9), slice(9, 30))]
    merged = merge(halves)
    check_call(dense(q, k, v, Options(layout="blhd")), merged.out.transpose(1, 2), merged.lse.transpose(1, 2))


def test_numpy():
    rng = np.random.default_rng(0)
    state = AttentionState(rng.standard_normal((3, 4)).astype(np.float32), rng.standard_normal(3).astype(np.float32))
    merged = merge([state, AttentionState(state.out, np.full(3, -np.inf, dtype=np.float32))])
    assert type(merged.out) is type(merged.lse) is np.ndarray
    np.testing.assert_array_equal(merged.out, state.out)


def test_a_state_is_a_pair():
    out, lse = attention(*(torch.randn(1, 1, 3, 4) for _ in range(3)), return_lse=True)
    assert out.shape == (1, 1, 3, 4)
    assert lse.shape == (1, 1, 3)


@pytest.mark.parametrize(
    "second",
    [
        AttentionState(torch.zeros(2, 5), torch.zeros(2)),
        AttentionState(torch.zeros(2, 4), torch.zeros(2, 1)),
        AttentionState(torch.zeros(2, 4).int(), torch.zeros(2)),
        AttentionState(torch.zeros(2, 4, device="meta"), torch.zeros(2, device="meta")),
    ],
)
def test_states_that_do_not_fit(second):
    with pytest.raises(InvalidArgument, match=r"states\[1\]: got"):
        merge([AttentionState(torch.zeros(2, 4), torch.zeros(2)), second])
