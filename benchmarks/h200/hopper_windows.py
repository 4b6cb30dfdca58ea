"""D=64 with windows and chunks: the Hopper kernel with P V waited for early, as it is, and late, beside Triton's.

    python benchmarks/h200/hopper_windows.py --json hopper_windows.json

All ways of a row take turns in CUDA graphs; each is checked against Triton's first.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timing import ceilings, graphed, seconds

from hopper import inputs, public
from tilewise.backends.gpu.target import target_of
from tilewise.backends.hopper.fwd import config
from tilewise.backends.hopper.fwd.launch import Launcher
from tilewise.core.options import Options
from tilewise.core.plan import Plan
from tilewise.validation import calls

WORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "1k, window 256": (1024, {"causal": True, "window": 256}),
    "4k, window 1024": (4096, {"causal": True, "window": 1024}),
    "16k, window 1024": (16384, {"causal": True, "window": 1024}),
    "16k, window 4096": (16384, {"causal": True, "window": 4096}),
    "16k, window of 512 both ways": (16384, {"window": (512, 512)}),
    "4k, chunks of 1024": (4096, {"causal": True, "chunk": 1024}),
    "16k, chunks of 4096": (16384, {"causal": True, "chunk": 4096}),
    "16k, causal, softcap 50": (16384, {"causal": True, "softcap": 50.0}),
}


def bound(late: bool, *given: torch.Tensor, **options: Any) -> Any:
    call = calls.dense(*given, Options(**options))
    c = replace(config.config_of(call.problem), late_wait=late)
    made = Launcher(Plan(call.problem, "hopper", "", (64 * c.consumers, c.BN)), c, target_of(call.problem.device))

    def run() -> torch.Tensor:
        made(call.tensors)
        return call.out

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name, (L, rules) in WORKS.items():
        if options.only not in name:
            continue
        given = inputs(16384 // L, 32, 32, L, 64, "blhd")
        ways = {
            "triton": public("triton", *given, **rules),
            "early": bound(False, *given, **rules),
            "late": bound(True, *given, **rules),
        }
        want = ways["triton"]().float()
        for way, run in ways.items():
            error = (run().float() - want).abs().max().item()
            assert error < 0.05, f"{name}, {way}: off by {error:.2g}"
        taken = seconds({way: graphed([run]) for way, run in ways.items()}, options.rounds, 3.0)
        rows.append({"work": name, "us": {way: round(t * 1e6, 1) for way, t in taken.items()}})
        print(name.ljust(30), rows[-1]["us"], flush=True)
    if options.json:
        report = {"device": "H200", "about": "D=64, 32 heads, 16k tokens, bf16", "ceilings": ceilings(), "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
