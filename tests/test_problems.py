"""Whole calls, drawn at random. What this finds becomes a named case in `tilewise.testing.cases`."""

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strategies import cases, changes
from tilewise import AttentionState
from tilewise.testing.case import Case
from tilewise.testing.check import Mismatch, check_case, check_repeats
from tilewise.testing.drawing import CHANGES, Seeded, draw_case, draw_change

SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
AROUND = {
    "nothing": contextlib.nullcontext,
    "meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
}


@settings(SETTINGS, max_examples=250)
@given(cases())
def test_torch_backend(case):
    check_case(case, "torch", draws=4)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@settings(SETTINGS, max_examples=60)
@given(drawn=changes(most=40), around=st.sampled_from(list(AROUND)))
def test_repeated_calls(backend, drawn, around):
    """With one option changed, and with something around the calls."""
    check_repeats(*drawn, backend, draws=4, around=AROUND[around])


def test_seeds_draw_every_kind_of_call():
    """A seed gives the same case on any machine, and a few hundred of them hold what the drawing is for."""
    drawn = [draw_case(Seeded(seed)) for seed in range(400)]
    assert drawn[:20] == [draw_case(Seeded(seed)) for seed in range(20)]
    assert {c.form for c in drawn} == {"dense", "varlen", "paged"}
    assert {c.sinks for c in drawn} == {False, True, "mixed", "none"}
    assert {c.strides for c in drawn} == {"", "sliced", "last", "permuted", "shared"}
    assert any(isinstance(c.window, int) and c.window > 2**62 for c in drawn)
    assert any(isinstance(c.offset, int) and abs(c.offset) > 2**28 for c in drawn)
    assert any(c.chunk and c.chunk > 2**30 for c in drawn)
    assert any(c.Lq == 0 and not c.q_lengths for c in drawn)
    assert any(c.q_lengths and not any(c.q_lengths) for c in drawn)
    assert any(c.softcap and c.softcap > 1e29 for c in drawn)
    changed = [draw_change(Seeded(seed + 9), case) for seed, case in enumerate(drawn)]
    assert {f for f in CHANGES for a, b in zip(drawn, changed, strict=True) if getattr(a, f) != getattr(b, f)} == set(
        CHANGES
    )


def test_repeats_are_judged(monkeypatch):
    """A backend that gives other bits once a call is remembered is rejected."""
    from tilewise.testing import check

    case = Case(Lq=5, causal=True)
    made = check.make

    class Odd:
        def __init__(self, inputs):
            self.inputs, self.calls = inputs, 0

        def __getattr__(self, name):
            return getattr(self.inputs, name)

        def call(self, *args, **options):
            self.calls += 1
            out, lse = self.inputs.call(*args, **options)
            return AttentionState(out + 1e-3 if self.calls == 2 else out, lse)

    monkeypatch.setattr(check, "make", lambda *args, **options: Odd(made(*args, **options)))
    with pytest.raises(Mismatch, match="other bits"):
        check_repeats(case, case, "torch")
