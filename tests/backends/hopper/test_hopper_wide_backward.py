"""The Hopper backward kernel of wide heads: compiled ahead of time, and its choices as plain numbers."""

import sys
from dataclasses import replace

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from aot import SHARED
from hopper_aot import build
from test_hopper_backward import H200
from test_hopper_backward import problem as narrow
from tilewise.backends.gpu.kernel import OPTIONS
from tilewise.backends.gpu.launch_program import Workspaces
from tilewise.backends.hopper import plan_backward
from tilewise.backends.hopper.bwd import config as both_config
from tilewise.backends.hopper.bwd.nonfinite import fix_up
from tilewise.backends.hopper.bwd.prepost import preprocess
from tilewise.backends.hopper.bwd.wide import config
from tilewise.backends.hopper.bwd.wide.kernel import wide_backward
from tilewise.backends.hopper.bwd.wide.launch import WideLauncher
from tilewise.core.tensors import BackwardTensors, Tensors
from uniform_registers import stale


def problem(D=256, Dv=0, **options):
    return replace(narrow(D, **options), value_dim=Dv or D)


def given(p):
    """A call's launches and their tensors, without memory."""
    B, L = (1, p.total_q) if p.packed_q else (p.batch, p.q_len)

    def heads(h, D):
        return torch.empty(B, L, h, D, dtype=p.q_dtype, device="meta").transpose(1, 2)

    def ints(n):
        return torch.empty(n, dtype=torch.int32, device="meta")

    q, k, v = heads(p.heads, p.head_dim), heads(p.kv_heads, p.head_dim), heads(p.kv_heads, p.value_dim)
    f = Tensors(q, k, v, heads(p.heads, p.value_dim), torch.empty(B, p.heads, L, device="meta"))
    if p.packed_q:
        f.cu_seqlens_q = f.cu_seqlens_k = ints(p.batch + 1)
    if p.rules.kv_lengths:
        f.kv_lengths = ints(p.batch)
    launcher = WideLauncher(p, H200)
    t = BackwardTensors(f, torch.empty_like(f.out), None, q, k, v)
    return launcher, launcher.tensors(t, Workspaces(t.dout.device))


def built(function, arguments, constants=("S",), options=OPTIONS):
    return build(function, {name: arguments[name] for name in function.arg_names}, constants, options=options)


# Products of 16 columns of a step and waits for them, of each consumer, by head dim and launch. More waits would be the
# compiler's own.
STEPS = {
    (256, 0): {(36, 3)},  # waits for S, dP, dQ
    (256, 1): {(21, 2)},  # S, dV; dP, dK
    (192, 0): {(28, 3)},
    (192, 1): {(34, 4)},  # S, dP, dV, dK
    (512, 0): {(36, 3), (36, 6)},  # a gradient's two chunks, and S, or dP's four chunks
    (512, 1): {(37, 3), (37, 6)},
    (512, 2): {(41, 6), (8, 2)},
}
PROBLEMS = [
    problem(256, causal=True),
    problem(192, 128, causal=True),
    problem(512, causal=True),
    problem(256),
    problem(192, 128),
    problem(512, packed=True, causal=True, window=(100, None), kv_lengths=True),
    problem(256, packed=True, causal=True, window=(1023, None), kv_lengths=True),
    problem(192, 128, window=(100, 50), dtype="f16"),
]


LAUNCHES = [(n, launch) for n, p in enumerate(PROBLEMS) for launch in range(len(config.specs_of(p)))]


@pytest.mark.parametrize(
    ("p", "launch"),
    [
        pytest.param(
            PROBLEMS[n], launch, marks=[pytest.mark.slow] * (n > 1), id=f"{n}-D{PROBLEMS[n].head_dim}-{launch}"
        )
        for n, launch in LAUNCHES
    ],
)
def test_kernels_fit_and_keep_their_products_in_flight(p, launch):
    launcher, tensors = given(p)
    s = launcher.specs[launch]
    made = built(wide_backward, launcher.arguments(tensors) | launcher.own(tensors, s))
    assert made.shared <= SHARED[90]
    assert "serialized" not in made.report
    assert stale(made.sass) == []
    # One for each kind of blocks and consumer.
    assert len(made.loops) == 2 * (1 + (s.low_edges > 0) + (s.high_edges > 0))
    assert not any("STL" in x or "LDL" in x for loop in made.loops for x in loop)
    counts = {(sum("HGMMA" in x for x in loop), sum("WARPGROUP.DEPBAR" in x for x in loop)) for loop in made.loops}
    assert counts == STEPS[p.head_dim, launch]


