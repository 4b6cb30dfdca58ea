"""The script of random calls: processes, its record, and going on from it."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/cpu/random_calls.py"
SOURCE = SCRIPT.parents[2] / "src"


def random_calls(file, *options):
    command = [sys.executable, str(SCRIPT), "--backend", "torch", "--jobs", "2", "--json", str(file), *options]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    return json.loads(file.read_text())


def test_a_run_goes_on_where_one_ended(tmp_path):
    file = tmp_path / "record.json"
    stopped = random_calls(file, "--cases", "8", "--seed", "20", "--seconds", "0.001")
    assert stopped["cases"] == 0  # no process has started by then
    assert stopped["unfinished"] == [20, 21]
    whole = random_calls(file, "--cases", "8")
    judged = whole["cases"] + whole["unsupported"]
    assert (whole["cases"], whole["calls"], whole["failures"], whole["unfinished"]) == (8, 64, [], [])
    assert whole["seeds"] == [20, 20 + judged]
    assert sum(row["cases"] for row in whole["by_dtype"].values()) == sum(whole["around"].values()) == 8
