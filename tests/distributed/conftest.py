import pytest

from ranks import Pool


@pytest.fixture(scope="module")
def pool():
    """Four ranks for the tests of a file."""
    with Pool(4) as ranks:
        yield ranks
