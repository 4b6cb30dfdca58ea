"""Random calls against the float64 oracle: how many, by which seeds, and the largest error for each dtype.

    python benchmarks/cpu/random_calls.py --cases 10000 --json benchmarks/cpu/random_calls.json
    python benchmarks/cpu/random_calls.py --device cuda --backend triton --cases 500 --json random_calls_triton.json

Case `n` is drawn by seed `n` (`tilewise.testing.drawing`): form, sizes (0 among them), dtypes, strides and options,
the ends of their ranges among them; then the same shapes with one option changed; and what is around the calls: a
default device, a default dtype, autocast. Both are called with a poisoned output and judged, then twice each and the
first twice again, as a program would, by which they are remembered: the bits must be the same. A case that a backend
named cannot serve is not counted.

An error is given as a share of its bound, which is 2 (with softcap 3) times that of torch's own arithmetic and an ulp;
the largest error of a case is divided by its least bound. The record is written every 50 cases, and a run that is
stopped goes on from there. It exits with 1 if any case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tilewise import Unsupported
from tilewise.testing.check import Mismatch, check_repeats
from tilewise.testing.drawing import Seeded, draw_case, draw_change
from tilewise.tools.bench.machine import describe

DRAWS = 4  # inputs on which torch's own error is taken, as in the random tests
LIMITS: dict[str, dict[str, Any]] = {  # what a backend is for, so that few cases are drawn in vain
    "hopper": {"forms": ("dense", "varlen"), "dtypes": ("f16", "bf16"), "head_dims": (64, 128, 192, 256), "most": 300},
    "triton": {"head_dims": (1, 16, 24, 40, 64, 72, 96, 128, 192, 256, 576), "most": 300},
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def surroundings(device: str) -> dict[str, Callable[[], Any]]:
    return {
        "nothing": contextlib.nullcontext,
        "default device meta": lambda: torch.device("meta"),
        "default dtype float64": lambda: default_dtype(torch.float64),
        "autocast": lambda: torch.autocast(torch.device(device).type, dtype=torch.bfloat16),
        "inference mode": torch.inference_mode,
    }


def run(seed: int, backend: str | None, device: str) -> tuple[str, str, float]:
    """One case: its dtype, what was around it, and its largest error as a share of the bound."""
    chooser = Seeded(seed)
    limits = LIMITS.get(backend or "", {})
    case = draw_case(chooser, **limits)
    change = draw_change(chooser, case)
    around = chooser.pick(list(surroundings(device)))
    try:
        verdict = check_repeats(case, change, backend, device, DRAWS, surroundings(device)[around])
    except (Mismatch, Unsupported):
        raise
    except Exception as error:
        raise Mismatch(f"{type(error).__name__}: {error}") from error
    finally:
        case_of[seed] = f"{case}; then {change}; around: {around}"
    return case.dtype, around, verdict.error / verdict.bound if verdict.bound else float(verdict.error > 0)


case_of: dict[int, str] = {}


def fresh(args: argparse.Namespace) -> dict[str, Any]:
    command = f"python benchmarks/cpu/random_calls.py --device {args.device}"
    command += f" --backend {args.backend}" if args.backend else ""
    return describe(f"{command} --cases {args.cases}", torch.device(args.device)) | {
        "what": "random calls against the float64 oracle",
        "backend": args.backend or "the best that can",
        "seeds": [args.seed, args.seed],
        "cases": 0,
        "calls": 0,
        "unsupported": 0,
        "seconds": 0.0,
        "by_dtype": {},
        "around": {},
        "failures": [],
    }


def save(record: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(record, indent=1, default=str) + "\n")
        draft.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", help="the best that can, unless it is named")
    parser.add_argument("--json", type=Path, help="the record; a run that was stopped goes on from it")
    args = parser.parse_args()
    record = json.loads(args.json.read_text()) if args.json and args.json.exists() else fresh(args)
    started, done = time.perf_counter() - record["seconds"], record["cases"]
    around = Counter(record["around"])
    while record["cases"] < args.cases:
        seed = record["seeds"][1]
        record["seeds"][1] += 1
        try:
            dtype, surrounding, share = run(seed, args.backend, args.device)
        except Unsupported:
            record["unsupported"] += 1
            continue
        except Mismatch as error:
            record["failures"].append({"seed": seed, "case": case_of[seed], "error": str(error)})
            print(f"seed {seed}: {case_of[seed]}\n  {error}", flush=True)
            dtype, surrounding, share = "failed", "failed", 0.0
        record["cases"] += 1
        record["calls"] += 8
        around[surrounding] += 1
        worst = record["by_dtype"].setdefault(dtype, {"cases": 0, "largest_error_of_bound": 0.0})
        worst["cases"] += 1
        worst["largest_error_of_bound"] = max(worst["largest_error_of_bound"], round(share, 4))
        if record["cases"] % 50 == 0 or record["cases"] == args.cases:
            record |= {"around": dict(around), "seconds": round(time.perf_counter() - started, 1)}
            save(record, args.json)
            each = (time.perf_counter() - started) / max(1, record["cases"])
            left = each * (args.cases - record["cases"]) / 60
            print(
                f"{record['cases']} of {args.cases}, {len(record['failures'])} failed, {left:.0f} min left", flush=True
            )
    print(json.dumps(record["by_dtype"], indent=1), f"{record['cases'] - done} cases now", sep="\n")
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
