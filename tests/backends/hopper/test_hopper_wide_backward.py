"""The Hopper backward kernel of wide heads: compiled ahead of time, and its choices as plain numbers."""

import sys
from dataclasses import replace

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

from aot import SHARED
from hopper_aot import build
from test_hopper_backward import problem as narrow
from tilewise.backends.gpu.kernel import OPTIONS
from tilewise.backends.hopper import plan_backward
from tilewise.backends.hopper.bwd import config as both_config
from tilewise.backends.hopper.bwd.nonfinite import fix_up
from tilewise.backends.hopper.bwd.prepost import preprocess
from tilewise.backends.hopper.bwd.wide import config
from tilewise.backends.hopper.bwd.wide.kernel import wide_backward
from tilewise.backends.hopper.bwd.wide.launch import WideBound
from tilewise.core.plan import Plan
from tilewise.core.tensors import BackwardTensors, Tensors


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
    bound = WideBound(Plan(p, "hopper", "", (1, 1)))
    return bound, bound.tensors(BackwardTensors(f, torch.empty_like(f.out), None, q, k, v))


def built(function, arguments, constants=("S",)):
    return build(function, {name: arguments[name] for name in function.arg_names}, constants, options=OPTIONS)


# Problems, and how many products of 16 columns a step of dQ and one of dK with dV has.
PRODUCTS = {256: (36, 21), 192: (28, 28)}
PROBLEMS = [
    problem(256, causal=True),
    problem(192, 128, causal=True),
    problem(256),
    problem(192, 128),
    problem(256, packed=True, causal=True, window=(1023, None), kv_lengths=True),
    problem(192, 128, window=(100, 50), dtype="f16"),
]


@pytest.mark.parametrize("launch", [0, 1], ids=("dq", "dkdv"))
@pytest.mark.parametrize(
    "p",
    [pytest.param(p, marks=[pytest.mark.slow] * (n > 1)) for n, p in enumerate(PROBLEMS)],
    ids=lambda p: "-".join([f"D{p.head_dim}", *p.options()]).replace(" ", ""),
)
def test_kernels_fit_and_keep_their_products_in_flight(p, launch):
    bound, tensors = given(p)
    s = bound.specs[launch]
    made = built(wide_backward, bound.arguments(tensors) | bound.own(tensors, s))
    assert made.shared <= SHARED[90]
    assert "serialized" not in made.report
    # One for each kind of blocks and consumer.
    assert len(made.loops) == 2 * (1 + (s.low_edges > 0) + (s.high_edges > 0))
    for loop in made.loops:
        assert sum("HGMMA" in x for x in loop) == PRODUCTS[p.head_dim][launch]
        assert not any("STL" in x or "LDL" in x for x in loop)
        # A wait for each of: S; dP; dV; dX. More would be the compiler's own.
        assert sum("WARPGROUP.DEPBAR" in x for x in loop) == (3 if s.of_queries else 2 if s.roles else 4)


@pytest.mark.slow
@pytest.mark.parametrize("p", PROBLEMS[-2:], ids=("256", "192"))
def test_what_comes_before_and_after_compiles(p):
    bound, tensors = given(p)
    arguments = bound.arguments(tensors)
    flags = ("BM", "D", "PACKED", "HAS_DLSE", "HAS_SINKS", "SOFTCAP", "CLEARS")
    assert "0 bytes spill stores" in built(preprocess, arguments | {"D": arguments["D_V"]}, flags).report
    constants = ("S", "D", "D_V", "HAS_DLSE", "SOFTCAP", "BLOCK")
    assert built(fix_up, arguments | {"BLOCK": 32}, constants).shared <= SHARED[90]


def test_head_dims_that_are_served():
    for D, Dv in ((136, 136), (192, 128), (192, 8), (200, 128), (256, 256), (136, 256), (160, 136)):
        p = problem(D, Dv)
        assert both_config.refusal(p) is None
        columns = config.columns_of(p)
        assert columns["D"] + columns["tail"] >= D
        assert columns["DV"] >= Dv
    for D, Dv in ((264, 264), (192, 264), (64, 128), (192, 132), (196, 128)):
        assert "head dims" in both_config.refusal(problem(D, Dv))
    assert "softcap" in both_config.refusal(replace(problem(256), softcap=30.0))


def test_edges_hide_what_a_block_may_have():
    low, high = both_config.RIGHT, both_config.LEFT
    for rules, of_queries, of_keys in (
        ({}, (0, 0), (0, 0)),
        ({"L": 4000}, (0, high), (0, 0)),  # keys end within a block, which only dQ has to know
        ({"causal": True}, (0, high), (low, 0)),
        ({"causal": True, "window": (1023, None)}, (low, high), (low, high)),
        ({"window": (1023, None)}, (low, 0), (0, high)),
        ({"window": (20, 30)}, (low + high, low + high), (low + high, low + high)),
        ({"window": (1023, 1023), "kv_lengths": True}, (low + high, low + high), (low, high)),
    ):
        for s, edges in zip(config.specs_of(problem(256, **rules)), (of_queries, of_keys), strict=True):
            assert (s.low_edges, s.high_edges) == edges, (rules, s.of_queries)


def test_planes_at_once_are_planes_that_there_are():
    for B, H, Hkv, L in ((1, 1, 1, 1), (16, 32, 32, 1024), (1, 32, 8, 16384), (2, 8, 1, 131072)):
        for rules in ({}, {"causal": True}, {"causal": True, "window": (0, None)}):
            p = problem(256, B=B, H=H, Hkv=Hkv, L=L, **rules)
            for s in config.specs_of(p):
                assert 1 <= config.planes_at_once(p, s) <= B * (H if s.of_queries else Hkv)


def test_the_plan_needs_statistics_alone():
    p = problem(256, B=2, H=4, L=1000)
    plan = plan_backward(p)
    rows = 2 * 4 * 1024
    assert plan.workspace_bytes == rows * 64 + rows // 64 * 4
    assert plan.tile == (128, 64)
