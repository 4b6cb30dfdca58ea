import gc
import getpass
import os
import tempfile
import zlib
from pathlib import Path

# Threads that wait for each other leave the cores to other workers. libgomp reads it when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# Graphs that Inductor keeps on disk call operators by the places of their arguments: not those of another `ops.py`.
schemas = zlib.crc32((Path(__file__).parents[1] / "src/tilewise/ops.py").read_bytes())
graphs = Path(tempfile.gettempdir()) / f"tilewise_inductor_{getpass.getuser()}_{schemas:08x}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(graphs))

# Workers share the cores: more threads than cores in all make every test slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_finish():
    """What is imported by now stays to the end: the garbage collector need not look through it again and again."""
    gc.freeze()


def pytest_runtest_setup():
    """Each test draws the same numbers in every run, whichever tests ran before it."""
    torch.manual_seed(0)


def pytest_runtest_teardown(item):
    """A test that leaves gradients off fails itself, not those after it."""
    enabled = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert enabled, f"{item.nodeid} left torch's gradients off"
