"""The Hopper backward kernel's own text, run as plain Python (`gluon_sim.py`) in random order, against the oracle's
gradients. Wrong versions of it must be noticed.
"""

import sys
from unittest.mock import patch

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

import gluon_sim
from gluon_values import SimError
from hopper_bwd_sim import Backward
from tilewise.backends.hopper.bwd import config
from tilewise.testing.case import Case
from tilewise.testing.check import Mismatch
from tilewise.testing.gradients import judge_gradients, make_gradients

KERNELS = vars(gluon_sim.load(places=gluon_sim.BACKWARD))
CASES = {
    "D64": Case(B=1, H=2, Lq=200, D=64, dtype="f16"),
    "D128 causal, groups": Case(B=1, H=2, Hkv=1, Lq=300, D=128, dtype="f16", causal=True),
    "window": Case(B=1, H=1, Lq=500, D=64, dtype="f16", window=(130, 20)),
    "D128 window": Case(B=1, H=1, Lq=300, D=128, dtype="f16", window=(130, 20)),
    "a stripe": Case(
        B=1,
        H=1,
        Lq=300,
        Lk=400,
        D=64,
        dtype="f16",
        causal=True,
        window=900,
        k_start=2,
        k_stride=4,
        q_stride=4,
        offset=401,
    ),
    "packed": Case(
        B=3, H=1, D=64, form="varlen", q_lengths=(200, 0, 130), lengths=(200, 40, 300), dtype="f16", causal=True
    ),
    "rows that see nothing": Case(B=1, H=1, Lq=300, Lk=200, D=64, dtype="f16", causal=True),
    "D128 rows that see nothing": Case(B=1, H=1, Lq=300, Lk=200, D=128, dtype="f16", causal=True),
    "lengths, softcap": Case(B=2, H=1, D=64, Lq=150, Lk=200, lengths=(137, 0), dtype="f16", softcap=5.0),
}


def simulate(case, kernels, programs=0, seed=0, splits=1, **changes):
    """A backward pass of clean inputs: what is not finite is the fix-up's."""
    made = make_gradients(case, slack=0.0, grads=("q", "k", "v"))
    for gradient in made.call.tensors.gradients().values():
        gradient.fill_(float("nan"))
    with patch.object(config, "splits_of", lambda p, target: splits):
        Backward(made.call.problem, made.call.tensors, **changes).run(kernels, programs, seed)
    judge_gradients(made, made.call.tensors.gradients())


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    simulate(CASES[name], KERNELS)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", list(CASES)[1:])
def test_persistent_programs(name, seed):
    simulate(CASES[name], KERNELS, 2, seed, persistent=True, converts=False)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_forms(name, direct):
    near = CASES[name].softcap is not None
    simulate(CASES[name], KERNELS, 2, 7, persistent=True, converts=True, direct=direct, near_tanh=near)


SPLIT = ("D64", "D128 causal, groups", "D128 window", "a stripe", "lengths, softcap")


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("name", SPLIT)
def test_split_key_blocks(name, splits):
    simulate(CASES[name], KERNELS, 2, splits, splits)


MUTANTS = {
    "dQ is read before its last sum": ("bwd.converter", "w.turn(a, i) + 1", "w.turn(a, i)"),
    "dQ's last sum is another one": ("bwd.tile_scheduler", "+ a.right) >> 7) + 1)", "+ a.right) >> 7))"),
    "a piece is overwritten before it has left": ("bwd.converter", "tma_store_wait(0)  # the next", "pass  # the next"),
    "a row too many of dQ": ("bwd.converter", "(rows < w.q_len)", "(rows < w.q_len + 1)"),
    "the next piece in the place of this one": ("bwd.converter", "n // a.S.pieces) & 1", "n // a.S.pieces + 1) & 1"),
    "K is loaded before it is free": ("bwd.producer", "        mbarrier.wait(buf.kv_empty.index(0), (n - 1) & 1)\n",
                                      "        pass\n"),
    "K's barrier in the wrong phase": ("bwd.consumer", "mbarrier.wait(buf.k_full.index(0), n & 1)",
                                       "mbarrier.wait(buf.k_full.index(0), 0)"),
    "half a block that is seen left out": ("bwd.tile_scheduler", "seen &= (i + 1) * a.S.BM >", "seen &= i * a.S.BM >"),
    "half a block of a window left out": ("bwd.tile_scheduler", "key + 63 - self.shift", "key - self.shift"),
    "dS is written while it is read": (
        "bwd.consumer", '    if not a.S.mask:\n        named_barrier("bar.sync", DS_EMPTY + C, 256)\n', "",
    ),
    "each reducer takes the other's block": ("bwd.reducer", "skipped = (base + R) & 1", "skipped = R"),
    "dQ in another order": ("bwd.tile_scheduler", " turn -= gl.maximum(", " turn -= 1 + gl.maximum("),
    "a window one row too long": ("bwd.consumer", "hi = key - w.shift + a.left + 1", "hi = key - w.shift + a.left + 2"),
    "causal one row off": ("bwd.consumer", "lo = key - w.shift - a.right", "lo = key - w.shift - a.right + 1"),
    "the last block of rows left out": ("bwd.tile_scheduler", "last = gl.cdiv(q_len, BM)", "last = q_len // BM"),
    "keys past the length": ("bwd.consumer", "lo = gl.where(key < w.kv_len, lo, 0x7FFFFFF)", "lo = lo + 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_noticed(name):
    file, old, new = MUTANTS[name]
    kernels = vars(gluon_sim.load({file: [(old, new)]}, gluon_sim.BACKWARD))
    with pytest.raises((SimError, Mismatch)):
        simulate_all(kernels)


def simulate_all(kernels):
    for case in ("D128 window", "window", "D128 causal, groups", "lengths, softcap"):
        for seed in (0, 1, 5):
            simulate(CASES[case], kernels, 1, seed, persistent=True, converts=seed > 0, direct=seed == 5)
    simulate(CASES["packed"], kernels, 1, 1, persistent=True, converts=True)


SPLIT_MUTANTS = {
    "query blocks of another split": ("bwd.tile_scheduler", "i = i * a.splits + self.split", "i = i * a.splits"),
    "one query block after the other": ("bwd.tile_scheduler", "        down *= a.splits\n", "        pass\n"),
    "an edge in units of all blocks": ("bwd.tile_scheduler", "inner = gl.cdiv(inner - split, a.splits)", "inner += 0"),
    "a query block too few": ("bwd.tile_scheduler", "last = gl.cdiv(last - split, a.splits)",
                              "last = (last - split) // a.splits"),
    "K is loaded while the last step reads it": ("bwd.producer", "            if released < base:\n",
                                                 "            if released < base - 1:\n"),
    "partials in one place": ("bwd.consumer", "head = head * a.splits + w.split", "head = head * a.splits"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT_MUTANTS)
def test_a_wrong_split_is_noticed(name):
    file, old, new = SPLIT_MUTANTS[name]
    kernels = vars(gluon_sim.load({file: [(old, new)]}, gluon_sim.BACKWARD))
    with pytest.raises((SimError, Mismatch)):
        simulate_split(kernels)


def simulate_split(kernels):
    for case in SPLIT[1:3]:
        simulate(CASES[case], kernels, 2, 1, 2)
