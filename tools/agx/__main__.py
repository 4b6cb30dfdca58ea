"""Compiles every kernel of `cases.py` and writes the record.

python -m agx [--only WORDS] [--json RECORD]
"""

import argparse
import fcntl
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agx import compiler, packages
from agx.cases import KINDS
from mslsim import metallib
from tilewise.tools.bench.report import json_text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m agx", description=__doc__)
    parser.add_argument("--only", default="", help="kernels with this in their names; nothing is written then")
    parser.add_argument("--json", type=Path, help="where the record is written")
    asked = parser.parse_args()
    packages.FOLDER.mkdir(parents=True, exist_ok=True)
    lock = (packages.FOLDER / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time: they share files, and so does the shim
    compiler.prepare()
    record: dict[str, Any] = {"packages": packages.versions(), "mlx_wheel": metallib.WHEEL, "tool": tool_digest()}
    before = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    same = {name: before.get(name) for name in record} == record
    for kind, sources in KINDS.items():
        known = before.get(kind, {}) if same else {}
        rows = record.setdefault(kind, {})
        for source in sources():
            if asked.only not in source.name:
                continue
            row = known.get(source.name)
            if row is None or row["digest"] != source.digest or "failed" in row:
                code = compiler.compile_text(source.opencl())
                facts = {"failed": code} if isinstance(code, str) else asdict(code)
                row = {"digest": source.digest, **source.facts, **facts}
            rows[source.name] = row
            print(f"{source.name:45} {described(row)}", flush=True)
            if asked.json and not asked.only:  # what is there is not compiled again, should this be stopped
                asked.json.write_text(json_text({**before, **record, kind: {**known, **rows}}) + "\n")
    if asked.json and not asked.only:
        asked.json.write_text(json_text(record) + "\n")


def tool_digest() -> str:
    """Of what the numbers depend on besides the texts."""
    files = (Path(__file__).with_name(name) for name in ("metal.h", "translate.py", "compiler.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def described(row: dict[str, Any]) -> str:
    if "failed" in row:
        return str(row["failed"])
    words = (
        f"{row['instructions']:6} instructions {row['bytes']:7} B {row['half_registers']:4} half registers "
        f"{row['threads']:5} threads {row['spills']:5}:{row['fills']} spilled"
    )
    return words if row["scheduled"] else f"{words}, not scheduled"


if __name__ == "__main__":
    main()
