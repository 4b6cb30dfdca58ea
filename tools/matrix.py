"""The compile matrix: every kind of kernel for every GPU that tilewise knows, without one.

    python tools/matrix.py --seconds 3600                       what is not in the record yet, the commonest first
    python tools/matrix.py --targets gfx942,sm_120 --cases decode
    python tools/matrix.py --docs                               what the record says, into docs/platforms.md
    python tools/matrix.py --news                               with another Triton: what the table of versions lacks

Each kernel of the list (`tests/helpers/compile_matrix.py`) is compiled to machine code. It must fit the target's
shared memory, use its matrix instructions and keep its loops free of spills. Of rows whose sources have changed since,
those whose program is still the same stay as they are, which is found in less than a second; then the commonest come
first. The record is written every few seconds, and whole: a run that is killed keeps what is done.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from datetime import datetime, timezone
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/helpers"))

import triton  # noqa: E402
from compile_matrix import TARGETS, Item, compiled, items, keep, wrong  # noqa: E402
from tilewise.backends.gpu.coverage import KERNELS  # noqa: E402

CACHE = ROOT / ".cache"
RECORD = ROOT / "benchmarks/records/aot/matrix.json"
DOCS = ROOT / "docs/platforms.md"
SAID = re.compile(r"(?<=<!-- by tools/matrix.py --docs -->\n).*?(?=<!-- end -->)", re.DOTALL)  # there, of the record
WIDTH = 125  # of a line there
MISSING = "missing"  # a version of Triton, in the table
EVERY = 5.0  # seconds after which the record is written
Row = dict[str, Any]
Place = tuple[str, str, int]  # of a kernel in the list: case, target, number


def record(file: Path) -> dict[str, Any]:
    """A record with its rows as dicts; the file has a line for each call, with a list for each of its kernels."""
    found = json.loads(file.read_text())
    columns, calls = found.pop("columns"), found.pop("calls")
    found["rows"] = [
        {"case": case, **dict(zip(columns, row, strict=True))} for case, rows in calls.items() for row in rows
    ]
    return found


def read(file: Path, listed: list[Item]) -> dict[Place, Row]:
    """The rows of a record, by their places in the list."""
    rows = record(file)["rows"] if file.exists() else []
    known = {item[:3] for item in listed}
    found = {(row["case"], row["target"], row["number"]): row for row in rows}
    return {place: row for place, row in found.items() if place in known}


def is_drawn(case: str) -> bool:
    """Whether a call is drawn at random."""
    return "drawn" in case


def left(wanted: list[Item], done: dict[Place, Row]) -> list[Item]:
    """What is to be compiled, and before it what may turn out to be the same program as before."""
    stale = [item for item in wanted if item[:3] not in done or done[item[:3]]["key"] != item.key]
    return sorted(stale, key=lambda item: "program" not in done.get(item[:3], ()))


def write(file: Path, done: dict[Place, Row], listed: list[Item]) -> None:
    """One line for each call, so that changes of a record can be read."""
    found = [done[item[:3]] for item in listed if item[:3] in done]
    keys = {item.key for item in listed}
    head = {
        "command": "make matrix", "date": f"{datetime.now(timezone.utc):%Y-%m-%d}", "triton": triton.__version__,
        "listed": dict(Counter(item.target for item in listed)),
        "kernels": dict(Counter(row["target"] for row in found)),
        "drawn": {
            "listed": sum(is_drawn(item.case) for item in listed),
            "kernels": sum(is_drawn(row["case"]) for row in found),
        },
        "sources": dict(Counter("these" if row["key"] in keys else "earlier" for row in found)),
        "wrong": sum(wrong(row) is not None for row in found),
    }  # fmt: skip
    columns = [name for name in found[0] if name != "case"] if found else []
    calls: dict[str, list[list[Any]]] = {}
    for row in found:
        calls.setdefault(row["case"], []).append([row[name] for name in columns])
    lines = ",\n  ".join(f"{json.dumps(case)}: {json.dumps(rows)}" for case, rows in calls.items())
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(f'{json.dumps(head)[:-1]}, "columns": {json.dumps(columns)}, "calls": {{\n  {lines}\n}}}}\n')
    part.replace(file)


def said(record: dict[str, Any]) -> str:
    """A record in words: how far it is, and which named calls spill in a loop, where and how much."""
    rows, drawn, earlier = record["rows"], record["drawn"], record["sources"].get("earlier", 0)
    listed = sum(record["listed"].values())
    spilled = [row for row in rows if wrong(row)]
    named = [row for row in spilled if not is_drawn(row["case"])]
    count, random, named_listed = len(rows), drawn["kernels"], listed - drawn["listed"]
    text = (
        f"The record has {count} of {listed} kernels: {count - random} of {named_listed} of named calls, {random} of"
        f" {drawn['listed']} of random calls. {earlier} were compiled from sources that have changed since."
        f" {len(spilled)} kernels spill in a loop. {len(spilled) - len(named)} of them are of random calls, which"
        " combine formats, options and head dims as no model does; the record names each. The others:"
    )
    lines = [textwrap.fill(text, WIDTH), "", "| call | kernel | GPU | spills in a loop |\n|---|---|---|---|"]
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in named:
        cells.setdefault((row["case"], row["kernel"]), []).append(row)
    for (case, kernel), found in cells.items():
        where = ", ".join(dict.fromkeys(row["target"] for row in found))
        counts = sorted({row["loop_spills"] for row in found})
        lines.append(f"| `{case}` | `{kernel}` | {where} | {', '.join(map(str, counts))} |")
    return "\n".join(lines) + "\n"


def news(version: str, rows: Iterable[Row]) -> list[str]:
    """What rows compiled by a Triton say that `backends/gpu/coverage.py` does not; spills are no news."""
    short, rows = ".".join(version.split(".")[:2]), list(rows)
    found = []
    for backend, families in KERNELS.items():
        own = [row for row in rows if row["case"].startswith("hopper ") == (backend == "hopper")]
        failed = [row for row in own if "error" in row]
        said = f"{backend}: {len(own) - len(failed)} of {len(own)} kernels compile with Triton {short}"
        known = [entries.get(short, MISSING) for entries in families.values()]
        if MISSING in known:
            found.append(f"{said}, which coverage.py does not list")
        elif own and not failed and None in known:
            found.append(f"{said}, and coverage.py says that they do not")
        elif failed and None not in known:
            first = failed[0]
            found.append(f"{said}; first not: {first['case']} for {first['target']}: {first['error']}")
    return found


def run(todo: Iterable[Item], done: dict[Place, Row], jobs: int, seconds: float) -> Iterator[Row]:
    """Compiles, a few at a time, until all is done or the time is up."""
    end = time.monotonic() + seconds
    waiting: dict[Future[Row], Item] = {}
    items_left = iter(todo)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=500) as pool:
        while True:
            while len(waiting) < jobs + 4 and time.monotonic() < end and (item := next(items_left, None)) is not None:
                waiting[pool.submit(compiled, item)] = item
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                row = future.result()
                done[waiting.pop(future)[:3]] = row
                yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS), help="names, comma separated; default: all")
    parser.add_argument("--cases", default="", help="only cases that have this in their name")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no kernel after so many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="the record, read and written")
    parser.add_argument("--docs", action="store_true", help="compile nothing, write what the record says")
    parser.add_argument(
        "--news", action="store_true", help="fail if the table of versions differs, not if a loop spills; own record"
    )
    args = parser.parse_args()
    args.json = args.json or (CACHE / f"matrix-{triton.__version__}.json" if args.news else RECORD)
    if args.docs:
        text = said(record(args.json))
        DOCS.write_text(SAID.sub(lambda _: text, DOCS.read_text()))
        return 0
    targets = args.targets.split(",")
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    listed = items()
    done = read(args.json, listed)
    wanted = [item for item in listed if item.target in targets and args.cases in item.case]
    todo = left(wanted, done)
    for row in done.values():
        keep(row)
    print(f"{len(listed)} kernels, {len(todo)} of these to compile", flush=True)
    written = time.monotonic()
    try:
        for row in run(todo, done, args.jobs, args.seconds):
            told = wrong(row)
            print(
                f"{row['target']:8} {row['case']}: {row['kernel']}, {row['tile']}: "
                + (told or f"{row['shared']} B, {row['registers']} registers, {row['instruction'] or 'no products'}"),
                flush=True,
            )
            if time.monotonic() - written > EVERY:
                write(args.json, done, listed)
                written = time.monotonic()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        write(args.json, done, listed)
    failed = [row for row in done.values() if row["target"] in targets and wrong(row)]
    print(f"{len(done)} of {len(listed)} kernels compiled, {len(failed)} of these targets wrong")
    if args.news:
        failed = news(triton.__version__, done.values())
        print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
