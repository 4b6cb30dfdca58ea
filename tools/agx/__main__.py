"""Compiles every kernel of `cases.py` and writes the record.

python -m agx [--only WORDS] [--json RECORD]
"""

import argparse
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
    compiler.prepare()
    record: dict[str, Any] = {"packages": packages.versions(), "mlx_wheel": metallib.WHEEL}
    for kind, sources in KINDS.items():
        rows = record.setdefault(kind, {})
        for source in sources():
            if asked.only not in source.name:
                continue
            code = compiler.compile_text(source.opencl())
            facts = {"failed": code} if isinstance(code, str) else asdict(code)
            rows[source.name] = {"digest": source.digest, **source.facts, **facts}
            if isinstance(code, str):
                print(f"{source.name:45} {code}", flush=True)
                continue
            print(
                f"{source.name:45} {code.instructions:6} instructions {code.bytes:7} B {code.half_registers:4} half "
                f"registers {code.threads:5} threads {code.spills:5}:{code.fills} spilled"
                f"{'' if code.scheduled else ', not scheduled'}",
                flush=True,
            )
    if asked.json and not asked.only:
        asked.json.write_text(json_text(record) + "\n")


if __name__ == "__main__":
    main()
