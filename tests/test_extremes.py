"""Windows, offsets, sinks and softcaps at the ends of their ranges, on the GPU backends without a GPU.

The calls are those of benchmarks/h200/trust.py, which runs them on a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("Triton is for Linux", allow_module_level=True)

TRUST = Path(__file__).parents[1] / "benchmarks/h200/trust.py"


def test_triton_in_the_interpreter(tmp_path):
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(TRUST), "--device", "cpu", "--backends", "triton", "--light"]
    run = subprocess.run([*command, "--out", str(tmp_path)], env=env, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    rows = json.loads((tmp_path / "trust.json").read_text())
    assert len(rows) > 50
    assert all(row["ok"] for row in rows)
