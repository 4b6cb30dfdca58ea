"""Does the bench agree with a timing loop that one writes by hand?

    python benchmarks/cpu/by_hand.py --json benchmarks/records/cpu/by_hand.json

For some cases of `tilewise bench --suite cpu --quick` the bench's own time of ours and of the peer is compared with the
median of a plain loop over the same calls. The two take short turns, many of them, since a machine's speed drifts, and
what is compared is the median of the ratios of neighbours. Exit status 1 if a time differs by more than 5%.
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

from tilewise.tools.bench import cpu_suite
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.measure import interleaved
from tilewise.tools.bench.report import aligned, time_text, write_json

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
    """The bench's time, the loop's, and how far they are apart, for ours and for the peer."""
    made = case.prepare()
    calls = {"ours": made.ours, "peer": made.peer}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(rounds):
        loop = {name: by_hand(call, budget / 2) for name, call in calls.items()} if number % 2 else {}
        bench = dict(zip(calls, interleaved(list(calls.values()), budget), strict=True))
        loop = loop or {name: by_hand(call, budget / 2) for name, call in calls.items()}  # after it, every second time
        for name in calls:
            pairs[name].append((bench[name].seconds, loop[name]))
    found = {}
    for name, times in pairs.items():
        ratio = statistics.median(mine / theirs for mine, theirs in times)
        theirs = statistics.median(theirs for _, theirs in times)
        found[name] = {"bench": theirs * ratio, "by_hand": theirs, "difference": ratio - 1}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--budget", type=float, default=0.12, help="seconds of each turn")
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
