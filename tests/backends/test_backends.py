"""Each backend against the conformance suite."""

import pytest

from conformance import BackwardConformance, LatentRows
from tilewise.testing.case import Case
from tilewise.testing.check import check_case
from tilewise.testing.drawing import Seeded, draw_trained
from tilewise.testing.gradients import judge_gradients, make_gradients


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


@pytest.mark.parametrize("seed", range(48))
def test_gradients_of_calls_drawn_at_random(seed):
    case = draw_trained(Seeded(seed))
    made = make_gradients(case)
    if not made.call.problem.is_empty:
        judge_gradients(made, made.run("torch"))
