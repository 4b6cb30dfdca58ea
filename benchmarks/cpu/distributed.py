"""What `tilewise.distributed` promises beyond one device, as numbers: by its plan, and by four processes.

    python benchmarks/cpu/distributed.py --tests --json benchmarks/records/cpu/distributed.json

model      share of ideal of a zigzag over 8 ranks by the plan's model: of tilewise on an H200 with an H100's links, and
           of ring-flash-attention on 8 H800 beside what it has published
window     steps and bytes of a window of 4096 in a ring of 64 ranks at a million tokens, beside those of no window
balance    the most work of a rank over the mean, of packed batches of documents of 100 to 100k tokens over 8 ranks
tests      seconds of every scheme with every option over four processes, forward and backward, against the oracle:
           tests/distributed/test_schemes.py, whose cases "not slow" are what `make test` runs
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tilewise.distributed import Machine, plan
from tilewise.distributed.layout import Ranks, rows_of
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import write_json

ROOT = Path(__file__).resolve().parents[2]
FASTER = {"flops": 420e12, "backward_flops": 300e12, "link": 160e9, "memory": 2.5e12, "launch": 30e-6}
THEIRS = Machine("8 H800, FlashAttention-2", **FASTER, merge=9.0, backward_merge=5.0)
PUBLISHED = {("ring", False): 0.52, ("ring", True): 0.54, ("zigzag", False): 0.852, ("zigzag", True): 0.902}


def meta(n: int) -> list[torch.Tensor]:
    return [torch.empty(1, h, n, 128, device="meta", dtype=torch.bfloat16) for h in (32, 8, 8)]


def model() -> list[dict[str, Any]]:
    found = []
    for n in (2048, 8192):
        for backward in (False, True):
            share = plan(*meta(n), mesh=8, causal=True, backward=backward).efficiency
            found.append({"tokens a rank": n, "scheme": "zigzag", "backward": backward, "share": share})
    for (scheme, backward), published in PUBLISHED.items():
        share = plan(*meta(8192), mesh=8, scheme=scheme, causal=True, backward=backward, machine=THEIRS).efficiency
        about = {"tokens a rank": 8192, "scheme": scheme, "backward": backward, "share": share}
        found.append(about | {"machine": THEIRS.name, "published": published})
    return found


def window() -> list[dict[str, Any]]:
    found = []
    for scheme, width in (("ring", 4096), ("zigzag", 4096), ("ring", None), ("zigzag", None)):
        p = plan(*meta(2**20 // 64), mesh=64, scheme=scheme, causal=True, window=width)
        most = max(r.received for r in p.ranks)
        found.append(
            {"scheme": scheme, "window": width, "steps": p.steps, "bytes to a rank": most, "balance": p.balance}
        )
    return found


def balance(draws: int) -> dict[str, Any]:
    random.seed(0)
    found = []
    for _ in range(draws):
        lengths = [int(100 * 1000 ** random.random()) for _ in range(random.choice([4, 16, 64]))]
        cu = torch.tensor([0, *lengths]).cumsum(0).tolist()
        n = len(rows_of(cu[-1], Ranks(None, 0, 8), Ranks(None, 0, 1), "zigzag", cu))
        x = torch.empty(n, 8, 128, device="meta", dtype=torch.bfloat16)
        found.append(plan(x, x, x, mesh=8, length=cu[-1], cu_seqlens_q=cu, causal=True).balance)
    return {"draws": draws, "worst": max(found), "mean": sum(found) / draws}


def tests() -> dict[str, Any]:
    words = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "not slow", "tests/distributed/test_schemes.py"]
    start = time.perf_counter()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return {"seconds": time.perf_counter() - start, "passed": done.returncode == 0, "last": done.stdout.split("\n")[-2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--tests", action="store_true", help="run those of four processes too, and time them")
    args = parser.parse_args()
    about = describe("python benchmarks/cpu/distributed.py --tests --json benchmarks/records/cpu/distributed.json")
    found: dict[str, Any] = {"model": model(), "window": window(), "balance": balance(args.draws)}
    if args.tests:
        found["tests"] = tests()
    for name, rows in found.items():
        print(name)
        for row in rows if isinstance(rows, list) else [rows]:
            print(
                "   ", ", ".join(f"{key} {x:.4g}" if isinstance(x, float) else f"{key} {x}" for key, x in row.items())
            )
    if args.json:
        write_json(args.json, about | found)


if __name__ == "__main__":
    main()
