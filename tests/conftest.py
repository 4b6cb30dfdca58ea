import os

import torch

# Workers share the cores: more threads than cores in all make every test slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_runtest_setup():
    """Each test draws the same numbers in every run, whichever tests ran before it."""
    torch.manual_seed(0)
