"""Rewrites the records of benchmarks/records with one row a line and seven digits a number.

    python tools/compact_records.py

Of a record of `tilewise verify`, the counts stay and the reasons of what was not checked.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewise.tools.bench.report import json_text

RECORDS = Path(__file__).resolve().parents[1] / "benchmarks/records"
MATRIX = "matrix.json"  # tools/matrix.py writes a table


def rounded(data: Any) -> Any:
    """Floats with seven digits, which is more than a measurement has; all else as it is."""
    if isinstance(data, Mapping):
        return {key: rounded(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [rounded(value) for value in data]
    return float(f"{data:.7g}") if isinstance(data, float) else data


def compact(data: Any) -> str:
    """The text of a record."""
    if isinstance(data, dict) and "checks" in data and "unsupported" in data:
        rest = [check for check in data.pop("checks") if check["status"] != "ok"]
        if rest:
            data["not ok"] = dict(Counter(f"{check['status']}: {check['detail']}" for check in rest))
    return json_text(rounded(data)) + "\n"


def main() -> None:
    for file in sorted(RECORDS.rglob("*.json")):
        if file.name != MATRIX:
            file.write_text(compact(json.loads(file.read_text())))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
