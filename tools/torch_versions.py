"""A first call on a CPU with each version of torch, in an environment of its own.

python tools/torch_versions.py --environments .cache/torch      installs them (several GB each) and runs
python tools/torch_versions.py --docs                           the record as a table, in docs/platforms.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from tilewise.tools.bench.report import json_text

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks/records/cpu/torch_versions.json"
DOCS = ROOT / "docs/platforms.md"
SAID = re.compile(r"(?<=<!-- by tools/torch_versions.py --docs -->\n).*?(?=<!-- end -->)", re.DOTALL)
VERSIONS = ("2.6", "2.11", "2.13", "2.15")
CALL = """
import json, platform
import numpy, numba, torch
import tilewise

torch.manual_seed(0)
q, k, v = torch.randn(1, 4, 100, 64), torch.randn(1, 2, 300, 64), torch.randn(1, 2, 300, 64)
out = tilewise.attention(q, k, v, causal=True, q_offset=200)
exact = tilewise.attention(q, k, v, causal=True, q_offset=200, backend="reference")
print(json.dumps({
    "torch": torch.__version__, "python": platform.python_version(), "numpy": numpy.__version__,
    "numba": numba.__version__, "backend": tilewise.plan(q, k, v, causal=True, q_offset=200).backend,
    "error": float(f"{(out - exact).abs().max():.2g}"),
}))
"""


def first_call(version: str, environments: Path) -> dict[str, Any]:
    """Of a process that has this torch; its environment is made if it is not there."""
    folder = environments / version
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    needs = [f"torch=={version}.*", "numpy>=1.24", "numba>=0.60", "typing-extensions>=4.10"]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *needs]
    subprocess.run(pip, check=True)
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [python, "-W", "error::RuntimeWarning", "-c", CALL], env=environ, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"torch {version}:\n{done.stderr}")
    return json.loads(done.stdout)


def said(rows: dict[str, dict[str, Any]]) -> str:
    """The record as a table."""
    lines = ["| torch | Python | numpy | Numba | backend | largest error |", "|---|---|---|---|---|---|"]
    for row in rows.values():
        cells = [row[name] for name in ("torch", "python", "numpy", "numba", "backend")]
        lines.append(f"| {' | '.join(cells)} | {row['error']:.1e} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ROOT / ".cache/torch", help="where they are, or are made")
    parser.add_argument("--versions", nargs="*", default=VERSIONS)
    parser.add_argument("--docs", action="store_true", help="run nothing, write what the record says")
    args = parser.parse_args()
    rows = json.loads(RECORD.read_text())["versions"] if RECORD.exists() else {}
    if args.docs:
        text = said(rows)
        DOCS.write_text(SAID.sub(lambda _: text, DOCS.read_text(), count=1))
        return
    for version in args.versions:
        rows[version] = first_call(version, args.environments)
        print(rows[version], flush=True)
        rows = {each: rows[each] for each in VERSIONS if each in rows}
        RECORD.write_text(json_text({"command": "make torches", "versions": rows}) + "\n")


if __name__ == "__main__":
    main()
