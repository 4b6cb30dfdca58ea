"""The kernel that merges partial results, in Triton's interpreter and compiled, against plain torch."""

import pytest
import torch

from aot import SHARED, compile_kernel
from interpreted import interpreted
from tilewise.backends.triton.merge import prepare

RUN = """
import torch
from tilewise import AttentionState, merge
from tilewise.backends.triton.merge import merge_into
from tilewise.state import add_into
from tilewise.testing.check import Mismatch, judge, largest_error
torch.manual_seed(0)
SHAPES = (((2, 3, 11, 40), 2), ((2, 11, 3, 40), 1), ((11, 3, 72), 0), ((1, 1, 1, 1), 2))

def states_of(shape, seq, n, dtype):
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
    return states

def place(shape, seq, dtype):
    # Where to write: rows of something larger, none of which may change beside them.
    wide = list(shape)
    wide[seq] += 2
    whole = torch.full(wide, 7.0, dtype=dtype)
    return whole, whole.narrow(seq, 1, shape[seq])

def is_kept(whole, found):
    found.fill_(7.0)
    return bool((whole == 7.0).all())

def exact(states):
    out, lse = (torch.stack([state[i].double() for state in states]) for i in (0, 1))
    top = lse.amax(0)
    weight = torch.where(top == torch.inf, lse == torch.inf, (lse - torch.where(top.isinf(), 0.0, top)).exp())
    total = weight.sum(0)
    total[total == 0] = 1.0
    mixed = torch.where((weight == 0)[..., None], 0.0, out * weight[..., None]).sum(0)
    return mixed / total[..., None], top + total.log()

def check(dtype, n, change=0.0):
    cases = [states_of(*shape, n, dtype) for shape in SHAPES]
    wants = [exact(states) for states in cases]
    # Torch's error on all shapes together: of one number it may be small by chance.
    plain = [merge(states) for states in cases]
    errors = [max(largest_error(a[i], b[i]) for a, b in zip(plain, wants)) for i in (0, 1)]
    for (shape, seq), states, want in zip(SHAPES, cases, wants):
        states[-1].lse.add_(change)
        (whole, out), (whole_lse, lse) = place(shape, seq, dtype), place(shape[:-1], seq, torch.float32)
        assert merge_into([x for x, _ in states], [x for _, x in states], out, lse)
        judge("out", out, want[0], 2 * errors[0], dtype)
        judge("lse", lse, want[1], 2 * errors[1], torch.float32)
        assert is_kept(whole, out) and is_kept(whole_lse, lse)
        check_sum([out.nan_to_num() for out, _ in states], dtype)
        large = [torch.full_like(out, 3e38 if dtype != torch.float16 else 6e4) for out in states[0][:1] * n]
        assert merge_into(large, [torch.randn(lse.shape) for _ in large], out, lse)
        assert torch.allclose(out.double() / large[0].double(), torch.tensor(1.0, dtype=torch.double), atol=1e-2)

def summed(parts, dtype):
    found = torch.full_like(parts[0], 7.0, dtype=dtype)
    assert merge_into(parts, (), found, None)
    return found

def check_sum(parts, dtype, change=0.0):
    exact = torch.empty(parts[0].shape)
    add_into(parts, exact)
    exact += change
    if not torch.equal(summed(parts, torch.float32), exact):  # in one order: the same bits
        raise Mismatch("sum")
    rounded = summed(parts, dtype).float()  # the interpreter cuts bits off
    assert ((rounded - exact).abs() <= torch.finfo(dtype).eps * exact.abs()).all()
    both = [exact.clone(), *parts[:7]]
    assert merge_into(both, (), both[0], None) and torch.equal(both[0], summed([exact, *parts[:7]], torch.float32))

for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for n in (1, 2, 3, 8):
        check(dtype, n)
    try:
        check(dtype, 3, change=0.02)
    except Mismatch:
        continue
    raise AssertionError("a part that weighs more than it should is not noticed")
try:
    check_sum([torch.ones(1, 2, 3, 4)] * 2, torch.float32, change=1e-3)
except Mismatch:
    pass
else:
    raise AssertionError("a sum that is off is not noticed")
print("fine")
"""


def test_it_merges_as_torch_does():
    """And a wrong weight would be noticed."""
    run = interpreted(RUN)
    assert run.stdout == "fine\n", run.stdout + run.stderr[-2000:]


def merged(dtype, D, parts):
    """The kernels that merge and that add so many parts, with their arguments."""
    out = torch.empty(1, 32, 4096, D, dtype=dtype, device="meta")
    lse = torch.empty(1, 32, 4096, dtype=torch.float32, device="meta")
    for made in (prepare([out] * parts, [lse] * parts, out, lse), prepare([out] * parts, (), out, None)):
        kernel, _, given = made
        yield kernel, given


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_it_compiles_without_spills(arch):
    for dtype, D, n in ((torch.bfloat16, 128, 8), (torch.float32, 256, 2), (torch.float16, 576, 3)):
        for kernel, given in merged(dtype, D, n):
            built = compile_kernel(kernel, given, arch)
            assert built.spills == 0
            assert built.shared <= SHARED[arch]


def test_parts_that_lie_in_other_ways_are_left_to_torch():
    out, lse = torch.randn(4, 5, 6, 8), torch.randn(4, 5, 6)
    assert prepare([out] * 9, [lse] * 9, out, lse) is None
    assert prepare([out[..., ::2]], [lse], out[..., ::2], lse) is None
    assert prepare([out[:, 1:4, 1:3]], [lse[:, 1:4, 1:3]], *(x[:, 1:4, 1:3].clone() for x in (out, lse))) is None
    assert prepare([out[:0]], [lse[:0]], out[:0], lse[:0]) is None
    assert prepare([out.transpose(1, 2)], [lse], out.transpose(1, 2), lse) is None
    assert prepare([out] * 2, [lse, lse.expand(4, 5, 6)], out, lse) is not None
    assert prepare([out] * 2, [lse] * 2, out.transpose(1, 2).contiguous().transpose(1, 2), lse) is None
