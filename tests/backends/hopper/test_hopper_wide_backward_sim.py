"""The Hopper backward kernel of wide heads, its own text run as plain Python (`gluon_sim.py`) in random order, against
the oracle's gradients. Wrong versions of it must be noticed.
"""

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import gluon_sim
from hopper_bwd_sim import Wide
from tilewise.testing.case import Case
from tilewise.testing.gradients import judge_gradients, make_gradients

KERNELS = vars(gluon_sim.load(places=gluon_sim.WIDE))
LATENT = {"D": 192, "Dv": 128, "dtype": "f16"}
FULL = {"D": 256, "dtype": "f16"}
CASES = {
    "256, groups": Case(B=1, H=4, Hkv=2, Lq=200, **FULL),
    "192/128 causal, groups": Case(B=1, H=2, Hkv=1, Lq=300, causal=True, **LATENT),
    "256 window": Case(B=1, H=1, Lq=450, window=(130, 20), **FULL),
    "192/128 narrow window": Case(B=1, H=1, Lq=300, Lk=350, window=(10, 5), **LATENT),
    "256 packed": Case(B=3, H=1, form="varlen", q_lengths=(200, 0, 130), lengths=(200, 40, 300), causal=True, **FULL),
    "192/128 packed": Case(B=2, H=1, form="varlen", q_lengths=(70, 130), lengths=(33, 201), window=(40, 9), **LATENT),
    "256 lengths": Case(B=2, H=2, Lq=150, Lk=200, lengths=(137, 0), causal=True, **FULL),
    "192/128 lengths": Case(B=2, H=1, Lq=150, Lk=200, lengths=(137, 3), window=(99, None), **LATENT),
    "160, 136": Case(B=1, H=1, Lq=70, D=160, Dv=136, dtype="f16", causal=True),
}


def simulate(case, kernels, seed=0, slack=0.0):
    """A backward pass of clean inputs: what is not finite is the fix-up's."""
    made = make_gradients(case, slack=slack, grads=("q", "k", "v"))
    for gradient in made.call.tensors.gradients().values():
        gradient.fill_(float("nan"))
    Wide(made.call.problem, made.call.tensors).run(kernels, seed=seed)
    judge_gradients(made, made.call.tensors.gradients())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, seed):
    simulate(CASES[name], KERNELS, seed)
