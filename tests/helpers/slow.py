"""Values of a parametrised test that only `make test-slow` runs."""

from __future__ import annotations

from typing import Any

import pytest


def slowly(*values: Any) -> list[Any]:
    """The values, a tuple for several arguments, as parameters of slow tests."""
    return [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow) for x in values]