@pytest.mark.slow
@pytest.mark.parametrize("p", PROBLEMS[-3:], ids=("512", "256", "192"))
def test_a_softcap_fits_too(p):
    launcher, tensors = given(replace(p, softcap=50.0))
    for s in launcher.specs:
        made = built(wide_backward, launcher.arguments(tensors) | launcher.own(tensors, s))
        assert made.shared <= SHARED[90]
        assert "serialized" not in made.report


@pytest.mark.slow
@pytest.mark.parametrize("p", PROBLEMS[-3:], ids=("512", "256", "192"))
def test_what_comes_before_and_after_compiles(p):
    launcher, tensors = given(p)
    arguments = launcher.arguments(tensors)
    flags = ("BM", "D", "PACKED", "HAS_DLSE", "HAS_SINKS", "SOFTCAP", "MASKED", "CONVERTS")
    before = built(preprocess, arguments | {"D": arguments["D_V"]}, flags, launcher.pre.options)
    assert "0 bytes spill stores" in before.report
    constants = ("S", "D", "D_V", "HAS_DLSE", "SOFTCAP", "BLOCK")
    again = built(fix_up, arguments | launcher.fix_up.constants, constants, launcher.fix_up.options)
    assert again.shared <= SHARED[90]


def test_head_dims_that_are_served():
    for D, Dv in ((136, 136), (192, 128), (192, 8), (200, 128), (256, 256), (136, 256), (160, 136), (512, 8)):
        p = problem(D, Dv)
        assert both_config.refusal(p) is None
        for s in config.specs_of(p):
            assert s.D * s.chunks + s.tail >= D
            assert s.DV * s.chunks >= Dv
    for D, Dv in ((520, 512), (192, 520), (64, 128), (192, 132), (196, 128)):
        assert "head dims" in both_config.refusal(problem(D, Dv))


def test_edges_hide_what_a_block_may_have():
    low, high = both_config.RIGHT, both_config.LEFT
    for rules, of_queries, of_keys in (
        ({}, (0, 0), (0, 0)),
        ({"L": 4008}, (0, high), (0, 0)),  # keys end within a block, which only dQ has to know
        ({"causal": True}, (0, high), (low, 0)),
        ({"causal": True, "window": (1023, None)}, (low, high), (low, high)),
        ({"window": (1023, None)}, (low, 0), (0, high)),
        ({"window": (20, 30)}, (low + high, low + high), (low + high, low + high)),
        ({"window": (1023, 1023), "kv_lengths": True}, (low + high, low + high), (low, high)),
    ):
        for s in (*config.specs_of(problem(256, **rules)), *config.specs_of(problem(512, **rules))):
            assert (s.low_edges, s.high_edges) == (of_queries if s.of_queries else of_keys), (rules, s.of_queries)


def test_planes_at_once_are_planes_that_there_are():
    for B, H, Hkv, L in ((1, 1, 1, 1), (16, 32, 32, 1024), (1, 32, 8, 16384), (2, 8, 1, 131072)):
        for rules in ({}, {"causal": True}, {"causal": True, "window": (0, None)}):
            for D, Dv in ((192, 128), (256, 256), (512, 512)):
                p = problem(D, Dv, B=B, H=H, Hkv=Hkv, L=L, **rules)
                for s in config.specs_of(p):
                    assert 1 <= config.planes_at_once(p, s) <= B * (H if s.of_queries else Hkv)


def test_long_causal_calls_of_192_128_take_many_planes_at_once():
    for L, count in ((2048, 15), (4096, 7), (8192, 8), (16384, 8)):
        p = problem(192, 128, B=2, H=128, Hkv=128, L=L, causal=True)
        assert [config.planes_at_once(p, s) for s in config.specs_of(p)] == [count, count]


def test_the_plan_needs_statistics_alone():
    p = problem(256, B=2, H=4, L=1000)
    plan = plan_backward(p)
    rows = 2 * 4 * 1024
    assert plan.workspace_bytes == rows * 64 + rows // 64 * 4
    assert plan.tile == (128, 64)
