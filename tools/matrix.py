"""The compile matrix: every kind of kernel for every GPU that tilewise knows, without one.

    python tools/matrix.py --seconds 3600                       what is not in the record yet, the commonest first
    python tools/matrix.py --targets gfx942,sm_120 --cases decode

Each kernel of each case (`tests/helpers/compile_matrix.py`) is compiled to machine code. It must fit the target's
shared memory, use its matrix instructions and keep its loops free of spills. Kernels are known by what their binary
depends on: those in the record are compiled again only if something of that has changed. Ctrl-C keeps what is done.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from datetime import datetime, timezone
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/helpers"))

import triton  # noqa: E402
from compile_matrix import FIRST, TARGETS, cases, commonest, compiled, entries, refusal, wrong  # noqa: E402

RECORD = ROOT / "benchmarks/records/aot/matrix.json"
EVERY = 10  # kernels after which the record is written
Row = dict[str, Any]
Item = tuple[str, str, str]  # case, target, key


def items(targets: list[str], named: list[str]) -> Iterator[Item]:
    """All kernels, each once: case by case, for every target; the most important of the commonest cases first."""
    seen = set()
    first = ((case, target, commonest) for case in named if case in FIRST for target in targets)
    rest = ((case, target, entries) for case in named for target in targets)
    for case, target, found in chain(first, rest):
        for key, *_ in found(case, target) if refusal(case, target) is None else ():
            if key not in seen:
                seen.add(key)
                yield case, target, key


def read(file: Path) -> dict[str, Row]:
    """The rows of a record by their keys; what was wrong is tried again."""
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return {row["key"]: row for row in rows if wrong(row) is None}


def write(file: Path, rows: Iterable[Row]) -> None:
    """One row a line, so that changes of a record can be read."""
    found = list(rows)
    names = list(cases())
    found.sort(key=lambda row: (names.index(row["case"]), list(TARGETS).index(row["target"]), row["kernel"]))
    head = {
        "command": "make matrix", "date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "triton": triton.__version__,
        "kernels": dict(Counter(row["target"] for row in found)),
        "wrong": sum(wrong(row) is not None for row in found),
    }  # fmt: skip
    lines = ",\n  ".join(json.dumps(row) for row in found)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n  {lines}\n]}}\n')


def run(todo: Iterator[Item], done: dict[str, Row], jobs: int, seconds: float, file: Path) -> Iterator[Row]:
    """Compiles what the record does not hold, a few at a time, until all is done or the time is up."""
    end = time.monotonic() + seconds
    waiting: dict[Future[Row], float] = {}
    left = (item for item in todo if item[2] not in done)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=40) as pool:
        while True:
            while len(waiting) < jobs and time.monotonic() < end and (item := next(left, None)) is not None:
                waiting[pool.submit(compiled, *item)] = time.monotonic()
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                row = future.result() | {"seconds": round(time.monotonic() - waiting.pop(future), 1)}
                done[row["key"]] = row
                if len(done) % EVERY == 0:
                    write(file, done.values())
                yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS), help="names, comma separated; default: all")
    parser.add_argument("--cases", default="", help="only cases that have this in their name")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no kernel after so many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, default=RECORD, help="the record, read and written")
    parser.add_argument("--fresh", action="store_true", help="forget rows of kernels that are no longer chosen")
    args = parser.parse_args()
    targets = args.targets.split(",")
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    named = [name for name in cases() if args.cases in name]
    done = read(args.json)
    if args.fresh:
        chosen = {key for _, _, key in items(list(TARGETS), list(cases()))}
        done = {key: row for key, row in done.items() if key in chosen}
    try:
        for row in run(items(targets, named), done, args.jobs, args.seconds, args.json):
            told = wrong(row)
            print(
                f"{row['target']:8} {row['case']}: {row['kernel']}, {row['tile']}: "
                + (told or f"{row['shared']} B, {row['registers']} registers, {row['instruction'] or 'no products'}"),
                flush=True,
            )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        write(args.json, done.values())
    failed = [row for row in done.values() if row["target"] in targets and wrong(row)]
    print(f"{len(done)} kernels compiled, {len(failed)} of these targets wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
