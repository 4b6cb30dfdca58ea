"""The CPU backend: conformance, random problems, its vector layer, its threads."""

from hypothesis import HealthCheck, given, settings

from conformance import Conformance
from strategies import cases
from tilewise.conformance.check import check_case


class TestCpu(Conformance):
    backend = "cpu"


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(most=150))
def test_random_problems(case):
    check_case(case, "cpu")
