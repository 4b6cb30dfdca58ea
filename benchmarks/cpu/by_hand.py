"""Does the bench agree with a timing loop that one writes by hand?

    python benchmarks/cpu/by_hand.py --json benchmarks/cpu/by_hand.json

For some cases of `tilewise bench --suite cpu --quick` the bench's own time of ours and of the peer is compared with the
median of a plain loop over the same calls. The two take short turns, many of them, since a machine's speed drifts, and
the best of each is compared: what a machine shared with others gives when nobody disturbs it. Exit status 1 if a time
differs by more than 5%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tilewise.bench import cpu_suite
from tilewise.bench.machine import describe
from tilewise.bench.measure import take_turns
from tilewise.bench.report import aligned, time_text, write_json

MOST = 0.05
ROWS = ("prefill f32", "prefill D 512", "padding mask, half hidden", "decode GQA 32/8 8k f32", "decode int8 cache")


def by_hand(call: Callable[[], object], budget: float) -> float:
    """What anyone would write: call it for a while, take the median."""
    call()
    times: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.no_grad()
def compared(case: cpu_suite.Case, rounds: int, budget: float) -> dict[str, dict[str, float]]:
    """The bench's time and the loop's, for ours and for the peer."""
    made = case.prepare()
    calls = {"ours": made.ours, "peer": made.peer}
    bench: dict[str, list[float]] = {name: [] for name in calls}
    loop: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, timing in zip(calls, take_turns(list(calls.values()), budget), strict=True):
            bench[name].append(timing.seconds)
        for name, call in calls.items():
            loop[name].append(by_hand(call, budget / 2))
    found = {}
    for name in calls:
        theirs, mine = min(loop[name]), min(bench[name])
        found[name] = {"bench": mine, "by_hand": theirs, "difference": mine / theirs - 1}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--budget", type=float, default=0.25, help="seconds of each turn")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = {case.row: case for case in cpu_suite.cases(cpu_suite.Sizes(), quick=True) if case.row in ROWS}
    record = describe("python benchmarks/cpu/by_hand.py") | {"most": MOST, "cases": {}}
    lines = [["case", "of", "bench", "by hand", "difference"]]
    for row, case in cases.items():
        found = compared(case, args.rounds, args.budget)
        record["cases"][f"{row}: {case.name}"] = found
        print(row, {name: f"{of['difference']:+.1%}" for name, of in found.items()}, file=sys.stderr, flush=True)
        for name, of in found.items():
            times = [time_text(of[key]) for key in ("bench", "by_hand")]
            lines.append([f"{row}: {case.name}", name, *times, f"{of['difference']:+.1%}"])
    far = [
        of["difference"] for found in record["cases"].values() for of in found.values() if abs(of["difference"]) > MOST
    ]
    record["agrees"] = not far
    print("\n".join(aligned(lines)))
    print("all within 5%" if not far else f"{len(far)} differ by more than 5%")
    if args.json:
        write_json(args.json, json.loads(json.dumps(record)))
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
