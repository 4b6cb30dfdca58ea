"""The kernels are planned as with the Triton that they ran with, whichever version compiles them here."""

import sys

import pytest

if sys.platform == "linux":
    from tilewise.backends.gpu import target

    @pytest.fixture(autouse=True)
    def ran_with(monkeypatch):
        monkeypatch.setattr(target, "triton_version", lambda: "3.6.0")
