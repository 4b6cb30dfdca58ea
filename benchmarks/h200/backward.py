"""Times backward kernels beside cuDNN, FlashAttention 3 and 4, in one run and interleaved.

    python benchmarks/h200/backward.py --peers FOLDER --json backward.json

Results are checked by `backward_checks.py`. `--peers` is a folder with a module `peers_load` that gives the other
libraries' kernels; cuDNN comes with torch.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from timing import ceilings, seconds

from tilewise.autograd import _checked
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.hopper.bwd import config
from tilewise.backends.hopper.bwd.narrow_launch import NarrowLauncher
from tilewise.core.tensors import BackwardTensors
from tilewise.dispatch import planner

BF16 = torch.bfloat16
H200 = nvidia(90)
CELLS = [(64, 32, 32), (128, 16, 16), (128, 32, 8)]
Work = tuple[Any, BackwardTensors]


def work(q: Any, k: Any, v: Any, dout: Any, backend: str, **options: Any) -> Work:
    """The plan of a backward pass and its tensors; q, k, v, dout are [B, L, H, D], or packed [T, H, D].

    The forward pass is made up, so that its kernels need not be compiled; lse is about what it would be.
    """
    out, lse = torch.randn_like(dout), torch.full(q.shape[:-1], 8.0, device="cuda")
    options["layout"] = "bhld" if "cu_seqlens_q" in options else "blhd"
    call = _checked(q, k, v, out, lse, dout, None, ("q", "k", "v"), options)
    return planner.choose(call.problem, backend, torch.get_num_threads()), call.tensors


def runner(made: Work) -> Callable[[], Any]:
    plan, tensors = made
    run = planner.load_backward(plan.backend).run_backward
    return lambda: run(plan, tensors)


def other(made: Work) -> Callable[[], Any]:
    """The same by a program for each key block instead of each processor, or the other way."""
    plan, tensors = made
    heuristic = config.persistent
    config.persistent = lambda p: not heuristic(p)
    launcher = NarrowLauncher(plan.problem, H200)
    config.persistent = heuristic
    return lambda: launcher(tensors)


def peers(
    folder: str | None, q: Any, k: Any, v: Any, dout: Any, causal: bool, names: tuple[str, ...] = ("fa3x", "fa4")
) -> dict[str, Callable[[], Any]]:
    """Backward of other libraries; [B, L, H, D]."""
    found: dict[str, Callable[[], Any]] = {}
    if folder:
        sys.path.insert(0, folder)
        import peers_load

        for name in names:
            try:
                lib = getattr(peers_load, name)()
                forward, backward = (lib.fwd, lib.bwd) if name == "fa3x" else (lib.fa4_fwd, lib.fa4_bwd)
                out, lse = forward(q, k, v, causal)
                found[name[:3]] = lambda b=backward, o=out, x=lse: b(q, k, v, o, dout, x, causal)
                if name == "fa3x":
                    found["fa3 det"] = lambda b=backward, o=out, x=lse: b(
                        q, k, v, o, dout, x, causal, deterministic=True
                    )
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:120]}")
    heads = [x.transpose(1, 2) for x in (q, k, v, dout)]
    try:
        r = torch.ops.aten._scaled_dot_product_cudnn_attention(
            heads[0], *(x.repeat_interleave(q.shape[2] // k.shape[2], 1) for x in heads[1:3]), None, True, 0.0, causal
        )
        if q.shape[2] == k.shape[2]:
            found["cudnn"] = lambda: torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                heads[3], *heads[:3], r[0], r[1], r[6], r[7], None, r[2], r[3], r[4], r[5], 0.0, causal
            )
    except Exception as error:
        print(f"  cudnn: {type(error).__name__}: {str(error)[:120]}")
    return found


def cell(args: Any, D: int, H: int, Hkv: int, L: int, causal: bool) -> Any:
    """One row of the table: all ways interleaved."""
    B = 16384 // L
    q, k, v, dout = (torch.randn(B, L, h, D, device="cuda", dtype=BF16) for h in (H, Hkv, Hkv, H))
    ways = peers(args.peers, q, k, v, dout, causal)
    made = work(q, k, v, dout, "hopper", causal=causal)
    ways["det"] = runner(made)
    if args.other:
        ways["det other"] = other(made)
    flops = 10 * D * B * H * (L * (L + 1) / 2 if causal else L * L)
    row = timed(args, f"D{D} {H}/{Hkv} {L // 1024}k {'causal' if causal else 'full'}", ways, flops)
    rates = row["TFLOPS"]
    best = max([r for n, r in rates.items() if n in ("fa3", "fa4", "cudnn")], default=math.nan)
    row |= {"best peer": best, "of the best": {n: round(rates[n] / best, 3) for n in rates if n[:3] == "det"}}
    print("  of the best", row["of the best"], flush=True)
    return row


def timed(args: Any, name: str, ways: dict[str, Callable[[], Any]], flops: float) -> dict[str, Any]:
    runs = {}
    for way, run in ways.items():
        try:
            run()
            torch.cuda.synchronize()
            runs[way] = run
        except Exception as error:
            print(f"  {way}: {type(error).__name__}: {str(error)[:200]}")
    times = seconds(runs, args.rounds, args.budget)
    rates = {n: round(flops / t / 1e12, 1) for n, t in times.items()}
    print(name.ljust(22), *(f"{n} {r:.0f}," for n, r in rates.items()), flush=True)
    return {"work": name, "TFLOPS": rates, "us": {n: round(t * 1e6, 1) for n, t in times.items()}}


def sparse_works(D: int, H: int, Hkv: int) -> dict[str, tuple[Work, float]]:
    """Calls with the cells that a head sees: dense ones, a window, packed sequences, a softcap."""

    def random(*shape: int) -> list[Any]:
        return [torch.randn(*shape, h, D, device="cuda", dtype=BF16) for h in (H, Hkv, Hkv, H)]

    L, W = 16384, 1024
    lengths = torch.randint(64, 4097, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_q": max(lengths), "max_k": max(lengths)}
    one, four, many = random(1, L), random(4, L // 4), random(sum(lengths))
    quarter = 4 * (L // 4) * (L // 4 + 1) / 2
    return {
        "dense": (work(*one, "hopper", causal=True), L * (L + 1) / 2),
        "window": (work(*one, "hopper", causal=True, window=W), W * (W + 1) / 2 + (L - W) * W),
        "packed": (work(*many, "hopper", causal=True, **ends), sum(n * (n + 1) / 2 for n in lengths)),
        "dense 4k": (work(*four, "hopper", causal=True), quarter),
        "softcap 4k": (work(*four, "hopper", causal=True, softcap=50.0), quarter),
    }


def sparse_row(args: Any, D: int, H: int, Hkv: int) -> dict[str, Any]:
    """A window, packed sequences and a softcap, beside dense calls by visible cells a second."""
    made = sparse_works(D, H, Hkv)
    ways = {n: runner(m) for n, (m, _) in made.items()}
    if args.other:
        ways |= {f"{n} other": other(m) for n, (m, _) in made.items()}
    row = timed(args, f"D{D} {H}/{Hkv} causal", ways, 1e12)
    rate = {n: made[n.removesuffix(" other")][1] / t for n, t in row["us"].items()}
    row["TFLOPS"] = {n: round(r * 1e6 * 10 * D * H / 1e12, 1) for n, r in rate.items()}
    row["of the dense speed by cells"] = {n: round(r / rate["dense"], 3) for n, r in rate.items()}
    print("  ", row, flush=True)
    return row


def cells(args: Any) -> list[tuple[int, int, int, int, bool]]:
    """D, heads, KV heads, length, causal."""
    lengths = [int(x) for x in args.lengths.split(",")]
    return [(D, H, Hkv, L, causal) for D, H, Hkv in CELLS for L in lengths for causal in (False, True)]


def cell_works(args: Any, D: int, H: int, Hkv: int, L: int, causal: bool) -> list[Work]:
    tensors = [torch.randn(16384 // L, L, h, D, device="cuda", dtype=BF16) for h in (H, Hkv, Hkv, H)]
    return [work(*tensors, "hopper", causal=causal)]


def unpack_peers(folder: str) -> None:
    sys.path.insert(0, folder)
    import peers_load

    peers_load.fa3x()


def compile_one(args: Any, what: tuple[Any, ...], index: int) -> None:
    """Number `index` of a cell's works, or of the sparse ones."""
    made = cell_works(args, *what) if len(what) == 5 else [m for m, _ in sparse_works(*what).values()]
    runner(made[index])()
    if args.other:
        other(made[index])()
    torch.cuda.synchronize()


