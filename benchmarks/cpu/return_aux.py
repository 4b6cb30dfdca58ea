"""Calls that return statistics (`return_aux`), beside the same call without.

    python benchmarks/cpu/return_aux.py --json benchmarks/records/cpu/return_aux.json

Interleaved, the least time of many repeats, float32, 8 heads of 64, causal. With `--threads 1` times are CPU time,
which holds on a busy machine too; else wall time.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilewise import attention
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import aligned, write_json

LENGTHS = (512, 2048)
WAYS: dict[str, dict[str, Any]] = {
    "without": {},
    "max_logits": {"return_aux": ("max_logits",)},
    "entropy": {"return_aux": ("entropy",)},
    "both": {"return_aux": ("max_logits", "entropy")},
    "key_mass": {"return_aux": ("key_mass",)},
    "key_mass of 32": {"return_aux": ("key_mass",), "key_mass_queries": 32},
}


def check(L: int) -> None:
    """Against plain torch."""
    q, k, v = (torch.randn(1, 2, L, 64) for _ in range(3))
    scores = (q @ k.mT * 64**-0.5).masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
    weights = torch.softmax(scores, -1)
    _, aux = attention(q, k, v, causal=True, return_aux=("max_logits", "entropy", "key_mass"))
    torch.testing.assert_close(aux.max_logits, scores.amax(-1))
    torch.testing.assert_close(aux.entropy, torch.special.entr(weights).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(aux.key_mass, weights.sum(2), atol=1e-4, rtol=1e-4)


def measure(L: int, seconds: float, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of each way, and its speed relative to the call without."""
    q, k, v = (torch.randn(1, 8, L, 64) for _ in range(3))
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["without"]) < 4:
        for way, options in WAYS.items():
            start = clock()
            attention(q, k, v, causal=True, **options)
            times[way].append(clock() - start)
    least = {way: min(taken[1:]) * 1e3 for way, taken in times.items()}
    return {"L": L, "ms": least, "speed": {way: least["without"] / ms for way, ms in least.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each length")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    check(128)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    rows = [measure(L, args.seconds, clock) for L in args.lengths]
    shown = [[str(row["L"]), *(f"{x:.2f}x" for x in row["speed"].values())] for row in rows]
    print("\n".join(aligned([["L", *WAYS], *shown])))
    if args.json:
        how = {"threads": torch.get_num_threads(), "clock": "CPU" if args.threads == 1 else "wall"}
        write_json(args.json, describe(shlex.join(["python", *sys.argv])) | how | {"rows": rows})


if __name__ == "__main__":
    main()
