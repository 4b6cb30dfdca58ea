"""The Hopper backward kernel with an additive mask, and the sums of a broadcast one's gradient, run as plain Python.

Wrong versions of them must be noticed.
"""

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import gluon_sim
from gluon_values import SimError
from hopper_bwd_sim import Backward
from tilewise.testing.case import Case
from tilewise.testing.check import Mismatch
from tilewise.testing.gradients import judge_gradients, make_gradients

KERNELS = vars(gluon_sim.load(places=gluon_sim.BACKWARD))
HALF = {"dtype": "f16", "mask_kind": "f16"}
CASES = {
    "dense": Case(B=1, H=2, Lq=300, Lk=200, D=64, mask="bhqk", **HALF),
    "dense, D128, window": Case(B=2, H=1, Lq=200, Lk=264, D=128, mask="bhqk", window=(130, 20), **HALF),
    "dense, lengths, rows that see nothing": Case(
        B=2, H=1, Lq=150, Lk=200, D=64, mask="bhqk", pattern="rows", lengths=(137, 0), **HALF
    ),
    "dense, softcap": Case(B=1, H=1, Lq=150, Lk=200, D=64, mask="bhqk", softcap=5.0, **HALF),
    "dense, least numbers, float32": Case(
        B=1, H=1, Lq=150, Lk=200, D=64, mask="bhqk", pattern="least", dtype="f16", mask_kind="f32"
    ),
    "dense, least numbers": Case(B=1, H=2, Lq=300, Lk=200, D=64, mask="bhqk", pattern="least", **HALF),
    "dense, odd rows": Case(B=1, H=2, Hkv=1, Lq=150, Lk=203, D=128, mask="bhqk", causal=True, **HALF),
    "shared by all": Case(B=2, H=2, Hkv=1, Lq=200, Lk=272, D=64, mask="qk", **HALF),
    "shared by batch rows": Case(B=3, H=2, Lq=130, Lk=304, D=128, mask="hqk", causal=True, offset=10, **HALF),
    "shared by heads": Case(B=2, H=3, Lq=150, Lk=200, D=64, mask="b1qk", window=(60, 10), dtype="f16", mask_kind="f32"),
    "shared, softcap": Case(B=2, H=2, Lq=70, Lk=200, D=128, mask="qk", softcap=5.0, **HALF),
    "shared, least numbers": Case(B=1, H=5, Lq=100, Lk=140, D=64, mask="qk", pattern="least", **HALF),
}
MASK = ("q", "k", "v", "mask")


def simulate(case, kernels, seed=0, programs=0, **changes):
    made = make_gradients(case, slack=0.0, grads=MASK)
    for gradient in made.call.tensors.gradients().values():
        gradient.fill_(float("nan"))
    ran = Backward(made.call.problem, made.call.tensors, **changes)
    ran.run(kernels, programs, seed)
    judge_gradients(made, made.call.tensors.gradients())
    return ran.spec


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    case = CASES[name]
    s = simulate(case, KERNELS)
    aligned = (case.Lk or case.Lq) % 8 == 0 and case.mask_kind == "f16"
    assert s.mask_tiles == aligned
    assert s.dmask_tiles == (aligned and case.mask == "bhqk" and not case.softcap)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["dense", "dense, D128, window", "shared by batch rows"])
def test_other_orders_and_a_program_for_each_key_block(name, seed):
    simulate(CASES[name], KERNELS, seed + 1, programs=seed, persistent=seed == 1)


@pytest.mark.parametrize("near", [False, True])
def test_each_thread_reads_its_own_cells_where_tiles_cannot_be_copied(near):
    simulate(CASES["dense"], KERNELS, mask_tiles=False, dmask_tiles=False, near=near)


def hidden_nan(kernels):
    """NaN in all that is of queries which the mask hides, and of keys that no query has reached."""
    case = Case(B=2, H=2, Lq=130, Lk=136, D=64, mask="qk", pattern="rows", causal=True, offset=0, **HALF)
    made = make_gradients(case, slack=0.0, grads=("mask",))
    t = made.call.tensors
    t.dmask.fill_(float("nan"))
    t.forward.k[:, :, 130:] = t.forward.v[:, :, 130:] = float("nan")
    t.forward.q[:, :, ::3] = t.dout[:, :, ::3] = float("nan")
    Backward(made.call.problem, t).run(kernels)
    assert (t.dmask[0, 0].triu(1) == 0).all()
    judge_gradients(made, t.gradients())


def test_sums_keep_out_what_is_hidden():
    hidden_nan(KERNELS)


