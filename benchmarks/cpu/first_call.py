"""Seconds of a first call: with no kernels kept, then in a new process that finds them.

    python benchmarks/cpu/first_call.py --json benchmarks/records/cpu/first_call.json
    python benchmarks/cpu/first_call.py --wheel dist/tilewise-0.1.0-py3-none-any.whl

With a wheel (`make wheel`) the same calls of the package that is in it, whose kernels are prebuilt.

Each call runs in a process of its own, the cold ones with an empty cache directory. The time is that of the call alone,
without importing torch, which a program does anyway; processor time is what it would take on a core that is free.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import write_json

CALLS = {
    "prefill f32": ("float32", 512),
    "prefill bf16": ("bfloat16", 512),
    "prefill f16": ("float16", 512),
    "decode f32": ("float32", 1),
    "decode f16": ("float16", 1),
}
CODE = """
import json, sys, time
import torch
dtype, rows = getattr(torch, sys.argv[1]), int(sys.argv[2])
q, k = torch.ones(1, 8, rows, 64, dtype=dtype), torch.ones(1, 8, 512, 64, dtype=dtype)
start, busy = time.perf_counter(), time.process_time()
import tilewise
tilewise.attention(q, k, k, causal=True)
print(json.dumps([time.perf_counter() - start, time.process_time() - busy]))
"""


def seconds(dtype: str, rows: int, kept: str, package: str | None) -> dict[str, float]:
    """Wall and processor time of the first call of a new process."""
    environment = {**os.environ, "TILEWISE_CACHE_DIR": kept}
    if package is not None:
        environment["PYTHONPATH"] = package
    done = subprocess.run(
        [sys.executable, "-c", CODE, dtype, str(rows)], env=environment, check=True, capture_output=True, text=True
    )
    wall, busy = json.loads(done.stdout)
    return {"seconds": wall, "processor": busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--wheel", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as unpacked:
        if options.wheel is not None:
            zipfile.ZipFile(options.wheel).extractall(unpacked)
            compileall.compile_dir(unpacked, quiet=1)  # as pip does
        rows = measure(None if options.wheel is None else unpacked)
    if options.json:
        asked = f" --wheel {options.wheel}" if options.wheel is not None else ""
        command = f"python benchmarks/cpu/first_call.py{asked} --json {options.json}"
        write_json(options.json, describe(command) | {"rows": rows})


def measure(package: str | None) -> list[dict[str, Any]]:
    rows = []
    print(f"{'first call':14}{'cold, s':>10}{'processor':>12}{'kept, s':>10}{'processor':>12}")
    for name, (dtype, count) in CALLS.items():
        with tempfile.TemporaryDirectory() as kept:
            cold, warm = seconds(dtype, count, kept, package), seconds(dtype, count, kept, package)
        rows.append({"call": name, "cold": cold, "kept": warm})
        print(
            f"{name:14}{cold['seconds']:10.1f}{cold['processor']:12.1f}{warm['seconds']:10.2f}{warm['processor']:12.2f}"
        )
    return rows


if __name__ == "__main__":
    main()
