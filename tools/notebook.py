"""Runs a notebook's code cells without Jupyter, and with --write keeps what they print as their outputs.

With --page it makes the notebook of a document first: its text, and its Python blocks with the outputs that it shows.

python tools/notebook.py examples/tour.ipynb --write
python tools/notebook.py examples/score_mods.ipynb --page docs/score-mods.md
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
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


def of_page(page: Path, path: Path) -> dict[str, Any]:
    """A document as a notebook at `path`. A `text` block is the output of the Python block before it."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made: dict[str, Any] = {"cells": [], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    folder = os.path.relpath(page.parent, path.parent)
    parts = re.split(r"(?ms)^```(python|text)\n(.*?)^```$", page.read_text(encoding="utf-8"))
    for text, language, block in zip(parts[::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True):
        if text.strip():
            linked = re.sub(r"\]\((?=[^)#:\s]+[)#])", f"]({folder}/", text.strip())
            made["cells"].append({"cell_type": "markdown", "metadata": {}, "source": linked.splitlines(keepends=True)})
        if language == "python":
            lines = block.strip().splitlines(keepends=True)
            made["cells"].append(
                {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": lines}
            )
        elif language == "text":
            stream = {"name": "stdout", "output_type": "stream", "text": block.splitlines(keepends=True)}
            made["cells"][-1]["outputs"] = [stream]
    for number, cell in enumerate(made["cells"]):
        cell["id"] = f"cell-{number}"
    return made


def write(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, text) in enumerate(zip(code_cells(notebook), run(notebook, path.name), strict=True), 1):
        cell["execution_count"] = number
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["outputs"] = [stream] if text else []
    save(notebook, path)


def save(notebook: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--write", action="store_true", help="keep what the cells print")
    parser.add_argument("--page", type=Path, help="make the notebook of this document")
    options = parser.parse_args()
    if options.page:
        save(of_page(options.page, options.notebook), options.notebook)
    elif options.write:
        write(options.notebook)
    else:
        print("".join(run(json.loads(options.notebook.read_text(encoding="utf-8")), options.notebook.name)), end="")
