"""Times forward kernels beside FlashAttention 4 and cuDNN, in one run and interleaved.

    python benchmarks/h200/forward.py --peers FOLDER --json forward.json

`--peers` is a folder with a module `peers_load` that gives the other libraries' kernels. The cells are those in which
FlashAttention 4 has led, and some others. `--forms` adds both forms of the kernel: O rescaled lazily, and not.
Processes of their own compile each form of each cell first, and check it on awkward sizes: against the oracle, with
keys that grow towards the last ones visited, and for the same bits again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hopper_checks import launcher_of, oracle
from timing import ceilings, seconds
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.backends.hopper.fwd import config
from tilewise.core.options import Options
from tilewise.validation import calls

# D, H, L, causal
CELLS = [
    (64, 32, 16384, False), (64, 32, 16384, True), (256, 8, 4096, False), (256, 8, 16384, False),
    (256, 8, 16384, True), (128, 16, 1024, True), (128, 16, 4096, True), (128, 16, 16384, False),
    (256, 8, 1024, True), (64, 32, 4096, False),
]  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {"lazy": {"lazy_rescale": True}, "not lazy": {"lazy_rescale": False}}
BF16 = torch.bfloat16
chosen = config.config_of


def forms_of(args: Any) -> dict[str, dict[str, Any]]:
    return {"tilewise": {}} | (FORMS if args.forms else {})


def way(changes: dict[str, Any], *given: torch.Tensor, **options: Any) -> Any:
    """A call of the kernel in this form."""
    config.config_of = lambda problem: replace(chosen(problem), **changes)
    return launcher_of(calls.dense(*given, Options(**options)))


def check(D: int, causal: bool, changes: dict[str, Any]) -> float:
    """The relative error on awkward sizes of the same kernel: maxima grow from tile to tile, outputs are poisoned."""
    H, Lq, Lk = 48, 600, 4480
    g = torch.Generator("cuda").manual_seed(D)
    q, k, v = (torch.randn(1, L, H, D, device="cuda", generator=g).transpose(1, 2) for L in (Lq, Lk, Lk))
    k = k * torch.linspace(6, 0.3, Lk, device="cuda")[:, None]
    given = q.to(BF16), k.to(BF16), v.to(BF16)
    out = torch.full_like(given[0], float("nan"))
    run = way(changes, *given, causal=causal, out=out)
    run()
    first = out.clone()
    want = oracle(*given, causal)
    for _ in range(50):
        run()
        if not torch.equal(out, first):
            return float("nan")
    return float((first.double() - want).norm() / want.norm())


def checked(D: int, causal: bool, name: str, changes: dict[str, Any]) -> tuple[str, Any]:
    start = time.perf_counter()
    try:
        error: Any = round(check(D, causal, changes), 5)
    except Exception as problem:
        error = f"{type(problem).__name__}: {str(problem)[:300]}"
    rule = "causal" if causal else "full"
    print(f"D{D} {rule} {name}: {error} ({time.perf_counter() - start:.0f} s)", flush=True)
    return f"D{D} {rule} {name}", error


def errors_of(args: Any) -> dict[str, Any]:
    """The error of each form of each kind of cell, as far as they are compiled in time."""
    found: dict[str, Any] = {}
    pool = ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn"))
    kinds = dict.fromkeys((D, causal) for D, _, _, causal in CELLS)
    jobs = [pool.submit(checked, *kind, *form) for kind in kinds for form in forms_of(args).items()]
    try:
        for job in as_completed(jobs, timeout=args.limit):
            name, error = job.result()
            found[name] = error
    except TimeoutError:
        print(f"after {args.limit} s {len(jobs) - len(found)} forms are not compiled and left out", flush=True)
    for process in list(pool._processes.values()):  # one may hang in a kernel that waits for ever
        process.kill()
    return found


def cell(args: Any, errors: dict[str, Any], D: int, H: int, L: int, causal: bool) -> dict[str, Any]:
    B = 16384 // L
    q, k, v = (torch.randn(B, L, H, D, device="cuda", dtype=BF16) for _ in range(3))
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    rule = "causal" if causal else "full"
    ways: dict[str, Any] = {}
    for name, changes in forms_of(args).items():
        if isinstance(errors.get(f"D{D} {rule} {name}"), float) and errors[f"D{D} {rule} {name}"] < 4e-3:
            ways[name] = way(changes, q, k, v, causal=causal, layout="blhd")

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal)

    ways["cudnn"] = cudnn
    if args.peers:
        import peers_load

        fa4 = peers_load.fa4()
        ways["fa4"] = lambda: fa4.fa4_fwd(q, k, v, causal)
    for run in ways.values():
        run()
    flops = 4 * D * B * H * (L * (L + 1) / 2 if causal else L * L)
    rates = {n: round(flops / t / 1e12, 1) for n, t in seconds(ways, args.rounds, args.budget).items()}
    name = f"D{D} {H}/{H} {L // 1024}k {rule}"
    best = max(rate for n, rate in rates.items() if n in ("fa4", "cudnn"))
    row = {"work": name, "TFLOPS": rates, "of the best": round(rates["tilewise"] / best, 3)}
    print(time.strftime("%X"), name.ljust(22), rates, row["of the best"], flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", help="folder of peers_load.py")
    parser.add_argument("--forms", action="store_true", help="forms that the planner does not choose, too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=1.5, help="seconds a cell")
    parser.add_argument("--limit", type=float, default=45, help="seconds for compiling and checking")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.peers:
        sys.path.insert(0, args.peers)
    errors = errors_of(args)
    report: dict[str, Any] = {"device": "H200", "torch": torch.__version__, "errors": errors, "ceilings": ceilings()}
    report["rows"] = []
    for shape in CELLS:
        report["rows"].append(cell(args, errors, *shape))
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
