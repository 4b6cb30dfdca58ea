"""Runs, in order and within a number of minutes, what only a GPU can show; goes on where it stopped (`make h200`).

    python benchmarks/h200/owed.py --minutes 25 --out FOLDER [--peers FOLDER] [--only checks] [--again]

Checks come first, then times, beside other libraries where `--peers` has them. Each step is a process of its own with a
limit; its output and record are in the folder. `owed.json` there says which steps are done with this tree on this
machine: a later run skips them. The table at the end is `owed.txt`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
START = 20.0  # seconds that a step needs to be worth starting
COMPLAINT = re.compile(r"WRONG|DIFFERENT BITS|worker died|\bFAILED\b(?!': 0)")  # of scripts that go on after a fault


@dataclass(frozen=True)
class Step:
    """A script with its arguments; `json` is the option that takes the record's path."""

    name: str
    script: str  # beside this file; "" for the command line tool
    arguments: tuple[str, ...] = ()
    minutes: float = 3.0  # after which it is stopped, and not done
    json: str = "--json"
    peers: bool = False

    def command(self, out: Path, peers: str | None) -> list[str]:
        own = [str(HERE / self.script)] if self.script else ["-m", "tilewise"]
        record = [self.json, str(out / f"{self.key}.json")] if self.json else []
        beside = ["--peers", peers] if self.peers and peers else []
        return [sys.executable, *own, *self.arguments, *record, *beside]

    @property
    def key(self) -> str:
        return re.sub(r"[^a-z0-9]+", "_", self.name)


STEPS = (
    Step("checks: conformance and gradients", "", ("verify", "--device", "cuda", "--quick"), 4),
    Step("checks: forward of hopper", "hopper_checks.py", ("--every", "1", "--least", "128", "--most", "230"), 5),
    Step("checks: backward of hopper", "backward_checks.py", ("--properties", "--jobs", "14", "--repeats", "100")),
    Step("checks: wide backward of hopper", "backward_checks.py", ("--wide", "--jobs", "14", "--repeats", "100")),
    Step("checks: backward of triton", "backward_triton.py", ("--checks",)),
    Step("times: forward", "forward.py", (), 3, peers=True),
    Step("times: backward", "backward.py", (), 4, peers=True),
    Step("times: latent decode", "latent.py", (), 3, "--out", peers=True),
    Step("times: latent attention by indices", "sparse.py", (), 3, "--out", peers=True),
    Step("times: gradients with indices", "backward_indices.py"),
    Step("times: backward of triton", "backward_triton.py", ("--peers",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="after which nothing runs any more")
    parser.add_argument("--out", type=Path, default=Path(".cache/h200"))
    parser.add_argument("--peers", help="folder of peers_load.py")
    parser.add_argument("--only", default="", help="steps whose names hold this")
    parser.add_argument("--again", action="store_true", help="steps that are done, too")
    given = parser.parse_args()
    last = time.monotonic() + 60 * given.minutes
    given.out.mkdir(parents=True, exist_ok=True)
    state = State(given.out / "owed.json", identity())
    print(" | ".join(state.identity.values()), flush=True)
    for step in STEPS:
        left = last - time.monotonic()
        if given.only not in step.name or (state.is_done(step) and not given.again):
            continue
        if left < START:
            print(f"{step.name}: no time left", flush=True)
            continue
        state.put(step, run(step, step.command(given.out, given.peers), given.out, min(left, 60 * step.minutes)))
    (given.out / "owed.txt").write_text(state.table())
    print(state.table())
    sys.exit(not state.all_good())


def identity() -> dict[str, str]:
    """What results hold for: the GPU, its driver, the versions, and the sources."""
    import torch

    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(SOURCES.rglob("*.py")):
        digest.update(file.read_bytes())
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": f"driver {driver}",
        "torch": f"torch {torch.__version__}",
        "triton": f"Triton {triton.__version__}",
        "sources": f"sources {digest.hexdigest()}",
    }


class State:
    """Which steps are done, in a file; another machine or other sources begin anew."""

    def __init__(self, file: Path, identity: dict[str, str]) -> None:
        self.file, self.identity = file, identity
        stored: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        self.results: dict[str, Any] = stored["results"] if stored.get("identity") == identity else {}

    def put(self, step: Step, result: dict[str, Any]) -> None:
        self.results[step.name] = result
        beside = self.file.with_suffix(".part")
        beside.write_text(json.dumps({"identity": self.identity, "results": self.results}, indent=1) + "\n")
        beside.replace(self.file)

    def is_done(self, step: Step) -> bool:
        return self.results.get(step.name, {}).get("outcome") == "done"

    def all_good(self) -> bool:
        return all(self.is_done(step) for step in STEPS)

    def table(self) -> str:
        """A line for each step: outcome, seconds, and the last line that it printed."""
        lines = []
        for step in STEPS:
            r = self.results.get(step.name, {"outcome": "not run", "seconds": 0, "last": ""})
            lines.append(f"{step.name:36} {r['outcome']:10} {r['seconds']:5.0f} s  {r['last'][:160]}")
        return "\n".join([" | ".join(self.identity.values()), *lines]) + "\n"


def run(step: Step, command: list[str], out: Path, limit: float) -> dict[str, Any]:
    """Runs a step; what it prints goes to a file and, a line at a time, here."""
    print(f"== {step.name}, at most {limit:.0f} s", flush=True)
    begin = time.monotonic()
    last = complaint = ""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)  # a group, ended as one
    ending = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    ending.start()
    with process, (out / f"{step.key}.log").open("w") as log:
        for line in process.stdout or ():
            log.write(line)
            print(f"  {line.rstrip()[:200]}", flush=True)
            last = line.strip() or last
            complaint = complaint or (line.strip() if COMPLAINT.search(line) else "")
        ending.cancel()
    code = process.returncode
    outcome = "stopped" if code == -signal.SIGKILL else "FAILED" if code or complaint else "done"
    return {"outcome": outcome, "seconds": round(time.monotonic() - begin, 1), "last": complaint or last}


if __name__ == "__main__":
    main()
