"""Checks and times the Hopper latent decode kernel (576 columns, values in the keys) beside FlashMLA.

    PYTHONPATH=src python benchmarks/h200/latent.py --out results --peers DIR
    PYTHONPATH=src compute-sanitizer --tool memcheck python benchmarks/h200/latent.py --sanitize

Kernels are compiled in parallel, then each variant is checked against float64 (latent_cases.py), then the variants are
timed in turns (latent_rows.py), each checked on the row's own inputs before. All of it runs in other processes with a
time limit: one that hangs or faults is reported, and the others go on without it. `--peers` is a folder with
`peers_load.py`; without it FlashMLA is left out. `--only a,b` names variants; `--eager` times without CUDA graphs;
`--sanitize` runs a few calls in this process, of the variants named (base and dependent if none are).
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
from latent_cases import BF16, SCALE, STAGE, VARIANTS, Case, check, sanitize
from latent_rows import APART, IN_TURNS, PEER, ROWS, time_row

from tilewise.backends.gpu.kernel import OPTIONS
from tilewise.backends.hopper.mla.combine import combine
from tilewise.backends.hopper.mla.kernel import latent_decode
from tilewise.backends.hopper.mla.launch import Latent

MARK = "REPORT "
LIMIT = 60.0  # seconds without a word
Form = tuple[dict[str, Any], int, int, int, bool]  # ways, heads, queries, page size, paged


def warm(given: Form) -> str:
    """Compiles one kernel into Triton's cache, without a launch."""
    ways, heads, q_len, page, paged = given
    try:
        case = Case([64], heads, q_len, page, paged)
        latent = case.latent(**ways)
        out, lse = (
            torch.empty(1, heads, q_len, 512, device="cuda", dtype=BF16),
            torch.empty(1, heads, q_len, device="cuda"),
        )
        work = latent.workspace("cuda")
        made = latent.arguments(case.q, case.cache, out, lse, case.n, case.table, SCALE, work)
        taken = {name: made[name] for name in latent_decode.arg_names}
        latent_decode.warmup(grid=(latent.programs,), **taken, **OPTIONS)
        for batch in (1, 5, 16, 32, 128) if not ways.keys() - {"dependent"} and paged else ():
            other = Latent(latent.spec, batch, heads, q_len, 64)
            combine.warmup(grid=(1,), **other.combining(made), **latent.combine_options)
    except Exception as error:
        return f"{given}: {type(error).__name__}: {str(error)[:300]}"
    return ""


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


def check_all(names: list[str]) -> dict[str, str]:
    """Reports on all variants; after one that hangs or ends its process, the others go on in a new one."""
    reports: dict[str, str] = {}
    while left := [name for name in names if name not in reports]:
        found, stage, rest = listen(["--check", json.dumps(left)])
        reports |= dict(zip(left, found, strict=False))
        if rest:
            print(rest, flush=True)
        if len(found) < len(left):
            reports[left[len(found)]] = f"failed at {stage or 'start'}: {rest[-300:]}"
    return reports


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
        elif stage == IN_TURNS and len(tried) > 1:
            work[:0] = [(row, [way]) for way in tried]
    return rows, failed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--budget", type=float, default=3.0, help="seconds for each row")
    parser.add_argument("--eager", action="store_true", help="time calls, not CUDA graphs of them")
    parser.add_argument("--sanitize", action="store_true", help="a few calls in this process")
    parser.add_argument("--unchecked", action="store_true", help="time without the checks of small cases")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--time", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    names = args.only.split(",") if args.only else list(VARIANTS)
    if args.sanitize:
        sys.exit(bool(sanitize(names if args.only else ["base", "dependent"])))
    if args.check:
        for name in json.loads(args.check):
            wrong = check(VARIANTS[name], name == "base")
            print(MARK + (f"{len(wrong)} wrong: {wrong[0]}" if wrong else "right"), flush=True)
        return
    if args.time:
        for name, ways in json.loads(args.time):
            print(MARK + json.dumps(time_row(name, ways, args.peers, args.budget, args.eager)), flush=True)
        return
    start = time.perf_counter()
    kernels: list[Form] = [(VARIANTS[name], heads, 1, 64, True) for name in names for heads in (128, 16)]
    if "base" in names:
        kernels += [({}, 128, 1, 16, True), ({}, 128, 2, 64, False), ({}, 5, 3, 64, True)]
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for text in pool.map(warm, kernels):
            if text:
                print("not compiled:", text, flush=True)
    report: dict[str, Any] = {"torch": torch.__version__, "compiled_s": round(time.perf_counter() - start, 1)}
    print(f"compiled after {report['compiled_s']} s", flush=True)
    report["checks"] = {} if args.unchecked else check_all(names)
    for name, text in report["checks"].items():
        print(f"{name}: {text}", flush=True)
    print(f"checked after {time.perf_counter() - start:.0f} s", flush=True)
    # Wrong ones are timed too.
    ways = [name for name in names if not report["checks"].get(name, "").startswith("failed")]
    ways += [APART] * ("base" in ways) + [PEER] * bool(args.peers)
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
