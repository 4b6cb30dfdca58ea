"""Each backend against the conformance suite."""

from functools import partial

import pytest
import torch

from conformance import BackwardConformance, LatentRows
from tilewise import InvalidArgument, attention
from tilewise.core.options import Options
from tilewise.testing.case import Case, make
from tilewise.testing.check import Mismatch, check_call, check_case
from tilewise.testing.drawing import Seeded, draw_trained
from tilewise.testing.gradients import judge_gradients, make_gradients
from tilewise.validation.calls import dense


class TestReference(LatentRows):
    backend = "reference"


class TestTorch(LatentRows):
    backend = "torch"


class TestReferenceBackward(BackwardConformance):
    backend = "reference"


class TestTorchBackward(BackwardConformance):
    backend = "torch"


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(("kv_heads", "rows", "width"), [(1, 1, 128), (2, 2, 128), (2, 3, 128), (1, 1, 64), (1, 2, 96)])
def test_heads_of_a_group_round_as_each_alone(backend, kv_heads, rows, width):
    """Many rows in one product, where torch multiplies up to 3 of a head: BLAS sums those in lanes, and rounds less."""
    check_case(Case(H=24, Hkv=kv_heads, Lq=rows, Lk=70, D=width), backend)


def test_sums_of_large_values_in_plain_torch():
    """They pass float32's range where the output does not; an infinite value that a row sees stays one."""
    case = Case(Lq=70, Lk=600, causal=True)
    q, k, v = make(case).args
    v = torch.where(torch.arange(v.shape[-1]) % 3 == 0, -3e38, 3e38).expand_as(v).clone()
    v[0, 0, 599, 1] = torch.inf
    state = attention(0.1 * q, k, v, causal=True, return_lse=True, backend="torch")
    check_call(dense(0.1 * q, k, v, Options(causal=True)), *state)
    assert state.out[:, :, :-1].isfinite().all()


def test_a_gradient_of_few_elements_is_judged_by_several_draws():
    """On the case's own input torch is lucky: its error in the one sink's gradient is a hundredth of its usual one."""
    case = draw_trained(Seeded(5364))
    made = make_gradients(case)
    got = made.run("torch")
    assert got["sinks"].numel() == 4
    got["sinks"] *= 1 + 1e-6
    judge_gradients(made, got)
    got["sinks"] *= 1 + 1e-4
    with pytest.raises(Mismatch, match="dsinks"):
        judge_gradients(made, got)


def test_a_gradient_from_few_rows_is_judged_by_several_draws():
    """Two rows, whose weights torch happens to round well: dv has 5575 elements, but no more errors than weights."""
    case = Case(form="varlen", B=1, H=2, Hkv=1, Lq=1, D=75, Dv=25, causal=True, scale=0.01, alibi="h", k_bias="1",
                sinks="none", offset=45, k_start=10, q_stride=3, lengths=(220,), q_lengths=(1,))  # fmt: skip
    made = make_gradients(case)
    got = made.run("cpu")
    judge_gradients(made, got)
    got["v"] *= 1 + 1e-5
    with pytest.raises(Mismatch, match="dv"):
        judge_gradients(made, got)


@pytest.mark.parametrize("kv", [{"k": "int8/32", "v": "int8/32"}, {"form": "paged", "page": 16, "lengths": (20, 30)}])
def test_gradients_of_what_has_none_are_refused(kv):
    with pytest.raises(InvalidArgument, match=r"has gradients|have no gradients"):
        make_gradients(Case(B=2, H=2, Lq=8, Lk=32, D=32, **kv))


@pytest.mark.parametrize("seed", range(48))
def test_gradients_of_calls_drawn_at_random(seed):
    case = draw_trained(Seeded(seed))
    made = make_gradients(case)
    if not made.call.problem.is_empty:
        judge_gradients(made, made.run("torch"))


@pytest.mark.parametrize("dim", [1, 3, 8])
def test_plain_torch_gives_the_same_bits_whatever_is_hidden_in_any_layout(dim):
    """A hidden NaN is taken out of a copy, which has strides of its own."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    q, k, v = draw(3, 33, 1, 8), draw(3, 65, 1, 8), draw(3, 65, 4, dim)
    bad = v.clone()
    bad[:, 60:] = torch.nan
    call = partial(attention, layout="blhd", backend="torch", mask=torch.arange(65)[None] < 60)
    assert torch.equal(call(q, k, v[:, :, :1]), call(q, k, bad[:, :, :1]))
