"""The conformance suite rejects every kernel of the list of mistakes."""

from dataclasses import fields

import pytest

from mutants import MUTANTS
from tilewise.dispatch import planner
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES
from tilewise.testing.check import Mismatch, check_case

DEFAULTS = {f.name: f.default for f in fields(Case)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_suite_rejects(mutant, monkeypatch):
    monkeypatch.setattr(planner, "BACKENDS", ("mutant",))
    monkeypatch.setattr(planner, "load", lambda name: mutant)
    planner.choose.cache_clear()
    relevant = [c for c in CASES if all(getattr(c, f) != DEFAULTS[f] for f in mutant.touches)]
    assert relevant
    try:
        for case in relevant:
            try:
                check_case(case, "mutant")
            except Mismatch:
                return
        pytest.fail(f"{len(relevant)} cases pass a kernel with this mistake: {mutant.name}")
    finally:
        planner.choose.cache_clear()


def test_the_list_is_whole():
    """The mistakes that the design names, and more."""
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 35