MUTANTS = {
    "the mask's tile is not waited for": ("bwd.mask", "        mbarrier.wait(buf.mask_full.index(0), u & 1)\n", ""),
    "the mask's tile is loaded over": ("bwd.producer", '        named_barrier("bar.sync", MASK_EMPTY, 288)\n',
                                       "        pass\n"),
    "the mask of the other consumer": ("bwd.mask", "buf.mask.index(C + (u >> 30))", "buf.mask.index(1 - C)"),
    "the first head's mask": ("bwd.producer", "head * a.mask_heads", "0"),
    "dQ is written while dS leaves": ("bwd.consumer", "            tma_store_wait(0)\n        named_barrier",
                                      "            pass\n        named_barrier"),
    "dQ is written while dS is read": (
        "bwd.consumer", 'bar.sync", DS_EMPTY, 256)\n    else:\n        wait',
        'bar.arrive", DS_EMPTY, 256)\n    else:\n        wait',
    ),
    "dS is written while dQ leaves": (
        "bwd.products", "wait(buf.dq_empty.index(u % a.S.dq_stages), ((u // a.S.dq_stages) & 1) ^ 1)",
        "wait(buf.dq_empty.index(u % a.S.dq_stages), 1)",
    ),
    "no bias": ("bwd.products", "u, q, s, not huge, factors", "u, q, s, False, factors"),
    "bias of another scale": ("bwd.products", "i, g, C) * (1.0 / a.scale)", "i, g, C)"),
    "a huge lse is not told": ("bwd.producer", "gl.load(a.HUGE + block)", "0"),
    "a huge lse's bias is added twice": ("bwd.products", "u, q, s, not huge, factors", "u, q, s, True, factors"),
    "the mask's tile is released twice": ("bwd.products", "        if not huge:\n            release_mask(a)",
                                          "        release_mask(a)"),
    "sums: no bias": ("bwd.mask_sums", "wide(a, cells) * factor", "x * 0.0"),
    "sums: a huge lse is not told": ("bwd.mask_sums", "gl.load(a.HUGE + block)", "0"),
    "sums: a huge lse's bias is added twice": ("bwd.mask_sums", "factor *= 0.0", "factor *= 1.0"),
    "sums: without lse": ("bwd.mask_sums", "s = warpgroup_mma(factors, lse", "warpgroup_mma(factors, lse"),
    "dS of another place": ("bwd.consumer", "i * BM, w.n * 128 + C * 64]", "i * BM, w.n * 128]"),
    "no derivative of the softcap": ("bwd.consumer", "if a.S.softcap and a.S.dmask:", "if a.S.softcap and False:"),
    "the least bias overflows": ("bwd.mask", "    return (gl.fma(x, factor, bias) + minus_lse) * LOG2E",
                                 "    return gl.fma(x, factor * LOG2E, bias * LOG2E) + minus_lse * LOG2E"),
    "no mask": ("bwd.mask", "(gl.fma(x, factor, bias) + minus_lse)", "(x * factor + minus_lse)"),
    "a row of cells further": ("bwd.mask", "X = X + row.to(gl.int64)", "X = X + (row + 1).to(gl.int64)"),
    "sums: V is not waited for": ("bwd.mask_sums", "wait(buf.vo_full.index(n), (u // STAGES) & 1)",
                                  "wait(buf.vo_full.index(n), 1 - ((u // STAGES) & 1))"),
    "sums: a pair is left out": ("bwd.mask_sums", "pairs = a.pairs + pid * 0", "pairs = a.pairs - 1 + pid * 0"),
    "sums: without delta": ("bwd.mask_sums", "slice(16, 16, 1)", "slice(0, 16, 1)"),
    "sums: K is loaded over": ("bwd.mask_sums", '"bar.sync", KQ_EMPTY + s', '"bar.arrive", KQ_EMPTY + s'),
    "sums: V is loaded over": ("bwd.mask_sums", '"bar.sync", VO_EMPTY + s', '"bar.arrive", VO_EMPTY + s'),
    "sums: a tile is skipped": ("bwd.mask_sums", "a.S.BM - 1 + a.shift + a.right, 0", "a.shift + a.right, 0"),
    "sums: the other KV head": ("bwd.mask_sums", "head // a.group", "head % 1"),
}  # fmt: skip
NAN_MUTANTS = {
    "a hidden row": ("bwd.mask_sums", 'cells) != float("-inf")', "cells) == wide(a, cells)"),
    "a key in the future": ("bwd.mask_sums", "seen = seen & (key <= row + a.shift + a.right)", "pass"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_noticed(name):
    file, old, new = MUTANTS[name]
    kernels = vars(gluon_sim.load({file: [(old, new)]}, gluon_sim.BACKWARD))
    with pytest.raises((SimError, Mismatch, RuntimeWarning)):  # NumPy's, of what is not finite
        simulate_all(kernels, name.startswith("sums"))


def simulate_all(kernels, shared):
    for name, case in CASES.items():
        for seed in (0, 1, 5) if name.startswith("shared") == shared else ():
            simulate(case, kernels, seed)


@pytest.mark.parametrize("name", NAN_MUTANTS)
def test_what_is_hidden_is_noticed(name):
    file, old, new = NAN_MUTANTS[name]
    with pytest.raises((SimError, Mismatch, AssertionError)):
        hidden_nan(vars(gluon_sim.load({file: [(old, new)]}, gluon_sim.BACKWARD)))
