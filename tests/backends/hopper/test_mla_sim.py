"""Latent decode run as plain Python (`tests/helpers/mla_sim.py`): its result, whatever the order of its warps."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import mla_sim
from gluon_values import Pointer, SimError, raw
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
    replace(BASE, B=3, H=5, Lq=2, lengths=(2, 130, 450), causal=True, page=16, sinks="mixed"),
    replace(BASE, B=3, H=8, lengths=(1, 900, 300)),  # five fragments, of which the first does not begin its run
    replace(BASE, B=2, H=16, Lq=12, lengths=(5, 140), causal=True),
    Case(H=16, Hkv=1, Lq=2, Lk=300, D=576, Dv=512, dtype="f16", latent=True, lengths=(300, 129), causal=True),
    Case(H=16, Hkv=1, Lq=1, Lk=150, D=576, Dv=512, dtype="f16", latent=True, layout="blhd"),
]
FP8 = replace(
    BASE, B=2, H=5, Lq=2, lengths=(300, 129), causal=True, indices="140", k="fp8_latent/128", v="fp8_latent/128"
)
CHOSEN = [
    replace(BASE, B=2, H=5, Lq=3, lengths=(300, 129), causal=True, indices="140"),
    replace(BASE, B=3, H=70, Lq=1, lengths=(0, 700, 33), page=16, indices="300", sinks="mixed"),
    Case(B=1, H=3, Hkv=1, Lq=4, Lk=300, D=576, Dv=512, dtype="f16", latent=True, indices="130", sinks=True),
    Case(H=2, Hkv=1, Lq=11, Lk=90, D=576, Dv=512, dtype="f16", latent=True, indices="40", layout="blhd", causal=True),
]


def simulated(inputs, kernels, seed=0, planned=True, **ways):
    call = inputs.checked(return_lse=True)
    assert config.is_latent(call.problem)
    assert (config.refusal(call.problem) is None) is planned
    call.out.fill_(float("nan"))
    call.lse.fill_(float("nan"))
    mla_sim.run(call, kernels, seed, **ways)
    return call


@pytest.fixture(scope="module")
def kernels():
    return mla_sim.load()


@pytest.mark.parametrize("case", CASES + CHOSEN, ids=str)
def test_results_are_right(case, kernels):
    call = simulated(make(case), kernels, seed=len(str(case)))
    check_call(call, call.tensors.out, call.tensors.lse)


def test_any_program_may_be_the_last_of_a_sequence(kernels):
    for seed in range(4):
        call = simulated(make(CASES[5]), kernels, seed)
        check_call(call, call.tensors.out, call.tensors.lse)


@pytest.mark.parametrize("heads", [8, 70])
def test_maxima_may_rise_by_many_powers_of_2(heads, kernels):
    inputs = make(replace(BASE, B=1, H=heads, lengths=(700,)))
    inputs.args[0].mul_(20)
    call = simulated(inputs, kernels)
    check_call(call, call.tensors.out, call.tensors.lse)


def spoilt(stray, place, heads):
    """Four queries, and something in the key that only the last two see."""
    inputs = make(replace(BASE, B=3, H=heads, Lq=4, lengths=(300, 130, 66), causal=True))
    k, table = inputs.args[1], inputs.args[3]
    for b, n in enumerate((300, 130, 66)):
        k[int(table[b, (n - 2) // 64]), (n - 2) % 64, 0, place] = stray
    return inputs


@pytest.mark.parametrize(
    "case", [FP8, replace(FP8, B=1, H=70, Lq=1, lengths=(700,), page=16, causal=False, sinks=True)], ids=str
)
def test_rows_in_float8_are_right(case, kernels):
    # NumPy has no bfloat16, which is all that the kernels are planned for.
    call = simulated(make(case), kernels, seed=1, planned=False)
    check_call(call, call.tensors.out, call.tensors.lse)


def uneven(case):
    """Rows whose groups of columns have scales of other sizes, zeros and signs among them."""
    inputs = make(case)
    call = inputs.checked(return_lse=True)
    scales = call.tensors.k[..., 512:528].view(torch.float32)  # of the rows' own memory
    scales *= torch.tensor([1.0, 0.05, 3.0, 0.5])
    scales[:, :, ::3] *= torch.tensor([1.0, 1e-3, -0.2, 1.0])
    scales[:, :, 1::5, 2] = 0
    scales[:, :, 2::5, 0] = 1e-33
    return inputs


@pytest.mark.parametrize("shape", ["as they come", "uneven"])
def test_rows_in_float8_with_uneven_scales_are_right(shape, kernels):
    for case in (FP8, replace(FP8, B=1, H=70, Lq=1, lengths=(700,), page=16, causal=False, sinks=True)):
        inputs = make(case) if shape == "as they come" else uneven(case)
        call = simulated(inputs, kernels, seed=2, planned=False)
        check_call(call, call.tensors.out, call.tensors.lse)


@pytest.mark.parametrize("place", [3, 300, 570])
@pytest.mark.parametrize("stray", [float("nan"), float("inf")])
@pytest.mark.parametrize("heads", [4, 16])
def test_hidden_keys_do_not_matter(heads, stray, place, kernels):
    clean, call = (simulated(spoilt(x, place, heads), kernels) for x in (0.0, stray))
    for name in ("out", "lse"):
        x, y = getattr(call.tensors, name)[:, :, :2], getattr(clean.tensors, name)[:, :, :2]
        assert torch.equal(x, y)
        assert x.isfinite().all()
    if stray != stray:
        assert call.tensors.out[:, :, 2:].isnan().all()
        assert call.tensors.lse[:, :, 2:].isnan().all()


SEVERAL = [20 + i % 9 for i in range(300)]
SIZES = [([32] * 128, 66, 64), ([64] * 64, 66, 64), ([32] * 32, 33, 32), ([32] * 128, 132, 32), ([256] * 16, 132, 32)]
SIZES += [([512], 66, 8), (SEVERAL, 66, -(-sum(SEVERAL) // 66)), ([1] * 129 + [40], 5, 34)]


@pytest.mark.parametrize(("pairs", "splits", "size"), SIZES, ids=lambda x: str(x)[:20])
def test_runs_cover_the_pairs_of_all_sequences(pairs, splits, size, kernels):
    lengths = Pointer(np.array([128 * n - 5 for n in pairs], np.int32))
    a = SimpleNamespace(
        S=SimpleNamespace(lengths=True, gather=False), LENGTHS=lengths, batch=len(pairs), splits=splits, kv_len=0
    )
    places = [(seq, pair) for seq, n in enumerate(pairs) for pair in range(n)]
    covered = 0
    for split in range(splits):
        seq, first, left, own = (int(raw(x)) for x in kernels.tile_scheduler.any_run_of(a, split))
        assert own == size
        assert left == min(size, len(places) - covered)
        if left:
            assert (seq, first) == places[covered]
        covered += left
    assert covered == len(places)


MUTANTS = {
    "sinks are left out": ("epilogue", "if a.S.sinks:", "if False:"),
    "hidden values are kept": ("softmax", '(gl.abs(v.to(gl.float32)) < float("inf"))', "True"),
    "every query sees all keys": (
        "consumer",
        "hi = w.n - gl.maximum(a.q_len - 1 - own_query, 0)",
        "hi = w.n + own_query * 0",
    ),
    "slack is kept": ("softmax", "if masked & (base + 64 > first):", "if masked & (base > first):"),
    "pages of another sequence": (
        "producer",
        "seq.to(gl.int64) * a.table_b + at",
        "at",
    ),
    "a maximum is not passed on": (
        "consumer",
        "m, changed = received(sh, 1)",
        "m, changed = m_new, received(sh, 1)[1]",
    ),
    "half of the weights": (
        "consumer",
        "found = (warpgroup_mma(sh.p.index(0), sh.k.index(2 * b + C), o[0], is_async=True),)",
        "found = o",
    ),
    "outputs are not rescaled": ("consumer", "if changed != 0:", "if False:"),
    "queries are replaced while the output leaves": ("epilogue", "tma_store_wait(0)", "pass"),
}
OF_FEW = {
    "half a sequence": ("narrow", " + sh.parts[0].index(1 - C).load(TURNED) * its[None, :]", ""),
    "sums of half a sequence": ("narrow", " + sh.l.index(1 - C).load(COLUMN) * its", ""),
    "both consumers by one maximum": ("narrow", "its = alpha_of(a, other, m_new)", "its = own"),
    "few rows are not rescaled": ("narrow", "if gl.max(higher.to(gl.int32), 0) != 0:", "if False:"),
    "few rows see all keys": ("narrow", "key[:, None] < hi[None, :]", "key[:, None] < w.n"),
    "half of the hidden values is kept": (
        "narrow",
        "for half in gl.static_range(2):",
        "for half in gl.static_range(1):",
    ),
    "a block is replaced while it is in use": (
        "narrow",
        "    o = warpgroup_mma_wait(0, deps=(o0, o1))\n    mbarrier.arrive(sh.free[C], count=1)\n",
        "    mbarrier.arrive(sh.free[C], count=1)\n    o = warpgroup_mma_wait(0, deps=(o0, o1))\n",
    ),
}
OF_FEW |= {
    "a fragment is left out": ("inside", "for f in range(fragments):", "for f in range(1, fragments):"),
    "the first fragment is another's": ("inside", " + (w.first % size != 0).to(gl.int32)", ""),
    "combined before all is there": ("inside", "2 * fragments - 1:", "2 * fragments - 2:"),
    "counters are left as they are": ("inside", "gl.store(a.COUNTERS + w.seq, 0)", "pass"),
    "sinks of combined rows are left out": ("inside", "if a.S.sinks:", "if False:"),
}
OF_CHOSEN = {
    "indices of another query": ("gather", "(seq % a.q_len).to(gl.int64) * a.i_l", "0"),
    "keys past the end": ("gather", "(position < limit)", "(position < limit + 1)"),
    "flags of another pair": ("scores", "sh.ok[0].index((u & 1) * 2 + b)", "sh.ok[0].index(((u & 1) ^ 1) * 2 + b)"),
    "output of another query": ("tile_scheduler", "query = seq % a.q_len", "query = seq * 0"),
    "scales of another group": ("scores", "sh.scales[4 * VALUES + group]", "sh.scales[4 * VALUES]"),
    "values without scales": (
        "consumer",
        "p1 = own * scales_of(sh, u, b, 2 * C + 1, OPERAND, 1)[None, :]",
        "p1 = own",
    ),
    "ratios the wrong way round": ("gather", "kept[1] / kept[2]", "kept[2] / kept[1]"),
    "the last scale left out": ("gather", "kept[2] / kept[3], kept[3])", "kept[2] / kept[3], kept[3] * 0 + 1)"),
    "ratios for scales of values": ("scores", "4 * VALUES + group", "group"),
    "positions of another block": ("gather", "place_of_block(a, n + 3)", "place_of_block(a, n + 2)"),
    "the other block's weights by an old maximum": ("consumer", "return o, m_new, l * alpha", "return o, m, l * alpha"),
    "ratios of scales that are 0": ("gather", "gl.where(gl.abs(scales[g]) < least, least, scales[g])", "scales[g]"),
}


@pytest.mark.parametrize("name", [*MUTANTS, *OF_FEW, *OF_CHOSEN])
def test_mutants_are_rejected(name):
    file, old, new = (MUTANTS | OF_FEW | OF_CHOSEN)[name]
    kernels = mla_sim.load({file: [(old, new)]})

    def check():
        if name in OF_CHOSEN:
            test_results_are_right(CHOSEN[0], kernels)
            test_rows_in_float8_are_right(FP8, kernels)
            test_rows_in_float8_with_uneven_scales_are_right("uneven", kernels)
            return
        few = name in OF_FEW
        if few:
            test_any_program_may_be_the_last_of_a_sequence(kernels)
        test_results_are_right(CASES[4 if few else 1], kernels)
        test_results_are_right(CASES[0], kernels)
        test_maxima_may_rise_by_many_powers_of_2(8 if few else 70, kernels)
        for place in (3, 300):
            test_hidden_keys_do_not_matter(4 if few else 16, float("nan"), place, kernels)

    with pytest.raises((Mismatch, SimError, AssertionError)):
        check()
