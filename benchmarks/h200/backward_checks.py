"""The Hopper backward kernels on a GPU: conformance, NaN in hidden places, repeats to the bit, CUDA graphs.

    python benchmarks/h200/backward_checks.py --jobs 14 --repeats 1000 --json backward_checks.json

Cases are those of the conformance suite, without the options that the kernels do not serve and in 16-bit types, and
some of more tiles. They run in `--jobs` processes; a case that dies is a failure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewise import Unsupported
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.hopper.bwd import config, launch
from tilewise.testing.case import Case
from tilewise.testing.cases import GRADIENTS
from tilewise.testing.gradient_properties import GRADIENT_PROPERTIES, SOME
from tilewise.testing.gradients import check_gradients, make_gradients
from tilewise.tools.bench.machine import describe

LARGE = [
    Case(B=2, H=4, Hkv=2, Lq=256, D=64), Case(B=1, H=2, Lq=1000, D=128, causal=True),
    Case(B=1, H=2, Hkv=1, Lq=300, Lk=500, D=128, causal=True), Case(B=1, H=3, Lq=700, Lk=333, D=64, causal=True),
    Case(B=2, H=8, Lq=1024, D=128), Case(B=2, H=2, Lq=1100, D=64, causal=True, window=(200, None)),
    Case(B=1, H=4, Hkv=2, Lq=900, D=128, window=(130, 70)), Case(B=1, H=2, Lq=640, D=128, window=(None, 33)),
    Case(B=1, H=2, Lq=200, Lk=1500, D=64, causal=True, window=(100, None)),
    Case(B=1, H=2, Lq=1500, Lk=200, D=128, causal=True, window=(100, None)),
    Case(B=3, H=2, Lq=500, D=128, lengths=(500, 0, 257), causal=True),
    Case(B=3, H=4, Hkv=1, Lq=500, D=64, lengths=(1, 128, 499)),
    Case(B=4, H=4, Hkv=2, D=128, form="varlen", q_lengths=(300, 1, 0, 513), lengths=(300, 200, 7, 513), causal=True),
    Case(B=4, H=2, D=64, form="varlen", q_lengths=(129, 640, 64, 1), lengths=(129, 640, 64, 1), window=(50, 10)),
    Case(B=2, H=4, Hkv=2, Lq=300, D=64, causal=True, window=(127, None), sinks=True),
    Case(B=1, H=2, Lq=1000, D=96, causal=True), Case(B=1, H=2, Lq=260, D=40),
]  # fmt: skip


WIDE = [(256, 256), (192, 128), (512, 512), (160, 136), (256, 256), (192, 128), (512, 512), (136, 40), (264, 400)]


BF16, MASKED = {"dtype": "bf16"}, {"dtype": "bf16", "mask_kind": "bf16"}
# A case of every kernel that the planner has: programs of a key block, split ones, persistent ones, each converter,
# masks, wide heads, Triton's.
EVERY = [
    ("hopper", Case(B=1, H=8, Lq=4352, D=64, **BF16)),
    ("hopper", Case(B=1, H=16, Hkv=8, Lq=4352, D=128, causal=True, **BF16)),
    ("hopper", Case(B=1, H=8, Hkv=2, Lq=2048, D=64, causal=True, **BF16)),
    ("hopper", Case(B=1, H=8, Hkv=2, Lq=2048, D=128, **BF16)),
    ("hopper", Case(B=4, H=8, Lq=1024, D=64, causal=True, **BF16)),
    ("hopper", Case(B=4, H=8, Lq=1024, D=128, **BF16)),
    ("hopper", Case(B=1, H=16, Lq=4096, D=64, causal=True, window=(1023, None), **BF16)),
    ("hopper", Case(B=1, H=8, Lq=4096, D=128, causal=True, window=(1023, None), **BF16)),
    ("hopper", Case(B=4, H=8, D=64, form="varlen", q_lengths=(2000, 64, 1300, 700), lengths=(2000, 64, 1300, 700),
                    causal=True, **BF16)),
    ("hopper", Case(B=4, H=8, D=128, form="varlen", q_lengths=(2000, 64, 1300, 700), lengths=(2000, 64, 1300, 700),
                    causal=True, **BF16)),
    ("hopper", Case(B=1, H=8, Lq=2048, D=128, causal=True, softcap=50.0, sinks=True, **BF16)),
    ("hopper", Case(B=2, H=4, Lq=512, D=64, mask="bhqk", **MASKED)),
    ("hopper", Case(B=2, H=4, Lq=512, D=64, mask="qk", **MASKED)),
    ("hopper", Case(B=2, H=4, Lq=512, D=128, mask="hqk", **MASKED)),
    ("hopper", Case(B=1, H=8, Lq=1024, D=256, causal=True, **BF16)),
    ("hopper", Case(B=1, H=8, Lq=1024, D=192, Dv=128, causal=True, **BF16)),
    ("hopper", Case(B=1, H=4, Hkv=2, Lq=500, D=512, causal=True, sinks=True, **BF16)),
    ("hopper", Case(B=2, H=2, D=512, form="varlen", q_lengths=(129, 300), lengths=(129, 401), window=(90, 10), **BF16)),
    ("hopper", Case(B=1, H=2, Lq=300, D=256, window=(100, None), softcap=30.0, **BF16)),
    ("triton", Case(B=1, H=4, Hkv=2, Lq=500, D=64, causal=True)),
    ("triton", Case(B=1, H=4, Hkv=2, Lq=500, D=128, causal=True, alibi="h", **BF16)),
    ("triton", Case(B=2, H=4, Lq=300, D=64, mask="qk", **MASKED)),
]  # fmt: skip


def cases(wide: bool) -> list[Case]:
    """Each once, in float16 and bfloat16 in turn."""
    found: dict[str, Case] = {}
    for n, case in enumerate([*GRADIENTS, *SOME, *LARGE]):
        width = min(128, -(-case.D // 8) * 8)
        D, Dv = WIDE[n // 2 % len(WIDE)] if wide else (width, width)
        fitted = replace(
            case, D=D, Dv=Dv, dtype=("bf16", "f16")[n % 2], k="", v="", mask="", mask_kind="bool",
            pattern="random", alibi="", chunk=None, tile=None, scale=None,
        )  # fmt: skip
        if 0 not in (max(case.q_lengths or (case.Lq,)), max(case.lengths or (1,))):  # else no backend is asked
            found.setdefault(str(fitted), fitted)
    return list(found.values())


def choose(persistent: bool, unsplit: bool) -> None:
    """In a new process: persistent programs in every case, no split key blocks."""
    if persistent:
        config.persistent = lambda p: True
        launch.target_of = lambda device: nvidia(90, 5)  # so that a program has many blocks
    if unsplit:
        config.splits_of = lambda p, target: 1


def check(case: Case) -> dict[str, Any]:
    outcome: dict[str, Any] = {"case": str(case)}
    try:
        verdict = check_gradients(case, "hopper", "cuda")
        outcome["error of bound"] = round(verdict.error / max(verdict.bound, 1e-300), 3)
    except Unsupported as error:
        outcome["refused"] = str(error)
    except Exception as error:
        outcome["failed"] = f"{type(error).__name__}: {error}"
    return outcome


def holds(name: str) -> dict[str, Any]:
    """A property of the suite, by the planner's choice: which places must not matter to the bit, for one."""
    try:
        GRADIENT_PROPERTIES[name](None, "cuda")
        return {"case": name}
    except Exception as error:
        return {"case": name, "failed": f"{type(error).__name__}: {error}"}


