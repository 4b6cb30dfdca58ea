import pytest

from tilewise.dispatch import call_cache


@pytest.fixture(autouse=True)
def _forget():
    """No test meets a call that another has made."""
    call_cache.forget()
    yield
    call_cache.forget()
