"""The Hopper backward kernel of wide heads, its own text run as plain Python (`gluon_sim.py`) in random order, against
the oracle's gradients. Wrong versions of it must be noticed.
"""

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import gluon_sim
from gluon_values import SimError
from hopper_bwd_sim import Wide
from tilewise.testing.case import Case
from tilewise.testing.check import Mismatch
from tilewise.testing.gradients import judge_gradients, make_gradients

KERNELS = vars(gluon_sim.load(places=gluon_sim.WIDE))
LATENT = {"D": 192, "Dv": 128, "dtype": "f16"}
FULL = {"D": 256, "dtype": "f16"}
LARGE = {"D": 512, "dtype": "f16"}
CASES = {
    "256, groups": Case(B=1, H=4, Hkv=2, Lq=200, **FULL),
    "192/128 causal, groups": Case(B=1, H=2, Hkv=1, Lq=300, causal=True, **LATENT),
    "256 window": Case(B=1, H=1, Lq=450, window=(130, 20), **FULL),
    "192/128 narrow window": Case(B=1, H=1, Lq=300, Lk=350, window=(10, 5), **LATENT),
    "256 packed": Case(B=3, H=1, form="varlen", q_lengths=(200, 0, 130), lengths=(200, 40, 300), causal=True, **FULL),
    "192/128 packed": Case(B=2, H=1, form="varlen", q_lengths=(70, 130), lengths=(33, 201), window=(40, 9), **LATENT),
    "256 lengths": Case(B=2, H=2, Lq=150, Lk=200, lengths=(137, 0), causal=True, **FULL),
    "192/128 lengths": Case(B=2, H=1, Lq=150, Lk=200, lengths=(137, 3), window=(99, None), **LATENT),
    "512 causal, groups": Case(B=1, H=2, Hkv=1, Lq=150, causal=True, **LARGE),
    "512 packed": Case(B=2, H=1, form="varlen", q_lengths=(70, 130), lengths=(33, 201), window=(40, 9), **LARGE),
    "264 lengths": Case(B=2, H=1, Lq=90, Lk=120, D=264, lengths=(101, 3), dtype="f16", window=(59, None)),
    "256 softcap": Case(B=1, H=2, Hkv=1, Lq=130, Lk=190, softcap=3.0, causal=True, **FULL),
    "192/128 softcap": Case(B=2, H=1, Lq=130, lengths=(99, 130), softcap=3.0, **LATENT),
    "512 softcap": Case(B=1, H=1, Lq=100, softcap=3.0, window=(50, 0), **LARGE),
    "256 rows that see nothing": Case(B=1, H=1, Lq=200, Lk=130, causal=True, **FULL),
    "160, 136": Case(B=1, H=1, Lq=70, D=160, Dv=136, dtype="f16", causal=True),
}


def simulate(case, kernels, seed=0):
    """A backward pass of clean inputs: what is not finite is the fix-up's."""
    made = make_gradients(case, slack=0.0, grads=("q", "k", "v"))
    for gradient in made.call.tensors.gradients().values():
        gradient.fill_(float("nan"))
    Wide(made.call.problem, made.call.tensors).run(kernels, seed=seed)
    judge_gradients(made, made.call.tensors.gradients())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, seed):
    simulate(CASES[name], KERNELS, seed)


RELEASE_Q = '    named_barrier("bar.arrive", U_EMPTY + u % a.S.u_stages, 288)\n'
RELEASE_V = '    named_barrier("bar.arrive", W_EMPTY + u % a.S.w_stages, 288)\n'
DX_DONE = "    done = warpgroup_mma_wait(0, deps=started)\n"
DP_DONE = "    dp = warpgroup_mma_wait(0, deps=(dp,))\n"
MUTANTS = {
    "P is read before it is there": ("256, groups", "consumer",
        '    named_barrier("bar.sync", P_READY + (u & 1), 256)\n', ""),
    "Q is released before dK": ("256, groups", "consumer", DX_DONE + RELEASE_Q, RELEASE_Q + DX_DONE),
    "V is released before dP": ("256, groups", "consumer", DP_DONE + RELEASE_V, RELEASE_V + DP_DONE),
    "a ring's wrong phase": ("192/128 causal, groups", "consumer", "(u // a.S.u_stages) & 1", "u * 0"),
    "causal one key off": ("256 lengths", "tile_scheduler", "hi = gl.minimum(row + w.shift + a.right + 1, hi)",
        "hi = gl.minimum(row + w.shift + a.right + 2, hi)"),
    "causal one row off": ("192/128 causal, groups", "tile_scheduler", "lo = row - w.shift - a.right",
        "lo = row - w.shift - a.right + 1"),
    "a window one key too long": ("192/128 packed", "tile_scheduler", "lo = row + w.shift - a.left",
        "lo = row + w.shift - a.left - 1"),
    "a window one row too long": ("192/128 packed", "tile_scheduler", "hi = row - w.shift + a.left + 1",
        "hi = row - w.shift + a.left + 2"),
    "an edge's block left out": ("256 window", "tile_scheduler", "first = gl.minimum(gl.maximum(lo, 0) // BI, last)",
        "first = gl.minimum(gl.cdiv(gl.maximum(lo, 0), BI), last)"),
    "the last block of keys left out": ("256, groups", "tile_scheduler", "last = gl.cdiv(kv_len, BI)",
        "last = kv_len // BI"),
    "keys past the length": ("192/128 lengths", "epilogue", "n = w.end if a.S.of_queries else w.kv_len", "n = w.end"),
    "one head of the group": ("256, groups", "tile_scheduler", "w.head * a.group + g", "w.head * a.group"),
    "another sequence's statistics": ("256 packed", "tile_scheduler", "q_start // a.S.stats_block + seq",
        "q_start // a.S.stats_block"),
    "dS is read before it is there": ("512 causal, groups", "split",
        '            named_barrier("bar.sync", DS_READY, 256)\n', "            pass\n"),
    "a chunk is released before it is multiplied": ("512 causal, groups", "split",
        "    g0 = warpgroup_mma_wait(1, deps=(g0,))\n    ring.release(n)\n",
        "    ring.release(n)\n    g0 = warpgroup_mma_wait(1, deps=(g0,))\n"),
    "statistics are released by one consumer": ("512 causal, groups", "split", "1 if OF_V else 2", "1"),
    "a half's place": ("264 lengths", "split", "w.top, (2 * C + k) * D, D)", "w.top, k * D, D)"),
    "the lse is released before it is read": ("256 softcap", "consumer",
        "    if not a.S.softcap:\n        named", "    if True:\n        named"),
    "softcap's derivative left out": ("192/128 softcap", "consumer", "q = p * slope", "q = p"),
    "dV with softcap's derivative": ("512 softcap", "split", "            q = p\n", ""),
    "delta left out": ("192/128 lengths", "consumer", "(dp + rows[3][:, None])", "dp"),
    "scale twice": ("160, 136", "epilogue", "grads[0], top, D) * a.scale", "grads[0], top, D) * a.scale * a.scale"),
    "the tail's place": ("192/128 lengths", "epilogue", "buf.x1.index(C), top, D,", "buf.x1.index(C), top, 0,"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_noticed(name):
    case, file, old, new = MUTANTS[name]
    kernels = vars(gluon_sim.load({f"wide.{file}": [(old, new)]}, gluon_sim.WIDE))
    with pytest.raises((SimError, Mismatch)):
        simulate_often(CASES[case], kernels)


def simulate_often(case, kernels):
    for seed in range(4):
        simulate(case, kernels, seed)
