"""The backward half of the conformance suite rejects every backward pass of the list of mistakes."""

from dataclasses import fields

import pytest

from gradient_mutants import MUTANTS, NONE, GradientMutant
from tilewise.dispatch import planner
from tilewise.testing.case import Case
from tilewise.testing.cases import GRADIENTS
from tilewise.testing.check import Mismatch
from tilewise.testing.gradient_properties import GRADIENT_PROPERTIES
from tilewise.testing.gradients import check_gradients

DEFAULTS = {f.name: f.default for f in fields(Case)}


@pytest.fixture
def backend(request, monkeypatch):
    """The mutant as the only backend."""
    monkeypatch.setattr(planner, "BACKENDS", ("mutant",))
    monkeypatch.setattr(planner, "load", lambda name: request.param)
    planner.choose.cache_clear()
    yield request.param
    planner.choose.cache_clear()


@pytest.mark.parametrize("backend", MUTANTS, ids=lambda m: m.name, indirect=True)
def test_the_suite_rejects(backend):
    relevant = [c for c in GRADIENTS if all(getattr(c, f) != DEFAULTS[f] for f in backend.touches)]
    assert relevant
    for case in relevant:
        try:
            check_gradients(case, "mutant")
        except Mismatch:
            return
    for prop in GRADIENT_PROPERTIES.values():
        try:
            prop("mutant", "cpu")
        except Mismatch:
            return
    pytest.fail(f"{len(relevant)} cases pass gradients with this mistake: {backend.name}")


@pytest.mark.parametrize("backend", [GradientMutant(NONE, ())], ids=[NONE], indirect=True)
def test_without_a_mistake_it_passes(backend):
    """So it is the mistake that is rejected, not the formula around it."""
    for case in GRADIENTS[::3]:
        check_gradients(case, "mutant")


def test_the_list_is_whole():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 40
