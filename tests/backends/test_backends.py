"""Each backend against the conformance suite."""

from conformance import Conformance


class TestReference(Conformance):
    backend = "reference"


class TestTorch(Conformance):
    backend = "torch"
