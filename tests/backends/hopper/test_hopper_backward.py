"""The Hopper backward kernels: compiled ahead of time, and their schedule as plain numbers."""

import sys

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from aot import SHARED
from hopper_aot import build
from tilewise.backends.hopper.bwd import launch
from tilewise.backends.hopper.bwd.kernel import backward
from tilewise.backends.hopper.bwd.spec import BackwardSpec

SPECS = [
    BackwardSpec("bf16", D, BM, causal=causal, masked=causal, deterministic=deterministic)
    for D, BM in ((64, 128), (128, 64))
    for causal in (False, True)
    for deterministic in (True, False)
]


def given(s, B=4, H=16, Hkv=4, L=4096):
    """Arguments without memory."""
    q, dout = (torch.empty(B, L, H, s.D, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in range(2))
    k, v, dk, dv = (torch.empty(B, L, Hkv, s.D, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in range(4))
    return launch.arguments(q, k, v, dout, dk, dv, launch.workspaces(q, s), 0, 0.1, 4, s)


@pytest.mark.parametrize(
    "s",
    [pytest.param(s, marks=[pytest.mark.slow] * (s != SPECS[-2])) for s in SPECS],
    ids=lambda s: f"{s.D}-{s.causal:d}{s.deterministic:d}",
)
def test_kernels_fit_and_keep_their_products_in_flight(s):
    built = build(backward, given(s), ("S",), options=launch.OPTIONS)
    assert built.shared <= SHARED[90]
    assert "serialized" not in built.report
    for loop in built.loops:
        # Of one step: all five products, none of them twice, and one for each row statistic.
        assert sum("HGMMA" in x for x in loop) == 34
        assert not any("STS.64" in x for x in loop)  # dQ is stored 16 bytes at a time, without bank conflicts
        # A wait for each of: S, dP, dV with dQ, dK. More would be the compiler's own.
        assert sum("WARPGROUP.DEPBAR" in x for x in loop) == 4
    for loop in built.loops[:: 2 if s.masked else 1]:  # of blocks that are seen whole
        assert not any("STL" in x for x in loop)  # nothing is spilled there; a few invariants may be read again
        assert sum("LDL" in x for x in loop) <= 12


def test_planes_at_once_are_planes_that_there_are():
    for s in SPECS:
        for B, H, Hkv, L in ((1, 1, 1, 1), (16, 32, 32, 1024), (1, 32, 8, 16384), (2, 8, 1, 131072)):
            q, k = (torch.empty(B, h, L, s.D, device="meta") for h in (H, Hkv))
            assert 1 <= launch.planes_at_once(q, k, s) <= B * Hkv
