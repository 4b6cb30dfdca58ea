"""Every plan fits: problems of the whole space, planned for each architecture, without a GPU.

    python benchmarks/h200/fits.py --problems 100000 --compile 200 --json benchmarks/records/h200/fits.json

Each problem is planned for Triton on sm_90, every fifth on the other architectures too, and where Hopper's kernels
serve it, for those. The plan's shared memory, by the bound that the planner uses, and its registers must be within the
device's. Of the first problems, the Triton kernels are compiled as far as the allocation of shared memory, which must
be within the bound.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("helpers", "backends/triton")]

from aot import SHARED, shared_of  # noqa: E402
from hopper_fits import check_hopper  # noqa: E402
from problem_space import draw  # noqa: E402
from test_triton_fits import check  # noqa: E402
from tilewise.backends.gpu.target import nvidia  # noqa: E402
from tilewise.backends.hopper.fwd import config as hopper  # noqa: E402
from tilewise.backends.triton import config, shared_memory  # noqa: E402


def plans(first: int, count: int) -> dict[str, Any]:
    """Plans `count` problems for sm_90, and every fifth for the others; raises for one that does not fit."""
    used: dict[str, float] = {}
    served = 0
    for seed in range(first, first + count):
        p = draw(random.Random(seed))
        for arch in SHARED if seed % 5 == 0 else (90,):
            name = f"sm_{arch}"
            used[name] = max(used.get(name, 0.0), check(p, nvidia(arch)))
        if hopper.refusal(p) is None:
            served += 1
            used["hopper"] = max(used.get("hopper", 0.0), check_hopper(p))
    return {"first": first, "problems": count, "on hopper": served, "most of the shared memory": used}


def compiled(count: int) -> dict[str, Any]:
    """Compiles the kernels of `count` problems; raises if one takes more than the bound."""
    shares = []
    for seed in range(count):
        chance = random.Random(seed)
        p, arch = draw(chance), chance.choice(sorted(SHARED))
        c = config.config_of(p, nvidia(arch))
        bound, taken = shared_memory.needed(p, c, config.spec(p, c, nvidia(arch)), nvidia(arch)), shared_of(p, arch)
        print(f"{seed}: sm_{arch} {c.BM}x{c.BK} {c.warps} warps {c.stages} stages: {taken} of {bound}", flush=True)
        if taken > bound:
            raise AssertionError(f"the bound is too low: {taken} > {bound} for {p}")
        shares.append(taken / bound)
    return {"kernels": count, "of the bound, median": sorted(shares)[count // 2], "most": max(shares)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--compile", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    found: dict[str, Any] = {"plans": plans(args.first, args.problems)}
    if args.compile:
        found["compiled"] = compiled(args.compile)
    found["seconds"] = round(time.perf_counter() - start)
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
