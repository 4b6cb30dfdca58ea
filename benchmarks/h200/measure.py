"""Times tilewise's GPU kernels beside their peers, all in one run, interleaved.

    python benchmarks/h200/measure.py --suite prefill,decode --json result.json

Each row is one piece of work, each of its columns a way to do it (`timing.py`, `ways.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import suite_decode
import suite_pages
import suite_prefill
import torch
from timing import ceilings, measure, show

import tilewise

SUITES = {
    "prefill": suite_prefill.prefill, "f32": suite_prefill.f32, "options": suite_prefill.options,
    "packed": suite_prefill.packed, "decode": suite_decode.decode, "quantised": suite_decode.quantised,
    "pages": suite_pages.quantised_pages,
}  # fmt: skip


def compile_first(args: argparse.Namespace) -> None:
    """Fills Triton's cache from several processes."""
    parts = [
        subprocess.Popen(
            [sys.executable, __file__, "--suite", args.suite, "--part", f"{i}/{args.jobs}", "--only", args.only],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"SMALL": "1"},
        )
        for i in range(args.jobs)
    ]  # fmt: skip
    for part in parts:
        part.wait()


def compile_part(args: argparse.Namespace) -> None:
    index, count = (int(n) for n in args.part.split("/"))
    torch.manual_seed(0)
    number = 0
    for name in args.suite.split(","):
        for work in SUITES[name]():
            if args.only not in work.name:
                continue
            for way, make in work.ways.items():
                number += 1
                if number % count == index and not way.startswith(("cudnn", "fa2", "mem-eff")):
                    with suppress(Exception):
                        make()[0]()
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--suite", default=",".join(SUITES))
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--part", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.part:
        compile_part(args)
        return
    start = time.perf_counter()
    if args.jobs > 1:
        compile_first(args)
        print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tilewise": tilewise.__version__,
        "command": " ".join(sys.argv),
        "ceilings": ceilings(),
        "host us": suite_decode.host_cost(),
        "rows": {},
    }
    lines = []
    for name in args.suite.split(","):
        for work in SUITES[name]():
            if args.only not in work.name:
                continue
            times = measure(work, args.rounds, 12)
            record["rows"][work.name] = {"flops": work.flops, "bytes": work.bytes, "seconds": times}
            lines.append(show(work, times))
            print(f"{time.perf_counter() - start:.0f} s {work.name}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(record, indent=1) + "\n")
            torch.cuda.empty_cache()
    print(json.dumps({k: {n: round(x, 2) for n, x in record[k].items()} for k in ("ceilings", "host us")}))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
