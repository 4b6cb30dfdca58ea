"""Times the Hopper kernels beside cuDNN and the Triton backend, in one run and in turns.

    python benchmarks/h200/hopper.py --sweep --verify 1 --json hopper.json

Kernels are compiled and checked first (`hopper_checks.py`). `--sweep` adds launches that the heuristics do not choose,
`--verify N` every Nth conformance case. A time is the median over rounds in which all ways take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from hopper_checks import BF16, Way, bound_call, prepare, variants
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise import checks
from tilewise.backends.hopper import heuristics
from tilewise.backends.triton.device import processors
from tilewise.options import Options
from tilewise.plan import Plan


def cudnn(q: Any, k: Any, v: Any, **options: Any) -> Way:
    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    return run


def median_times(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name in list(ways):
        try:
            ways[name]()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            del ways[name]
    for _ in range(rounds):
        for name, run in ways.items():
            run()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            repeats = 3
            events[0].record()
            for _ in range(repeats):
                run()
            events[1].record()
            torch.cuda.synchronize()
            times[name].append(events[0].elapsed_time(events[1]) * 1e-3 / repeats)
    return {name: sorted(t)[len(t) // 2] for name, t in times.items() if t}


def shapes(lengths: tuple[int, ...]) -> Any:
    for D, H, Hkv in ((64, 32, 32), (128, 16, 16), (128, 32, 8), (256, 8, 8), (512, 4, 4)):
        for L in lengths:
            for causal in (False, True):
                yield D, H, Hkv, L, causal


def core(rounds: int, sweep: bool) -> list[dict[str, Any]]:
    rows = []
    for D, H, Hkv, L, causal in shapes((1024, 4096, 16384)):
        if D == 512 and L < 4096:
            continue
        B = 16384 // L
        layouts = ("blhd", "bhld") if L == 4096 and D <= 256 else ("blhd",)
        for layout in layouts:
            q, k, v = (torch.randn(B, L, h, D, device="cuda", dtype=BF16).transpose(1, 2) for h in (H, Hkv, Hkv))
            if layout == "bhld":
                q, k, v = (x.contiguous() for x in (q, k, v))
            flops = 4 * D * B * H * (L * (L + 1) / 2 if causal else L * L)
            ways: dict[str, Way] = {"cudnn": cudnn(q, k, v, is_causal=causal)} if D <= 256 else {}
            ways["hopper"] = bound_call(None, q, k, v, causal=causal)
            ways["triton"] = lambda q=q, k=k, v=v, c=causal: tilewise.attention(q, k, v, causal=c, backend="triton")
            if sweep and layout == "blhd":
                for name, c in variants(D).items():
                    ways[name] = bound_call(c, q, k, v, causal=causal)
            times = median_times(ways, rounds)
            rates = {name: round(flops / t / 1e12, 1) for name, t in times.items()}
            name = f"D{D} {H}/{Hkv} {L // 1024}k {'causal' if causal else 'full'} {layout}"
            rows.append({"work": name, "TFLOPS": rates})
            print(name.ljust(28), " ".join(f"{n} {r:.0f}" for n, r in rates.items()), flush=True)
    return rows


def host_time() -> float:
    """Seconds of host time for a causal call of the public function that comes again."""
    q, k, v = (torch.randn(1, 4, 64, 64, device="cuda", dtype=BF16) for _ in range(3))
    times = []
    for _ in range(60):
        torch.cuda.synchronize()
        start = time.perf_counter()
        tilewise.attention(q, k, v, causal=True, backend="hopper")
        times.append(time.perf_counter() - start)
    return sorted(times)[30]


def window() -> tuple[float, dict[str, Way]]:
    """A window of 1024 over 8k, by rule and by mask."""
    H, L, D, W = 16, 8192, 128, 1024
    q, k, v = (torch.randn(1, H, L, D, device="cuda", dtype=BF16) for _ in range(3))
    i = torch.arange(L, device="cuda")
    seen = (i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < W)
    bias = torch.where(seen, 0.0, -torch.inf).to(BF16)
    return 4 * D * H * (L * W - W * (W - 1) / 2), {
        "rule": bound_call(None, q, k, v, causal=True, window=W),
        "bool mask": bound_call(None, q, k, v, mask=seen),
        "additive mask": bound_call(None, q, k, v, mask=bias),
        "triton rule": lambda: tilewise.attention(q, k, v, causal=True, window=W, backend="triton"),
    }


def softcap() -> tuple[float, dict[str, Way]]:
    B, H, L, D = 4, 8, 4096, 256
    q, k, v = (torch.randn(B, H, L, D, device="cuda", dtype=BF16) for _ in range(3))
    return 4 * D * B * H * L * (L + 1) / 2, {
        "hopper": bound_call(None, q, k, v, causal=True, softcap=50.0),
        "triton": lambda: tilewise.attention(q, k, v, causal=True, softcap=50.0, backend="triton"),
    }


def varlen() -> tuple[float, dict[str, Way]]:
    """64 sequences of 64 to 4096 tokens, beside as many dense ones of the average length (a rate, not a time)."""
    H, D = 16, 128
    lengths = torch.linspace(64, 4096, 64).round().long().tolist()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    lengths = [lengths[i] for i in order]
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
    q, k, v = (torch.randn(sum(lengths), H, D, device="cuda", dtype=BF16) for _ in range(3))
    options = {"causal": True, "max_q": 4096, "max_k": 4096}
    call = checks.varlen(q, k, v, cu, cu, 4096, 4096, Options(causal=True))
    c = heuristics.config(call.problem)
    from tilewise.backends.hopper.launch import Bound

    bound = Bound(Plan(call.problem, "hopper", "", (128, 128)), c, processors(call.problem.device))

    def run() -> torch.Tensor:
        bound(call.tensors)
        return call.out

    return sum(4 * D * H * n * (n + 1) / 2 for n in lengths), {
        "hopper": run,
        "triton": lambda: tilewise.varlen_attention(q, k, v, cu, cu, backend="triton", **options),
    }


def dense_average() -> tuple[float, dict[str, Way]]:
    H, D, L = 16, 128, 2080
    q, k, v = (torch.randn(64, L, H, D, device="cuda", dtype=BF16).transpose(1, 2) for _ in range(3))
    return 4 * D * 64 * H * L * (L + 1) / 2, {
        "hopper": bound_call(None, q, k, v, causal=True),
        "cudnn": cudnn(q, k, v, is_causal=True),
    }


EXTRA = {
    "window 1024 of 8k": window, "softcap 50 D256 4k": softcap, "varlen 64..4096": varlen, "dense 2080": dense_average,
}  # fmt: skip


def compile_extra(name: str) -> str:
    """Runs each way once; all must agree."""
    try:
        results = {way: run().float() for way, run in EXTRA[name]()[1].items() if "triton" not in way}
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
        times = median_times(ways, rounds)
        rows.append({"work": name, "ms": {n: round(t * 1e3, 4) for n, t in times.items()}})
        rows[-1]["TFLOPS"] = {n: round(flops / t / 1e12, 1) for n, t in times.items()}
        print(
            name.ljust(24),
            " ".join(f"{n} {t * 1e3:.3f} ms {flops / t / 1e12:.0f}," for n, t in times.items()),
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--verify", type=int, default=0, metavar="N", help="run every Nth conformance case too")
    parser.add_argument("--most", type=float, default=150, help="seconds for compiling and checking")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    found = prepare(args.sweep, args.verify, args.jobs, args.most, list(EXTRA), compile_extra)
    print(f"compiled and checked after {time.perf_counter() - start:.0f} s", flush=True)
    rows = extras(args.rounds) + core(args.rounds, args.sweep)
    host = host_time()
    print(f"host time of a call: {host * 1e6:.0f} us")
    clocks = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"],
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    import triton

    report = {
        "device": "H200", "torch": torch.__version__, "triton": triton.__version__, "clocks": clocks, "rows": rows,
        "seconds": round(time.perf_counter() - start), "checks": found, "host_us": round(host * 1e6, 1),
    }  # fmt: skip
    print(clocks, f"{report['seconds']} s")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
