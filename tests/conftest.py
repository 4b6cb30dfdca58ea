import os

import torch

# Workers share the cores: more threads than cores in all make every test slower.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
