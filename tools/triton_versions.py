"""Main loops of the Hopper kernels by version of Triton: instructions, registers, spills.

    python tools/triton_versions.py --seconds 600       compiles with the installed Triton, into the record
    PYTHONPATH=.cache/triton-3.9.0 python tools/triton_versions.py
    python tools/triton_versions.py --docs              the record as a table, in docs/platforms.md

It compiles what the record lacks; --again: everything, after a change of the kernels.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/helpers"))

import triton  # noqa: E402
from assembler import assembled, disassembled, multiplying  # noqa: E402
from compile_matrix import MAIN, entries, source_of  # noqa: E402
from tilewise.tools.bench.report import json_text  # noqa: E402

RECORD = ROOT / "benchmarks/records/aot/triton_versions.json"
DOCS = ROOT / "docs/platforms.md"
SAID = re.compile(r"(?<=<!-- by tools/triton_versions.py --docs -->\n).*?(?=<!-- end -->)", re.DOTALL)
TARGET = "sm_90"
CASES = (
    "D64", "D64-causal", "D128", "D128-causal", "backward 0, D64", "backward 1, D64", "backward 2, D128",
    "backward 3, D128", "backward 0, D256 wide", "latent", "D256", "D256-causal", "backward 4, D128",
    "backward 6, D128", "backward 7, D128", "latent few rows", "latent indices", "latent indices fp8", "D64-short",
    "D64-window", "window", "softcap", "varlen", "lse", "f16", "D192/128", "backward 5, D64", "backward 1, D192 wide",
    "D512", "D512-causal", "backward 6, D256 wide", "backward 2, D512 wide", "varlen-all",
)  # fmt: skip
Row = dict[str, Any]


def loops_of(kernel: Any, given: dict[str, Any]) -> Row:
    """What a kernel's main loops take: the innermost of those that multiply."""
    source, gpu, options = source_of(kernel, given, TARGET)
    made = assembled(source, gpu.arch, options)
    code, spans = disassembled(made.sass)
    spans = [(a, b) for a, b in spans if not any("EXIT" in x for x in code[a:b])]  # as in `local_in_loops`
    loops = [code[a:b] for a, b in multiplying(code, spans, "MMA")]
    spills = [sum(bool(re.search(r"\b(STL|LDL)", x)) for x in loop) for loop in loops]
    return {"instructions": [len(loop) for loop in loops], "registers": made.registers, "spills": max(spills)}


def part_of(s: Any) -> str:
    """Which of the launches of a wide backward pass a kernel is."""
    if not hasattr(s, "of_queries"):
        return ""
    return ": dQ" if s.of_queries else f": d{s.only.upper()}" if s.only else ": dK, dV"


def read() -> dict[str, dict[str, Row]]:
    """Rows by kernel and version."""
    return json.loads(RECORD.read_text())["kernels"] if RECORD.exists() else {}


def write(rows: dict[str, dict[str, Row]]) -> None:
    head = {"command": "make loops WITH=3.9.0", "target": TARGET}
    RECORD.write_text(json_text(head | {"kernels": rows}) + "\n")


def compile_all(wanted: str, again: bool, seconds: float) -> None:
    end, rows, version = time.monotonic() + seconds, read(), triton.__version__
    for case in (case for case in CASES if wanted in case):
        for _, name, kernel, given in entries(f"hopper {case}", TARGET):
            if name.removeprefix("gluon ") not in MAIN:
                continue
            row = rows.setdefault(case + part_of(kernel.constants["S"]), {})
            if (version in row and not again) or time.monotonic() > end:
                continue
            row[version] = loops_of(kernel, given)
            print(f"{version} {case}: {row[version]}", flush=True)
            write(rows)


def span(numbers: list[int]) -> str:
    return f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"


def said(rows: dict[str, dict[str, Row]]) -> str:
    """The record as a table."""
    versions = sorted({version for row in rows.values() for version in row})
    lines = [f"| kernel | {' | '.join(versions)} |", "|---" * (1 + len(versions)) + "|"]
    for name, row in rows.items():
        cells = [
            f"{span(row[v]['instructions'])}; {row[v]['registers']}; {row[v]['spills']}" if v in row else ""
            for v in versions
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no kernel after so many")
    parser.add_argument("--cases", default="", help="only kernels that have this in their name")
    parser.add_argument("--again", action="store_true", help="what is in the record too")
    parser.add_argument("--docs", action="store_true", help="compile nothing, write what the record says")
    args = parser.parse_args()
    if args.docs:
        text = said(read())
        DOCS.write_text(SAID.sub(lambda _: text, DOCS.read_text(), count=1))
    else:
        compile_all(args.cases, args.again, args.seconds)


if __name__ == "__main__":
    main()
