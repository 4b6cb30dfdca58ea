"""Runs a notebook's code cells without Jupyter, and with --write keeps what they print as their outputs.

python tools/notebook.py examples/tour.ipynb --write
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any


def run(notebook: dict[str, Any], name: str = "notebook") -> list[str]:
    """What each code cell prints, one after the other in one namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(code_cells(notebook), 1):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), f"{name}, code cell {number}", "exec"), namespace)
        printed.append(out.getvalue())
    return printed


def shown(notebook: dict[str, Any]) -> list[str]:
    """What each code cell is shown to print."""
    return ["".join("".join(out["text"]) for out in cell["outputs"]) for cell in code_cells(notebook)]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def write(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, text) in enumerate(zip(code_cells(notebook), run(notebook, path.name), strict=True), 1):
        cell["execution_count"] = number
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["outputs"] = [stream] if text else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true", help="keep what the cells print")
    options = parser.parse_args()
    if options.write:
        write(options.notebook)
    else:
        print("".join(run(json.loads(options.notebook.read_text(encoding="utf-8")), options.notebook.name)), end="")
