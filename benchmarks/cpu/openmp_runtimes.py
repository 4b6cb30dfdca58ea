"""Decode and prefill beside SDPA in processes with several OpenMP runtimes, on a quiet and on a busy machine.

    make openmp

The runtimes: torch's alone; a second libgomp, which scikit-learn and sentencepiece bring, imported before torch and
after it; libiomp5 and libomp by LD_PRELOAD. "Busy": another process computes on one core all the time. A step is a
matrix product by torch and a call of attention, timed together, because threads that spin cost the other its cores; our
steps and SDPA's are interleaved one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IMPORTS = {"scikit-learn": "sklearn.cluster", "sentencepiece": "sentencepiece"}
SHAPES = {"decode": (8, 1, 4096), "prefill": (8, 256, 256)}  # heads of 64, queries, keys
WIDTH = 1024  # of the product: about as long as a step's attention


def measure(before: str, after: str, threads: int, seconds: float) -> None:
    """In a process of its own: prints what was found as JSON."""
    for module in filter(None, [before, "torch", after]):
        __import__(module)
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import tilewise
    from tilewise.backends.cpu.threads import describe

    torch.set_num_threads(threads)
    rows, weights = torch.randn(32, WIDTH), torch.randn(WIDTH, WIDTH)
    found: dict[str, Any] = {"runtime": describe()}
    with torch.inference_mode():
        for name, (heads, queries, keys) in SHAPES.items():
            q, k, v = torch.randn(1, heads, queries, 64), *torch.randn(2, 1, heads, keys, 64)
            calls = {"tilewise": tilewise.attention, "SDPA": scaled_dot_product_attention}
            times: dict[str, list[float]] = {peer: [] for peer in calls}
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                for peer in ("tilewise", "SDPA", "SDPA", "tilewise"):
                    start = time.perf_counter()
                    torch.mm(rows, weights)
                    calls[peer](q, k, v)
                    times[peer].append(time.perf_counter() - start)
            found[name] = {
                peer: {"median": 1e3 * statistics.median(x[4:]), "mean": 1e3 * statistics.fmean(x[4:])}
                for peer, x in times.items()
            }
    print(json.dumps(found))


@contextmanager
def load(busy: bool) -> Iterator[None]:
    """Another process that computes, or none."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if other is not None:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--libiomp5", type=Path, help="the library, to be preloaded")
    parser.add_argument("--libomp", type=Path)
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        help="for each shape on a quiet machine; a busy one takes three times as long",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        before, after, threads = given.measure
        measure(before, after, int(threads), given.seconds)
        return
    from tilewise.tools.bench.machine import describe
    from tilewise.tools.bench.report import write_json

    cases: dict[str, tuple[str, str, Path | None]] = {"torch's alone": ("", "", None)}
    for library, module in IMPORTS.items():
        cases |= {f"{library} before torch": (module, "", None), f"{library} after torch": ("", module, None)}
    for name in ("libiomp5", "libomp"):
        if (file := getattr(given, name)) is not None:
            cases[f"{name} preloaded"] = ("", "", file)
    cores = len(os.sched_getaffinity(0))
    records = []
    for case, (before, after, file) in cases.items():
        for threads in sorted({1, cores}):
            for busy in (False, True):
                # A busy machine takes a core away for milliseconds at a time: the averages need many of these.
                command = [sys.executable, __file__, "--seconds", str(given.seconds * (3 if busy else 1))]
                environment = os.environ | ({"LD_PRELOAD": str(file)} if file else {})
                environment.pop("OMP_NUM_THREADS", None)
                with load(busy):
                    done = subprocess.run(
                        [*command, "--measure", before, after, str(threads)],
                        env=environment,
                        stdout=subprocess.PIPE,
                        text=True,
                        check=True,
                    )
                found = json.loads(done.stdout)
                about = {"case": case, "threads": threads, "busy": busy}
                for shape in SHAPES:
                    ours, peer = found[shape]["tilewise"], found[shape]["SDPA"]
                    ratios = {of: peer[of] / ours[of] for of in ("median", "mean")}
                    records.append(about | {"shape": shape, "ms": found[shape], "ratios": ratios})
                    print(
                        f"{case:28} {threads} threads, {'busy' if busy else 'quiet':6} {shape:8} "
                        f"{ours['median']:7.3f} ms, SDPA {peer['median']:7.3f}: {ratios['median']:.2f}x "
                        f"({ratios['mean']:.2f}x on average)",
                        flush=True,
                    )
    if given.json:
        write_json(given.json, {**describe("make openmp"), "records": records})


if __name__ == "__main__":
    main()
