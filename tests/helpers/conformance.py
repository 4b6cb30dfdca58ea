"""The suite that every backend inherits: `class TestX(Conformance): backend = "x"`."""

import pytest

from tilewise.testing.cases import CASES
from tilewise.testing.check import check_case
from tilewise.testing.properties import PROPERTIES


class Conformance:
    backend: str
    device = "cpu"

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_case(self, case):
        check_case(case, self.backend, self.device)

    @pytest.mark.parametrize("name", PROPERTIES)
    def test_property(self, name):
        PROPERTIES[name](self.backend, self.device)
