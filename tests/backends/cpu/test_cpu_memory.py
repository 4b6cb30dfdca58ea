"""What a call takes beside its tensors, by the system's account of the process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Small calls first: kernels are loaded, threads started. Then the high-water mark is set back and the call made.
CODE = """
import json, sys
import torch
import tilewise
dtype, rows, keys = getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(2)
def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024
def call(rows, keys, heads):
    q, k, v = (torch.ones(1, heads, n, 128, dtype=dtype) for n in (rows, keys, keys))
    out = torch.zeros_like(q)
    before = status("VmRSS:")
    open("/proc/self/clear_refs", "w").write("5")
    tilewise.attention(q, k, v, out=out)
    return status("VmHWM:") - before
call(min(rows, 64), 64, 1)
taken = call(rows, keys, 4)
planned = tilewise.plan(*(torch.ones(1, 4, n, 128, dtype=dtype) for n in (rows, keys, keys)))
print(json.dumps([taken, planned.workspace_bytes]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the account of Linux")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("rows", "keys"), [(1024, 8192), (1, 65536)])
def test_a_thread_takes_under_4_mib(dtype, rows, keys):
    done = subprocess.run(
        [sys.executable, "-c", CODE, dtype, str(rows), str(keys)], check=True, capture_output=True, text=True
    )
    taken, planned = json.loads(done.stdout)
    assert 0 < planned / 2 < 4 * 2**20
    assert taken / 2 < 4 * 2**20, f"{taken / 2**20:.1f} MiB in all"
