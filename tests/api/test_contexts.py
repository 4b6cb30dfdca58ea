"""Default devices, default dtypes and autocast around a call change nothing."""

import contextlib

import pytest
import torch

from tilewise import AttentionState, TileMap, alibi_slopes, merge, plan
from tilewise.backends.torch.tiles import no_autocast
from tilewise.dispatch import call_cache, planner
from tilewise.testing.case import Case, make
from tilewise.testing.check import check_case

CASES = [
    Case(Hkv=2, Lq=40, causal=True, alibi="h"),
    Case(B=1, H=8, Hkv=2, Lq=1, Lk=9000, D=64),  # in splits
    Case(B=1, H=8, Hkv=2, Lq=1, Lk=9000, D=64, k="int8/64", v="int8/64"),
    Case(B=3, Hkv=2, Lq=5, Lk=300, lengths=(300, 0, 222), sinks=True, softcap=5.0),
    Case(Lq=50, Lk=70, mask="bhqk", mask_kind="f32", tile=(16, 16)),
    Case(form="varlen", q_lengths=(70, 1, 33), lengths=(70, 90, 33), causal=True),
    Case(form="paged", B=2, Hkv=2, Lq=1, lengths=(1, 3333), D=64, page=16),
    Case(form="paged", B=3, Hkv=2, Lq=2, lengths=(1, 70, 333), D=64, k="int8/64", v="int4/64", causal=True),
]


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        yield
    finally:
        torch.set_num_threads(before)


CONTEXTS = {
    "meta device": lambda: torch.device("meta"),
    "cpu device": lambda: torch.device("cpu"),
    "float64": lambda: default_dtype(torch.float64),
    "float16": lambda: default_dtype(torch.float16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "inference mode": torch.inference_mode,
}


def forget():
    call_cache.forget()
    planner.choose.cache_clear()


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_first_calls_in_a_context(name, backend):
    """A first call and a repeated one give the bits of a call outside."""
    for case in CASES:
        inputs = make(case)
        with four_threads():
            want = inputs.call(backend, return_lse=True)
            forget()
            with CONTEXTS[name]():
                got = [inputs.call(backend, return_lse=True) for _ in range(2)]
        for state in got:
            assert state.out.device.type == "cpu"
            assert all(map(torch.equal, state, want)), case


@pytest.mark.parametrize("name", ["meta device", "float64"])
def test_the_suite_can_be_run_in_a_context(name):
    with CONTEXTS[name]():
        for case in CASES:
            check_case(case, "torch")


def test_tools_in_a_context():
    state = AttentionState(torch.randn(2, 3, 4), torch.randn(2, 3))
    mask = torch.ones(40, 50, dtype=torch.bool).tril()
    q, k = torch.randn(1, 2, 30, 16), torch.randn(1, 2, 40, 16)
    want = merge([state, state]), TileMap.from_mask(mask), TileMap.from_spec(30, 40, (8, 8), causal=True)
    cost = plan(q, k, k, causal=True, mask=mask[:30, :40]).cost
    for name in ("meta device", "float64", "autocast"):
        with CONTEXTS[name]():
            assert all(map(torch.equal, merge([state, state]), want[0]))
            assert TileMap.from_mask(mask).states.equal(want[1].states)
            assert TileMap.from_spec(30, 40, (8, 8), causal=True).states.equal(want[2].states)
            assert plan(q, k, k, causal=True, mask=mask[:30, :40]).cost == cost
            assert alibi_slopes(6, "cpu").dtype == torch.float32


def test_devices_without_autocast():
    with no_autocast("meta"):
        pass
