import gc
import os

# Threads that wait for each other leave the cores to other workers. libgomp reads it when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# Workers share the cores: more threads than cores in all make every test slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_finish():
    """What is imported by now stays to the end: the garbage collector need not look through it again and again."""
    gc.freeze()


def pytest_runtest_setup():
    """Each test draws the same numbers in every run, whichever tests ran before it."""
    torch.manual_seed(0)
