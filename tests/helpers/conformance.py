"""The suite that every backend inherits: `class TestX(Conformance): backend = "x"`, and for its backward pass
`class TestXBackward(BackwardConformance): backend = "x"`.
"""

import pytest

from tilewise.errors import Unsupported
from tilewise.testing.case import Case
from tilewise.testing.cases import CASES, GRADIENTS, LATENT_ROWS
from tilewise.testing.check import check_case
from tilewise.testing.gradient_properties import GRADIENT_PROPERTIES, hidden_values_change_no_bit
from tilewise.testing.gradients import check_gradients
from tilewise.testing.properties import PROPERTIES


def has_any(case, names):
    return any(getattr(case, field) != Case.__dataclass_fields__[field].default for field in names)


class Conformance:
    backend: str
    device = "cpu"
    refused: tuple[str, ...] = ()  # fields of a case that the backend does not serve

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_case(self, case):
        if has_any(case, self.refused):
            with pytest.raises(Unsupported):
                check_case(case, self.backend, self.device)
        else:
            check_case(case, self.backend, self.device)

    @pytest.mark.parametrize("name", PROPERTIES)
    def test_property(self, name):
        PROPERTIES[name](self.backend, self.device)


class LatentRows(Conformance):
    """And the cases of rows that hold their own scales, for backends that take them."""

    @pytest.mark.parametrize("case", LATENT_ROWS, ids=str)
    def test_latent_rows(self, case):
        check_case(case, self.backend, self.device)


class BackwardConformance:
    backend: str
    device = "cpu"
    refused: tuple[str, ...] = ()

    @pytest.mark.parametrize("case", GRADIENTS, ids=str)
    def test_gradients(self, case):
        if has_any(case, self.refused):
            with pytest.raises(Unsupported):
                check_gradients(case, self.backend, self.device)
        else:
            check_gradients(case, self.backend, self.device)

    @pytest.mark.parametrize("name", GRADIENT_PROPERTIES)
    def test_gradient_property(self, name):
        GRADIENT_PROPERTIES[name](self.backend, self.device)

    def test_hidden_values_change_no_bit(self):
        hidden_values_change_no_bit(self.backend, self.device)
