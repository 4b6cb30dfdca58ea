"""What a repeated GPU call costs on the host before the driver is called: Python instructions, and time.

    python tests/helpers/launch_cost.py TREE [TREE ...] --json costs.json

Each tree is a checkout with its own `src` and `tests`, run by a process of its own; they are timed in turns, so that a
slow moment slows all of them. The driver and Triton are those of `launch_recorder.py`, and the driver returns at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import FrameType
from typing import Any

ROUNDS, CALLS_OF_A_ROUND = 40, 200
NAMES = (
    "triton, prefill", "triton, split", "triton, split, combined after", "triton, mask", "triton, varlen, ordered",
    "triton, paged, int4", "hopper, causal", "hopper, varlen", "hopper, block indices", "hopper, latent",
    "triton backward, causal", "triton backward, mask, bool", "hopper backward, causal",
    "hopper backward, wide, varlen",
)  # fmt: skip


def ways_of(recorder: Any, call: Any) -> dict[str, Callable[[], Any]]:
    """A repeated call by its plan and, of a forward pass, as the call cache makes it."""
    from launch_calls import moved

    recorder.forget()
    launch = call.new()
    launch(call.tensors)
    sets = cycle([moved(call), moved(call)])
    found = {"run": lambda: launch(next(sets))}
    if call.bindable is not None:
        from tilewise.core.tensors import FIELDS

        bound = bound_launch(call)
        views = cycle([[named.get(name) for name in FIELDS] for named in (moved(call), moved(call))])
        bound(*next(views))
        found["bound"] = lambda: bound(*next(views))
    return found


def bound_launch(call: Any) -> Callable[..., Any]:
    """What the call cache launches, without the wrapper of `launch_calls.py`."""
    launch: Any = call.bindable()[1]()
    cells = dict(zip(launch.__code__.co_freevars, (cell.cell_contents for cell in launch.__closure__), strict=True))
    inner: Any = cells["launch"]
    found = dict(zip(inner.__code__.co_freevars, (cell.cell_contents for cell in inner.__closure__), strict=True))
    own: Callable[..., Any] = found["launch"]
    return own


def instructions(call: Callable[[], Any]) -> int:
    """Python instructions that a call takes in tilewise."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if "src/tilewise/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    call()
    sys.settrace(trace)
    call()
    sys.settrace(None)
    return count


def worker() -> None:
    """Writes the instructions of each way as a line; then, for each line that is read, the seconds of a round."""
    import pytest

    sys.path[0] = "tests/helpers"  # those of the tree, not of this file
    sys.path.append("tests/backends")
    import launch_recorder
    from test_launches import CALLS
    from tilewise.backends.gpu.target import nvidia, planning_for

    with pytest.MonkeyPatch.context() as patch, planning_for(nvidia(90)):
        recorder: Any = launch_recorder.install(patch)
        recorder.launch, recorder.move = (lambda *given: 0), (lambda *given: 0)
        kept = {name: ways_of(recorder, CALLS[name]()) for name in NAMES}
        ways = {f"{name}: {way}": call for name, found in kept.items() for way, call in found.items()}
        print(json.dumps({name: instructions(call) for name, call in ways.items()}), flush=True)
        for _ in sys.stdin:
            found = {}
            for name, call in ways.items():
                start = time.perf_counter()
                for _ in range(CALLS_OF_A_ROUND):
                    call()
                found[name] = (time.perf_counter() - start) / CALLS_OF_A_ROUND
            print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    workers = []
    for tree in args.trees:
        process = subprocess.Popen(
            [sys.executable, Path(__file__).resolve(), "worker"], cwd=tree, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str((tree / "src").resolve()), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        workers.append((process, json.loads(process.stdout.readline()), []))
    for _ in range(ROUNDS):
        for process, _, rounds in workers:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            rounds.append(json.loads(process.stdout.readline()))
    rows = {}
    for name in workers[0][1]:
        rows[name] = [
            {"instructions": counts[name], "us": round(1e6 * statistics.median(x[name] for x in rounds), 1)}
            for _, counts, rounds in workers
        ]
        print(f"{name:44}", *(f"{x['instructions']:5} instructions {x['us']:7.1f} us" for x in rows[name]), sep="  ")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    for process, *_ in workers:
        process.terminate()


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["worker"] else main()
