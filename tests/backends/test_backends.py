"""Each backend against the conformance suite."""

from conformance import BackwardConformance, Conformance


class TestReference(Conformance):
    backend = "reference"


class TestTorch(Conformance):
    backend = "torch"


class TestReferenceBackward(BackwardConformance):
    backend = "reference"


class TestTorchBackward(BackwardConformance):
    backend = "torch"
