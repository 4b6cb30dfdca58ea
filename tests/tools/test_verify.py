"""`tilewise verify`: what it checks of gradients, and what it makes of wrong ones."""

import pytest

from gradient_mutants import GradientMutant
from tilewise.dispatch import planner
from tilewise.testing.gradient_properties import GRADIENT_PROPERTIES
from tilewise.tools import verify, verify_gradients
from tilewise.tools.cli import main


@pytest.mark.parametrize(("device", "backend", "any_"), [
    ("cpu", "torch", True), ("cpu", None, True), ("cpu", "metal", False), ("mps", None, False),
])  # fmt: skip
def test_gradients_are_checked_where_there_are_any(device, backend, any_):
    names = list(verify._gradient_names(device, backend, quick=True))
    assert bool(names) == any_
    kinds = {name.partition(":")[0] for name in names}
    assert kinds == ({"gradients", "gradients_property"} if any_ else set())


def test_a_gpu_has_more():
    names = list(verify._gradient_names("cuda", "torch", quick=False))
    assert [f"gradients_gpu:{name}" for name in verify_gradients.GPU_CHECKS] == names[
        : len(verify_gradients.GPU_CHECKS)
    ]
    for name in names:
        kind, _, which = name.partition(":")
        assert kind == "gradients" or which in verify.CHECKS[kind]


def test_outcomes(monkeypatch):
    for name in ("gradients:0", f"gradients_property:{next(iter(GRADIENT_PROPERTIES))}"):
        assert verify._check(name, "cpu", "torch").status == "ok"
    monkeypatch.setattr(planner, "BACKENDS", ("mutant",))
    monkeypatch.setattr(planner, "load", lambda name: GradientMutant("delta left out", ()))
    planner.choose.cache_clear()
    result = verify._check("gradients:5", "cpu", "mutant")
    planner.choose.cache_clear()
    assert result.status == "failed"
    assert "dq" in result.detail


@pytest.mark.parametrize("backend", ["metal", "hopper"])
def test_a_backend_without_its_device_is_refused_at_once(backend, monkeypatch, capsys):
    monkeypatch.setattr(verify, "_all", lambda *_: pytest.fail("nothing can be checked"))
    assert main(["verify", "--device", "cpu", "--backend", backend]) == 2
    assert f"'{backend}'" in capsys.readouterr().err
