"""Times the Hopper kernels beside cuDNN and the Triton backend, in one run and in turns.

    python benchmarks/h200/hopper.py --suite core --json hopper.json

Kernels are compiled first, by many processes. A variant is a launch that the heuristics do not choose; every way is
checked against a float64 oracle before it is timed. A time is the median over rounds in which all ways take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise import checks
from tilewise.backends.hopper import heuristics
from tilewise.backends.hopper.heuristics import Config
from tilewise.backends.triton.device import processors
from tilewise.options import Options
from tilewise.plan import Plan

BF16 = torch.bfloat16
Way = Callable[[], torch.Tensor]


def bound_call(c: Config | None, *args: Any, **options: Any) -> Way:
    """A call of the Hopper kernels with a launch of our own choice."""
    from tilewise.backends.hopper.launch import Bound

    call = checks.dense(*args, Options(**options))
    c = c or heuristics.config(call.problem)
    bound = Bound(Plan(call.problem, "hopper", "", (64 * c.consumers, c.BN)), c, processors(call.problem.device))

    def run() -> torch.Tensor:
        bound(call.tensors)
        return call.out

    return run


def cudnn(q: Any, k: Any, v: Any, **options: Any) -> Way:
    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    return run


def variants(D: int) -> dict[str, Config]:
    """Launches beside the one that the heuristics choose."""
    if D == 64:
        return {"2 consumers": Config(128, 2, 2, 2)}
    if D == 256:
        return {"borrowed": Config(64, 2, 2, 2, staged="borrowed", out_columns=256, q_stages=1)}
    return {}


def oracle(q: Any, k: Any, v: Any, causal: bool) -> torch.Tensor:
    """Float64, bottom-right causal."""
    G = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(G, 1), v.double().repeat_interleave(G, 1)
    s = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        Lq, Lk = s.shape[-2:]
        i, j = torch.arange(Lq, device=s.device)[:, None] + Lk - Lq, torch.arange(Lk, device=s.device)
        s = s.masked_fill(j > i, -torch.inf)
    return torch.softmax(s, -1) @ v


def check(D: int, causal: bool, c: Config | None) -> float:
    """The relative error on awkward sizes, seq-major and head-major, with poisoned outputs."""
    worst = 0.0
    for B, H, Hkv, Lq, Lk in ((2, 4, 2, 700, 1024), (1, 3, 3, 130, 256), (8, 16, 4, 1024, 1024)):
        g = torch.Generator("cuda").manual_seed(Lq)
        q = 3 * torch.randn(B, Lq, H, D, device="cuda", generator=g).to(BF16).transpose(1, 2)
        k, v = (torch.randn(B, Hkv, Lk, D, device="cuda", generator=g).to(BF16) for _ in range(2))
        out = torch.full_like(q, float("nan"))
        bound_call(c, q, k, v, causal=causal, out=out)()
        want = oracle(q, k, v, causal)
        worst = max(worst, float((out.double() - want).norm() / want.norm()))
        if not bool(out.isfinite().all()):
            return float("nan")
    return worst


def compile_one(job: tuple[int, bool, Config | None]) -> tuple[Any, float]:
    D, causal, c = job
    start = time.perf_counter()
    try:
        error = check(D, causal, c)
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem)[:300]}", time.perf_counter() - start
    return error, time.perf_counter() - start


def median_times(ways: dict[str, Way], rounds: int, least: float = 0.0) -> dict[str, float]:
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


def repeats(which: str) -> str:
    """A thousand repeats of one launch, on awkward sizes with many rounds of work, give the same bits."""
    D, option = which.split()
    g = torch.Generator("cuda").manual_seed(1)
    q = torch.randn(5, 16, 777, int(D), device="cuda", dtype=BF16, generator=g)
    k, v = (torch.randn(5, 4, 999, int(D), device="cuda", dtype=BF16, generator=g) for _ in range(2))
    options: dict[str, Any] = {
        "full": {}, "causal": {"causal": True}, "window": {"window": (300, 5), "softcap": 9.0},
        "lengths": {"kv_lengths": torch.tensor([999, 1, 500, 0, 128], device="cuda"), "causal": True},
    }[option]  # fmt: skip
    run = bound_call(None, q, k, v, **options)
    first = run().clone()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        wrong += (run() != first).sum()
    return f"{int(wrong)} elements differed" if int(wrong) or not bool(first.isfinite().all()) else ""


REPEATS = [f"{D} {option}" for D in (64, 128, 256, 512) for option in ("full", "causal", "window", "lengths")]


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


BROKEN: set[tuple[int, bool, str]] = set()


def conformance(index: int) -> tuple[str, str, float]:
    """Case number `index` of the suite, as near as these kernels come to it: 16 bits, more than a few queries."""
    from tilewise.conformance.cases import CASES
    from tilewise.conformance.check import check_case
    from tilewise.errors import Unsupported

    start = time.perf_counter()
    case = fitted(CASES[index], index)
    try:
        verdict = check_case(case, "hopper", "cuda")
        status = f"ok {verdict.error:.3g} of {verdict.bound:.3g}"
    except Unsupported as error:
        status = f"unsupported {error}"
    except Exception as error:
        status = f"FAILED {type(error).__name__}: {str(error)[:400]}"
    return str(case), status, time.perf_counter() - start


def fitted(case: Any, index: int) -> Any:
    changes: dict[str, Any] = {"dtype": ("bf16", "f16")[index % 2], "k": "", "v": ""}
    changes["D"] = -(-case.D // 8) * 8
    changes["Dv"] = -(-case.Dv // 8) * 8
    if case.form == "dense" and case.Lq <= 16:
        changes["Lq"] = case.Lq + 32
    if case.mask_kind != "bool":
        changes["mask_kind"] = ("f32", changes["dtype"])[index // 2 % 2]
    if case.strides == "sliced":
        changes["strides"] = ""
    return replace(case, **changes)


def conforming() -> list[int]:
    """The cases that could be for these kernels."""
    from tilewise.conformance.cases import CASES

    found, seen = [], set()
    for i, case in enumerate(CASES):
        case = fitted(case, i)
        if case.form != "paged" and case.D <= 512 and str(case) not in seen:
            seen.add(str(case))
            found.append(i)
    return found


def prop(name: str) -> tuple[str, str, float]:
    """A property of the suite, with bfloat16 in place of float32."""
    from tilewise.conformance import properties
    from tilewise.errors import Unsupported

    start = time.perf_counter()
    torch.set_default_dtype(BF16)
    plain = properties.Case
    properties.Case = lambda **given: plain(**({"dtype": "bf16"} | given))  # type: ignore[assignment,misc]
    properties.SOME[:] = [fitted(case, 0) for case in properties.SOME if case.form != "paged"]
    from tilewise import verify

    try:
        (properties.PROPERTIES | verify.GPU_CHECKS)[name]("hopper", "cuda")
        status = "ok"
    except Unsupported as error:
        status = f"unsupported {error}"
    except Exception as error:
        status = f"FAILED {type(error).__name__}: {str(error)[:400]}"
    return name, status, time.perf_counter() - start


def repeated(which: str) -> tuple[str, str, float]:
    start = time.perf_counter()
    try:
        said = repeats(which)
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:300]}"
    return f"1000 repeats: D{which}", f"FAILED {said}" if said else "ok", time.perf_counter() - start


def prepare(sweep: bool, verify: int, jobs: int, seconds: float) -> list[tuple[str, str, float]]:
    """Compiles and checks every launch that is timed, and runs the conformance suite."""
    from tilewise.conformance.properties import PROPERTIES

    todo = [
        ((D, causal, name), c)
        for D in (64, 128, 256, 512)
        for causal in (False, True)
        for name, c in ({"": None} | (variants(D) if sweep else {})).items()
    ]
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=6)
    futures = [pool.submit(compile_one, (D, causal, c)) for (D, causal, _), c in todo]
    more = [pool.submit(compile_extra, name) for name in EXTRA]
    checks = []
    if verify:
        checks = [pool.submit(prop, name) for name in (*PROPERTIES, "graphs_replay", "poisoned_memory")]
        checks += [pool.submit(repeated, which) for which in REPEATS]
        checks += [pool.submit(conformance, i) for i in conforming()[::verify]]
    last = time.perf_counter() + seconds
    for (key, _), future in zip(todo, futures, strict=True):
        try:
            error, took = future.result(timeout=max(0.1, last - time.perf_counter()))
        except Exception as problem:
            error, took = f"{type(problem).__name__}", 0.0
        good = isinstance(error, float) and error < 1e-2
        if not good:
            BROKEN.add(key)
            shown = f"{error:.2e}" if isinstance(error, float) else error
            print(f"  {key}: {shown} WRONG ({took:.0f} s)", flush=True)
    for name, future in zip(EXTRA, more, strict=True):
        try:
            said = future.result(timeout=max(0.1, last - time.perf_counter()))
        except Exception as problem:
            said = type(problem).__name__
        if said:
            print(f"  {name}: {said}", flush=True)
    results = []
    for future in checks:
        try:
            results.append(future.result(timeout=max(0.1, last - time.perf_counter())))
        except Exception as problem:
            results.append(("?", f"FAILED {type(problem).__name__}", 0.0))
        if results[-1][1].startswith("FAILED"):
            print("  " + " ".join(results[-1][:2])[:260].replace("\n", " "), flush=True)
    if checks:
        counts = {w: sum(r[1].startswith(w) for r in results) for w in ("ok", "unsupported", "FAILED")}
        print(f"conformance: {counts}", flush=True)
    for process in pool._processes.values():  # one may hang in a kernel that waits for ever
        process.kill()
    return results


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
    checks = prepare(args.sweep, args.verify, args.jobs, args.most)
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
        "seconds": round(time.perf_counter() - start), "checks": checks, "host_us": round(host * 1e6, 1),
    }  # fmt: skip
    print(clocks, f"{report['seconds']} s")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
