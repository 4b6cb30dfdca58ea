"""Whole calls, drawn at random. What this finds becomes a named case in `tilewise.conformance.cases`."""

from hypothesis import HealthCheck, given, settings

from strategies import cases
from tilewise.conformance.check import check_case


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_torch_backend(case):
    check_case(case, "torch", draws=4)
