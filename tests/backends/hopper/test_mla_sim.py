"""Latent decode run as plain Python (`tests/helpers/mla_sim.py`): its result, whatever the order of its warps."""

import sys
from dataclasses import replace

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import mla_sim
from gluon_values import SimError
from tilewise.backends.hopper.mla import config
from tilewise.testing.case import Case, make
from tilewise.testing.check import Mismatch, check_call

BASE = Case(
    form="paged", B=4, H=16, Hkv=1, Lq=1, lengths=(0, 1, 200, 700), D=576, Dv=512, dtype="f16", page=64, latent=True
)
CASES = [
    BASE,
    replace(BASE, B=2, H=70, Lq=2, lengths=(300, 129), causal=True, sinks=True),
    replace(BASE, B=3, H=5, Lq=3, lengths=(2, 130, 64), causal=True, page=16, sinks="mixed"),
    replace(BASE, B=2, H=3, Lq=2, lengths=(900, 257), page=128),
    replace(BASE, B=2, H=16, Lq=12, lengths=(5, 140), causal=True),
    Case(H=16, Hkv=1, Lq=2, Lk=300, D=576, Dv=512, dtype="f16", latent=True, lengths=(300, 129), causal=True),
    Case(H=16, Hkv=1, Lq=1, Lk=150, D=576, Dv=512, dtype="f16", latent=True, layout="blhd"),
]


def simulated(inputs, kernels, seed=0):
    call = inputs.checked(return_lse=True)
    assert config.is_latent(call.problem)
    assert config.refusal(call.problem) is None
    call.out.fill_(float("nan"))
    call.lse.fill_(float("nan"))
    mla_sim.run(call, kernels, seed)
    return call


@pytest.fixture(scope="module")
def kernels():
    return mla_sim.load()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_right(case, kernels):
    call = simulated(make(case), kernels, seed=len(str(case)))
    check_call(call, call.tensors.out, call.tensors.lse)


def spoilt(stray, place):
    """Four queries, and something in the key that only the last two see."""
    inputs = make(replace(BASE, B=3, Lq=4, lengths=(300, 130, 66), causal=True))
    k, table = inputs.args[1], inputs.args[3]
    for b, n in enumerate((300, 130, 66)):
        k[int(table[b, (n - 2) // 64]), (n - 2) % 64, 0, place] = stray
    return inputs


@pytest.mark.parametrize("place", [3, 300, 570])
@pytest.mark.parametrize("stray", [float("nan"), float("inf")])
def test_hidden_keys_do_not_matter(stray, place, kernels):
    clean, call = (simulated(spoilt(x, place), kernels) for x in (0.0, stray))
    for name in ("out", "lse"):
        x, y = getattr(call.tensors, name)[:, :, :2], getattr(clean.tensors, name)[:, :, :2]
        assert torch.equal(x, y)
        assert x.isfinite().all()
    if stray != stray:
        assert call.tensors.out[:, :, 2:].isnan().all()
        assert call.tensors.lse[:, :, 2:].isnan().all()


MUTANTS = {
    "sinks are left out": ("epilogue", "if a.S.sinks:", "if False:"),
    "hidden values are kept": ("consumer", '(gl.abs(v.to(gl.float32)) < float("inf"))', "True"),
    "every query sees all keys": (
        "consumer",
        "hi = w.n - gl.maximum(a.q_len - 1 - own_query, 0)",
        "hi = w.n + own_query * 0",
    ),
    "slack is kept": ("consumer", "if base + 64 > first:", "if base > first:"),
    "pages of another sequence": (
        "producer",
        "seq.to(gl.int64) * a.table_b + at",
        "at",
    ),
    "a maximum is not passed on": ("consumer", "m = sh.maximum(1).load(ROW)", "m = m_new"),
    "half of the weights": ("consumer", "o = warpgroup_mma(sh.p.index(0), sh.k.index(1), o, is_async=True)", "pass"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_rejected(name):
    file, old, new = MUTANTS[name]
    kernels = mla_sim.load({file: [(old, new)]})

    def check():
        test_results_are_right(CASES[1], kernels)
        test_results_are_right(CASES[0], kernels)
        test_hidden_keys_do_not_matter(float("nan"), 3, kernels)

    with pytest.raises((Mismatch, SimError, AssertionError)):
        check()