def compile_all(args: Any) -> None:
    """In processes of their own, before anything is timed: each kernel once."""
    todo: dict[Any, tuple[tuple[Any, ...], int]] = {}
    for what in [*(CELLS[:2] if args.sparse else ()), *(() if args.only_sparse else cells(args))]:
        made = cell_works(args, *what) if len(what) == 5 else [m for m, _ in sparse_works(*what).values()]
        for index, (plan, _) in enumerate(made):
            todo.setdefault(config.spec_of(plan.problem, H200), (what, index))
        del made
    torch.cuda.empty_cache()
    with ProcessPoolExecutor(16, multiprocessing.get_context("spawn")) as pool:
        unpacked = [pool.submit(unpack_peers, args.peers)] if args.peers else []
        for job in [*unpacked, *(pool.submit(compile_one, args, *x) for x in todo.values())]:
            job.result()


def write(args: Any, report: Any) -> None:
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", help="folder of peers_load.py")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds a cell")
    parser.add_argument("--other", action="store_true", help="and what the heuristic of persistent programs turns down")
    parser.add_argument("--sparse", action="store_true", help="windows, packed sequences and a softcap too")
    parser.add_argument("--only-sparse", action="store_true", help="these alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.sparse |= args.only_sparse
    start = time.perf_counter()
    report: dict[str, Any] = {"device": "H200", "torch": torch.__version__, "rows": [], "sparse": []}
    compile_all(args)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    report["ceilings"] = ceilings()
    print(report["ceilings"])
    for D, H, Hkv in CELLS[:2] if args.sparse else ():
        report["sparse"].append(sparse_row(args, D, H, Hkv))
        write(args, report)
    for what in () if args.only_sparse else cells(args):
        report["rows"].append(cell(args, *what))
        write(args, report)
    report["clocks"] = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"],
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    if shares := [row["of the best"]["det"] for row in report["rows"]]:
        mean = math.exp(sum(map(math.log, shares)) / len(shares))
        print(f"{mean:.3f} of the best peer on average, lowest {min(shares):.3f}, {len(shares)} cells")
    print(report["clocks"], f"{time.perf_counter() - start:.0f} s")
    write(args, report)


if __name__ == "__main__":
    main()
