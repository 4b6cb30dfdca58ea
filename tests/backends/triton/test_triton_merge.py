"""The kernel that merges partial results, in Triton's interpreter and compiled, against plain torch."""

import os
import subprocess
import sys

import pytest
import torch

from aot import SHARED, compile_kernel
from tilewise.backends.triton.merge import prepare
from tilewise.state import AttentionState

RUN = """
import sys, torch
from tilewise import AttentionState, merge
from tilewise.backends.triton.merge import merge_states
torch.manual_seed(0)
done = 0
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for shape, seq in (((2, 3, 11, 40), 2), ((2, 11, 3, 40), 1), ((11, 3, 72), 0), ((1, 1, 1, 1), 2)):
        for n in (1, 2, 3, 8):
            states = []
            for i in range(n):
                wide = list(shape)
                wide[seq] += 3 * (i % 3)  # parts are cut from larger ones
                out, lse = torch.randn(wide, dtype=torch.float32).to(dtype), 5 * torch.randn(wide[:-1])
                out, lse = (x.narrow(seq, i % 2, shape[seq]) if wide[seq] > shape[seq] else x for x in (out, lse))
                lse[torch.rand(shape[:-1]) < 0.05] = torch.inf
                hidden = torch.rand(shape[:-1]) < 0.4
                lse[hidden] = -torch.inf
                out[hidden] = torch.nan
                states.append(AttentionState(out, lse))
            want, got = merge(states), merge_states(states)
            ulp = 0 if "wrong" in sys.argv else 4 * torch.finfo(dtype).eps
            assert torch.equal(want.lse.isinf(), got[1].isinf())
            finite = want.lse.isfinite()
            assert torch.allclose(got[1][finite], want.lse[finite], rtol=1e-6, atol=1e-6)
            assert got[0].dtype == dtype and not got[0].isnan().any()
            assert ((got[0].double() - want.out.double()).abs() <= ulp * (1 + want.out.double().abs())).all()
            done += 1
print(done)
"""


def interpret(*arguments):
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", RUN, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_it_merges_as_torch_does():
    run = interpret()
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert int(run.stdout) == 3 * 4 * 4


def test_the_comparison_can_fail():
    assert "AssertionError" in interpret("wrong").stderr


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_it_compiles_without_spills(arch):
    for dtype, D, n in ((torch.bfloat16, 128, 8), (torch.float32, 256, 2), (torch.float16, 576, 3)):
        out = torch.empty(1, 32, 4096, D, dtype=dtype, device="meta")
        lse = torch.empty(1, 32, 4096, dtype=torch.float32, device="meta")
        kernel, _, given = prepare([AttentionState(out, lse)] * n)
        built = compile_kernel(kernel, given, arch)
        assert built.spills == 0
        assert built.shared <= SHARED[arch]


def test_parts_that_lie_in_other_ways_are_left_to_torch():
    out, lse = torch.randn(4, 5, 6, 8), torch.randn(4, 5, 6)
    assert prepare([AttentionState(out, lse)] * 9) is None
    assert prepare([AttentionState(out[..., ::2], lse)]) is None
    assert prepare([AttentionState(out[:, 1:4, 1:3], lse[:, 1:4, 1:3])]) is None
    assert prepare([AttentionState(out[:0], lse[:0])]) is None
    assert prepare([AttentionState(out.transpose(1, 2), lse)]) is None
    assert prepare([AttentionState(out, lse), AttentionState(out, lse.expand(4, 5, 6))]) is not None
