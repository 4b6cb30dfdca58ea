"""Times the Hopper kernels beside cuDNN and the Triton backend, in one run, interleaved.

    python benchmarks/h200/hopper.py --verify 1 --json hopper.json

Kernels are compiled and checked first (`hopper_checks.py`); `--verify N` adds every Nth conformance case. A time is the
median over rounds in which all ways are interleaved (`timing.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hopper_checks import BF16, Way, launcher_of, prepare
from timing import ceilings, graphed, seconds
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
import triton
from tilewise.core.options import Options
from tilewise.validation import calls

# FlashAttention-4 is not on the machine. It and cuDNN were measured on such a card in one run (TFLOPS full / causal at
# 1k, 4k, 16k): cuDNN's speed of this run times their ratio of that one stands for it.
FA4: dict[tuple[int, int], tuple[tuple[int, int, int, int], ...]] = {  # cuDNN full, causal, FA4 full, causal
    (64, 32): ((444, 345, 404, 268), (481, 431, 508, 444), (483, 460, 570, 538)),
    (128, 16): ((620, 445, 575, 422), (680, 569, 637, 604), (655, 598, 682, 723)),
    (128, 8): ((620, 478, 553, 427), (694, 593, 652, 606), (678, 657, 676, 670)),
    (256, 8): ((648, 467, 661, 477), (729, 590, 732, 687), (728, 657, 778, 774)),
}
LENGTHS = (1024, 4096, 16384)
Made = tuple[float, dict[str, Way]]  # operations, and ways to do them


def cudnn(q: Any, k: Any, v: Any, **options: Any) -> Way:
    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    return run


def public(backend: str, *args: Any, **options: Any) -> Way:
    return lambda: tilewise.attention(*args, backend=backend, **options)


def inputs(B: int, H: int, Hkv: int, L: int, D: int, layout: str) -> list[torch.Tensor]:
    q, k, v = (torch.randn(B, L, h, D, device="cuda", dtype=BF16).transpose(1, 2) for h in (H, Hkv, Hkv))
    return [q, k, v] if layout == "blhd" else [x.contiguous() for x in (q, k, v)]


def operations(B: int, H: int, L: int, D: int, causal: bool) -> float:
    return 4 * D * B * H * (L * (L + 1) / 2 if causal else L * L)


def those_that_run(ways: dict[str, Way]) -> dict[str, Way]:
    found = {}
    for name, run in ways.items():
        try:
            run()
            torch.cuda.synchronize()
            found[name] = run
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return found


LAYOUTS = ("blhd", "bhld")


def core(rounds: int, save: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """The table: both layouts and all peers of a cell interleaved: a card at its power limit slows all alike."""
    rows: list[dict[str, Any]] = []
    for D, H, Hkv in ((64, 32, 32), (128, 16, 16), (128, 32, 8), (256, 8, 8), (512, 4, 4)):
        for at, L in enumerate(LENGTHS):
            if D == 512 and L < 4096:
                continue
            for causal in (False, True):
                B = 16384 // L
                flops = operations(B, H, L, D, causal)
                ways: dict[str, Way] = {}
                for layout in LAYOUTS:
                    given = inputs(B, H, Hkv, L, D, layout)
                    if D <= 256:
                        ways[f"cudnn {layout}"] = cudnn(*given, is_causal=causal)
                    ways[f"hopper {layout}"] = public("hopper", *given, causal=causal)
                    if layout == "blhd":
                        ways[f"triton {layout}"] = public("triton", *given, causal=causal)
                times = seconds(those_that_run(ways), rounds, 8.0)
                for layout in LAYOUTS:
                    rates = {n.split()[0]: round(flops / t / 1e12, 1) for n, t in times.items() if layout in n}
                    name = f"D{D} {H}/{Hkv} {L // 1024}k {'causal' if causal else 'full'} {layout}"
                    row: dict[str, Any] = {"work": name, "TFLOPS": rates}
                    if "cudnn" in rates:
                        known = FA4[D, Hkv][at]
                        row["FA4 by ratio"] = round(rates["cudnn"] * known[2 + causal] / known[causal], 1)
                        row["of the best"] = round(rates["hopper"] / max(rates["cudnn"], row["FA4 by ratio"]), 3)
                    rows.append(row)
                    shown = (f"{n} {r:.0f}" for n, r in rates.items())
                    print(name.ljust(28), *shown, row.get("of the best", ""), flush=True)
                save(rows)
    for layout in LAYOUTS:
        shares = {row["work"]: row["of the best"] for row in rows if "of the best" in row and layout in row["work"]}
        mean = math.exp(sum(map(math.log, shares.values())) / len(shares))
        print(layout, f"{mean:.3f} of the best on average; under 0.93:", {n: s for n, s in shares.items() if s < 0.93})
    return rows


def host_times() -> dict[str, float]:
    """Microseconds of host time for repeated calls of the public function."""
    q, k, v = (torch.randn(1, 4, 64, 64, device="cuda", dtype=BF16) for _ in range(3))
    found = {}
    for backend in ("hopper", "triton"):
        for causal in (False, True):
            run = public(backend, q, k, v, causal=causal)
            times = []
            for _ in range(200):
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
            found[f"{backend} {'causal' if causal else 'full'}"] = round(sorted(times)[100] * 1e6, 1)
    return found


def small(rounds: int) -> list[dict[str, Any]]:
    """Small calls by both backends, eager and in a graph: where does the one become faster?"""
    rows = []
    for D in (64, 128, 256):
        for B, H, L in (
            (1, 8, 256),
            (1, 8, 512),
            (1, 16, 512),
            (1, 8, 1024),
            (1, 32, 1024),
            (1, 8, 2048),
            (1, 32, 2048),
        ):
            for causal in (False, True):
                given = inputs(B, H, H, L, D, "blhd")
                ways = {backend: public(backend, *given, causal=causal) for backend in ("hopper", "triton")}
                ways |= {f"{name} graph": graphed([run]) for name, run in ways.items()}
                times = {name: round(t * 1e6, 1) for name, t in seconds(ways, rounds, 3.0).items()}
                work = f"D{D} {H} x {L} {'causal' if causal else 'full'}"
                rows.append({"work": work, "GFLOP": round(operations(1, H, L, D, causal) / 1e9, 1), "us": times})
                print(work, rows[-1]["GFLOP"], *(f"{n} {t}" for n, t in times.items()), flush=True)
    return rows


def window() -> Made:
    """A window of 1024 over 8k, by rule and by mask."""
    H, L, D, W = 16, 8192, 128, 1024
    q, k, v = inputs(1, H, H, L, D, "bhld")
    i = torch.arange(L, device="cuda")
    seen = (i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < W)
    bias = torch.where(seen, 0.0, -torch.inf).to(BF16)
    ways: dict[str, Way] = {}
    for backend in ("hopper", "triton"):
        ways[f"{backend} rule"] = public(backend, q, k, v, causal=True, window=W)
    ways["triton bool mask"] = public("triton", q, k, v, mask=seen)
    ways["triton additive mask"] = public("triton", q, k, v, mask=bias)
    return 4 * D * H * (L * W - W * (W - 1) / 2), ways


def softcap() -> Made:
    B, H, L, D = 4, 8, 4096, 256
    given = inputs(B, H, H, L, D, "bhld")
    backends = ("hopper", "triton")
    return operations(B, H, L, D, True), {b: public(b, *given, causal=True, softcap=50.0) for b in backends}


def varlen() -> Made:
    """64 sequences of 64 to 4096 tokens, beside as many dense ones of the average length (a rate, not a time)."""
    H, D = 16, 128
    lengths = torch.linspace(64, 4096, 64).round().long().tolist()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    lengths = [lengths[i] for i in order]
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
    q, k, v = (torch.randn(sum(lengths), H, D, device="cuda", dtype=BF16) for _ in range(3))
    options = {"causal": True, "max_q": 4096, "max_k": 4096}
    return sum(4 * D * H * n * (n + 1) / 2 for n in lengths), {
        "hopper": launcher_of(calls.varlen(q, k, v, cu, cu, Options(max_q=4096, max_k=4096, causal=True))),
        "triton": lambda: tilewise.varlen_attention(q, k, v, cu, cu, backend="triton", **options),
    }


def dense_average() -> Made:
    H, D, L = 16, 128, 2080
    given = inputs(64, H, H, L, D, "blhd")
    return operations(64, H, L, D, True), {
        "hopper": public("hopper", *given, causal=True),
        "cudnn": cudnn(*given, is_causal=True),
    }


EXTRA: dict[str, Callable[[], Made]] = {
    "window 1024 of 8k": window, "softcap 50 D256 4k": softcap, "varlen 64..4096": varlen, "dense 2080": dense_average,
}  # fmt: skip


def compile_extra(name: str) -> str:
    """Runs each way once; all must agree."""
    try:
        results = {way: run().float() for way, run in EXTRA[name]()[1].items()}
        first = next(iter(results.values()))
        off = {way: float((x - first).abs().max()) for way, x in results.items()}
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:400]}"
    wrong = {way: error for way, error in off.items() if not error < 0.05}
    return f"differ: {wrong}" if wrong else ""


def extras(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for name, make in EXTRA.items():
        flops, ways = make()
        times = seconds(those_that_run(ways), rounds, 3.0)
        rows.append({"work": name, "ms": {n: round(t * 1e3, 4) for n, t in times.items()}})
        rows[-1]["TFLOPS"] = {n: round(flops / t / 1e12, 1) for n, t in times.items()}
        shown = (f"{n} {t * 1e3:.3f} ms {flops / t / 1e12:.0f}," for n, t in times.items())
        print(name.ljust(24), *shown, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="small calls too")
    parser.add_argument("--verify", type=int, default=0, metavar="N", help="run every Nth conformance case too")
    parser.add_argument("--most", type=float, default=150, help="seconds for compiling and checking")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    found = prepare(args.verify, args.jobs, args.most, list(EXTRA), compile_extra)
    print(f"compiled and checked after {time.perf_counter() - start:.0f} s", flush=True)
    report: dict[str, Any] = {"device": "H200", "torch": torch.__version__, "triton": triton.__version__}
    report |= {"checks": found, "ceilings": ceilings(), "rows": extras(args.rounds)}
    others = report["rows"]

    def save(rows: list[dict[str, Any]]) -> None:
        """What there is so far."""
        report["rows"] = others + rows
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")

    save(core(args.rounds, save))
    if args.small:
        report["small"] = small(args.rounds)
    report["host_us"] = host_times()
    print("host time of a call, us:", report["host_us"])
    report["clocks"] = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"],
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    report["seconds"] = round(time.perf_counter() - start)
    print(report["ceilings"], report["clocks"], report["seconds"], "s")
    save(report["rows"][len(others) :])


if __name__ == "__main__":
    main()