def repeats(case: Case, count: int, backend: str = "hopper") -> dict[str, Any]:
    """The same bits again and again, other work between, and replayed from a CUDA graph."""
    outcome: dict[str, Any] = {"case": str(case), "backend": backend}
    try:
        made = make_gradients(case, "cuda")
        first = {name: x.clone() for name, x in made.run(backend).items()}
        other = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for n in range(count):
            if n % 3 == 0:
                other = (other @ other).clamp_(-1, 1)
            for name, x in made.run(backend).items():
                differing += (x != first[name]).any()
        outcome |= {"repeats": count, "differing": int(differing)}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = made.run(backend)
        for x in replayed.values():
            x.fill_(float("nan"))
        graph.replay()
        outcome["graph equal"] = all(torch.equal(x, first[name]) for name, x in replayed.items())
        if outcome["differing"] or not outcome["graph equal"]:
            outcome["failed"] = "bits differ"
    except Exception as error:
        outcome["failed"] = f"{type(error).__name__}: {error}"
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--large", action="store_true", help="the cases of more tiles alone")
    parser.add_argument("--persistent", action="store_true", help="persistent programs in every case")
    parser.add_argument("--unsplit", action="store_true", help="no split key blocks, which most small cases have")
    parser.add_argument("--properties", action="store_true", help="those of the suite too, by the planner's choice")
    parser.add_argument("--every", action="store_true", help="repeats of a case of every kernel, and nothing else")
    parser.add_argument("--wide", action="store_true", help="head dims 192/128, 256, 512 and between")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    record = describe(f"python benchmarks/h200/backward_checks.py --repeats {args.repeats}", torch.device("cuda"))
    record |= {"cases": [], "repeats": []}
    chosen = [case for case in cases(args.wide) if args.only in str(case)]
    big = [replace(case, dtype="bf16", mask="") for case in LARGE if case.D % 64 == 0]
    if args.wide:
        big = [replace(case, D=WIDE[n % 3][0], Dv=WIDE[n % 3][1]) for n, case in enumerate(big)]
    big = [case for case in big if args.only in str(case)]
    repeated = [("hopper", case) for case in big]
    if args.every:
        repeated, chosen = [x for x in EVERY if args.only in str(x[1])], []
    chosen_forms = (args.persistent, args.unsplit)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), choose, chosen_forms) as pool:
        jobs = {pool.submit(repeats, case, args.repeats, backend): "repeats" for backend, case in repeated}
        jobs |= {pool.submit(check, case): "cases" for case in (chosen[-len(LARGE) :] if args.large else chosen)}
        if args.properties:
            jobs |= {pool.submit(holds, name): "cases" for name in GRADIENT_PROPERTIES}
        for job in as_completed(jobs):
            try:
                outcome = job.result()
            except Exception as error:  # the process died
                outcome = {"failed": f"{type(error).__name__}: {error}"}
            record[jobs[job]].append(outcome)
            if "failed" in outcome:
                print(outcome, flush=True)
            if args.json:
                args.json.write_text(json.dumps(record, indent=1, default=str) + "\n")
    failed = [x for x in [*record["cases"], *record["repeats"]] if "failed" in x]
    refused = sum("refused" in x for x in record["cases"])
    worst = max((x.get("error of bound", 0.0) for x in record["cases"]), default=0.0)
    counts = f"{len(record['cases'])} cases, {refused} refused, {len(record['repeats'])} repeated, {len(failed)} failed"
    print(f"{counts}; worst error {worst} of its bound; {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
