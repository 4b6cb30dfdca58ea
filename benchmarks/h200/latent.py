"""Checks and times latent decode on Hopper (576 columns, values in the keys) beside FlashMLA, by `paged_attention`.

    PYTHONPATH=src python benchmarks/h200/latent.py --out results --peers DIR
    PYTHONPATH=src compute-sanitizer --tool memcheck python benchmarks/h200/latent.py --sanitize

Kernels are compiled in parallel, then calls are checked against float64 and by the conformance suite (latent_cases.py),
then rows are timed interleaved (latent_rows.py), each checked on its own inputs before. All of it runs in processes
with a time limit: one that hangs or faults is reported, and the others go on without it. `--peers` is a folder with
`peers_load.py`; without it FlashMLA is left out. `--eager` times without CUDA graphs; `--sanitize` runs a few calls in
this process.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from latent_cases import STAGE, Case, check, conforming, sanitize
from latent_rows import INTERLEAVED, OWN, PEER, ROWS, time_row

from tilewise.backends.gpu.kernel import Kernel
from tilewise.backends.gpu.launch_program import Workspaces
from tilewise.backends.hopper.mla.launch import launcher_of
from tilewise.dispatch import planner
from tilewise.testing.case import make

MARK = "REPORT "
LIMIT = 60.0  # seconds without a word


def forms() -> list[tuple[bool, Any]]:
    """What kernels are compiled for: arguments of `Case`, or a case of the suite. Some only where rows are combined."""
    made: list[Any] = [([64], 128, 1), ([64], 16, 1), ([64] * 11, 128, 2), ([64] * 11, 16, 4), ([64] * 3, 16, 12)]
    made += [([64] * 2, 64, 1), ([64] * 2, 5, 3), ([64] * 4, 128, 1, 16)]
    made += [([64] * 3, heads, q_len, 64, False) for heads, q_len in ((128, 2), (16, 4))]
    others = [([64] * batch, heads, 1) for heads in (16, 128) for batch in (2, 5, 11, 16, 32, 64, 128)]
    return [(True, form) for form in [*made, *conforming()]] + [(False, form) for form in others]


def warm(given: tuple[bool, Any]) -> str:
    """Compiles the kernels of a call into Triton's cache, without a launch."""
    whole, form = given
    try:
        call = Case(*form).checked() if isinstance(form, tuple) else make(form, "cuda").checked(return_lse=True)
        made = launcher_of(planner.choose(call.problem, "hopper").problem)
        arguments = made.arguments(call.tensors, Workspaces(call.out.device))
        for kernel in [made.decode] * whole + [made.combining]:
            compile_alone(kernel, arguments)
    except Exception as error:
        return f"{given}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def compile_alone(kernel: Kernel, arguments: dict[str, Any]) -> None:
    given = arguments | kernel.constants
    taken = {name: given[name] for name in kernel.function.arg_names}
    kernel.function.warmup(grid=(1,), **taken, **kernel.options)


def listen(args: list[str]) -> tuple[list[str], str, str]:
    """This file in another process: its reports, the last stage it named, and what it said otherwise.

    If `LIMIT` seconds pass without a report or a stage, a kernel hangs, and the process is ended.
    """
    process = subprocess.Popen(
        [sys.executable, "-u", __file__, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()

    def read(stream: Any = process.stdout) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    reports: list[str] = []
    rest: list[str] = []
    stage = ""
    end = time.perf_counter() + LIMIT
    while True:
        try:
            line = lines.get(timeout=max(0.1, end - time.perf_counter()))
        except queue.Empty:
            rest.append(f"nothing for {LIMIT:.0f} s")
            break
        if line is None:
            break
        if line.startswith((MARK, STAGE)):
            end = time.perf_counter() + LIMIT
        if line.startswith(MARK):
            reports.append(line[len(MARK) :].strip())
            stage = ""
        elif line.startswith(STAGE):
            stage = line[len(STAGE) :].strip()
        else:
            rest.append(line.rstrip())
    process.kill()
    process.wait()
    return reports, stage, "\n".join(rest)[-2000:]


def check_all() -> str:
    """What the checks say, in a process of their own."""
    found, stage, rest = listen(["--check"])
    if rest:
        print(rest, flush=True)
    return found[0] if found else f"failed at {stage or 'start'}: {rest[-300:]}"


def time_all(ways: list[str], more: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows, and what failed. A way that faults is left out of its row; if none is known to, each is timed alone."""
    work = [(row, list(ways)) for row in ROWS]
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    while work:
        found, stage, rest = listen(["--time", json.dumps(work), *more])
        rows += [json.loads(text) for text in found]
        if rest:
            print(rest, flush=True)
        work = work[len(found) :]
        if not work:
            break
        row, tried = work.pop(0)
        failed.append(f"{row} / {stage or 'start'}: {rest.splitlines()[-1][:300] if rest else 'ended'}")
        if stage in tried:
            tried.remove(stage)
            work[:0] = [(row, tried)] if tried else []
        elif stage == INTERLEAVED and len(tried) > 1:
            work[:0] = [(row, [way]) for way in tried]
    return rows, failed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", default="")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--budget", type=float, default=3.0, help="seconds for each row")
    parser.add_argument("--eager", action="store_true", help="time calls, not CUDA graphs of them")
    parser.add_argument(
        "--sanitize", nargs="?", const="", help="a few calls in this process: those whose names have this"
    )
    parser.add_argument("--unchecked", action="store_true", help="time without the checks of small cases")
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--time", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.sanitize is not None:
        sys.exit(bool(sanitize(args.sanitize)))
    if args.check:
        wrong = check()
        print(MARK + (f"{len(wrong)} wrong: {wrong[0]}" if wrong else "right"), flush=True)
        return
    if args.time:
        for name, ways in json.loads(args.time):
            print(MARK + json.dumps(time_row(name, ways, args.peers, args.budget, args.eager)), flush=True)
        return
    start = time.perf_counter()
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for text in pool.map(warm, forms()):
            if text:
                print("not compiled:", text, flush=True)
    report: dict[str, Any] = {"torch": torch.__version__, "compiled_s": round(time.perf_counter() - start, 1)}
    print(f"compiled after {report['compiled_s']} s", flush=True)
    report["checks"] = "" if args.unchecked else check_all()
    print(f"{report['checks'] or 'not checked'} after {time.perf_counter() - start:.0f} s", flush=True)
    ways = [OWN] + [PEER] * bool(args.peers)
    more = ["--budget", str(args.budget), *["--peers", args.peers] * bool(args.peers), *["--eager"] * args.eager]
    report["eager"] = args.eager
    report["rows"], report["failed"] = time_all(ways, more)
    clocks = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
    report["clocks"] = subprocess.run(
        ["nvidia-smi", clocks, "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    report["seconds"] = round(time.perf_counter() - start)
    print(report["clocks"], report["seconds"], "s")
    for text in report["failed"]:
        print("failed:", text)
    for r in report["rows"]:
        unit = "TB/s" if "16 heads" in r["row"] else "TFLOPS"
        print(r["row"].ljust(30), *(f"{way} {r['us'][way]}us {rate}," for way, rate in r[unit].items()))
        for text in r["wrong"].values():
            print("  WRONG:", text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "latent.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
