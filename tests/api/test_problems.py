"""Whole calls, drawn at random. What this finds becomes a named case in `tilewise.testing.cases`."""

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strategies import cases, changes
from tilewise import AttentionState
from tilewise.testing.case import Case, make
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
@given(cases(indices=True))
def test_torch_backend(case):
    check_case(case, "torch", draws=4)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@settings(SETTINGS, max_examples=60)
@given(drawn=changes(most=40, indices=True), around=st.sampled_from(list(AROUND)))
def test_repeated_calls(backend, drawn, around):
    """With one option changed, and with something around the calls."""
    check_repeats(*drawn, backend, draws=4, around=AROUND[around])


def test_seeds_draw_every_kind_of_call():
    """A seed gives the same case on any machine, and a few hundred of them hold what the drawing is for."""
    drawn = [draw_case(Seeded(seed), indices=True) for seed in range(400)]
    assert drawn[:20] == [draw_case(Seeded(seed), indices=True) for seed in range(20)]
    assert {c.form for c in drawn} == {"dense", "varlen", "paged"}
    assert {c.sinks for c in drawn} == {False, True, "mixed", "none"}
    assert {c.strides for c in drawn} == {"", "sliced", "last", "permuted", "shared"}
    assert any(isinstance(c.window, int) and c.window > 2**62 for c in drawn)
    assert any(isinstance(c.offset, int) and abs(c.offset) > 2**28 for c in drawn)
    assert any(c.chunk and c.chunk > 2**30 for c in drawn)
    assert any(c.Lq == 0 and not c.q_lengths for c in drawn)
    assert any(c.q_lengths and not any(c.q_lengths) for c in drawn)
    assert any(c.softcap and c.softcap > 1e29 for c in drawn)
    assert {(bool(c.indices), c.indices[:1] == "h", c.block > 1) for c in drawn} >= {
        (True, h, b) for h in (0, 1) for b in (0, 1)
    }
    changed = [draw_change(Seeded(seed + 9), case) for seed, case in enumerate(drawn)]
    assert {f for f in CHANGES for a, b in zip(drawn, changed, strict=True) if getattr(a, f) != getattr(b, f)} == set(
        CHANGES
    )


def test_drawn_offsets_are_in_range_on_a_gpu():
    """Where no length is read, as on the meta device, the sizes that a call names count."""
    extreme = 0
    for seed in range(3000):
        chooser = Seeded(seed)
        case = draw_case(chooser, most=300)
        for each in (case, draw_change(chooser, case)):
            if isinstance(each.offset, int) and abs(each.offset) > 1000:
                make(each, "meta", sized=True).checked()
                extreme += 1
    assert extreme > 100


def test_all_calls_of_a_case_have_the_same_arguments(monkeypatch):
    """On a GPU the plan depends on `max_q` and `max_k`, and the bits on the plan."""
    from tilewise.testing import check

    made, sizes = check.make, []

    class Noted:
        def __init__(self, inputs):
            self.inputs = inputs

        def __getattr__(self, name):
            return getattr(self.inputs, name)

        def call(self, *args, **options):
            all_options = self.inputs.options | options
            sizes.append((all_options.get("max_q"), all_options.get("max_k")))
            return self.inputs.call(*args, **options)

    monkeypatch.setattr(check, "make", lambda *args, **options: Noted(made(*args, **options)))
    case = Case(form="varlen", q_lengths=(3, 1), lengths=(4, 9))
    check_repeats(case, case, "torch")
    assert len(sizes) > 6
    assert set(sizes) == {(3, 9)}


def test_few_rows_are_judged_by_many(monkeypatch):
    """Torch's error on few rows may be small by chance: no result is called wrong by it."""
    from tilewise.testing import check

    usual, taken = check.worst_errors, []

    def first_is_too_small(case, device, draws, **options):
        taken.append(draws)
        return (-1.0, -1.0) if len(taken) == 1 else usual(case, device, draws, **options)

    monkeypatch.setattr(check, "worst_errors", first_is_too_small)
    few = Case(B=1, H=3, Lq=1, Lk=9, D=24)
    check_case(few, "torch", draws=4)
    assert taken == [4, 86]  # of 3 rows each
    # A named case, one of many rows together, and one that has as many by itself.
    for case, draws, used in ((few, 1, 1), (Case(B=1, H=4, Lq=20), 4, 4), (Case(B=2, H=4, Lq=32), 4, 1)):
        taken.clear()
        with pytest.raises(Mismatch):
            check_case(case, "torch", draws=draws)
        assert taken == [used]


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
    with pytest.raises(Mismatch, match="differs from the first"):
        check_repeats(case, case, "torch")
