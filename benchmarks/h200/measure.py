"""Times tilewise's GPU kernels beside their peers, all in one run and in turns.

    python benchmarks/h200/measure.py --suite prefill,decode --json result.json

Each row is one piece of work; each of its columns is a way to do it. Ways take turns, so that a card that slows down
under load slows them all. A time is the median of many, by CUDA events; decode is timed inside a CUDA graph over
rotating caches, so that no cache fits in L2. `--sweep` adds launches of our kernels that the heuristics do not choose.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise import checks, planner
from tilewise.backends.triton import heuristics
from tilewise.backends.triton.spec import Config
from tilewise.options import Options
from tilewise.plan import Plan

BF16 = torch.bfloat16
Way = Callable[[], Any]


@dataclass
class Work:
    """One row: its name, its ways, and what turns a time into a rate."""

    name: str
    flops: float = 0.0
    bytes: float = 0.0
    ways: dict[str, Callable[[], list[Way]]] = field(default_factory=dict)  # each makes calls, one for each input set
    graph: bool = False
    check: bool = True


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def bound_call(c: Config, *args: Any, entry: str = "dense", **options: Any) -> Way:
    """A call with a launch of our own choice."""
    if entry == "paged":
        k_pages = args[1:]
        call = checks.paged(args[0], *k_pages, None, None, Options(**options))
    else:
        call = checks.dense(*args, Options(**options))
    return bound_way(c, call)


def bound_way(c: Config, call: checks.Call) -> Way:
    from tilewise.backends.triton.device import arch_of
    from tilewise.backends.triton.launch import Bound

    bound = Bound(Plan(call.problem, "triton", "", (c.BM // c.pack, c.BK)), c, arch_of(call.problem.device))

    def run() -> torch.Tensor:
        bound(call.tensors)
        return call.out

    return run


def sdpa(backend: SDPBackend, q: Any, k: Any, v: Any, **options: Any) -> Way:
    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return run


def flex(q: Any, k: Any, v: Any, score_mod: Any = None, mask_mod: Any = None) -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.cache_size_limit = 256
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs" if FLEX_TUNE else None)
    return lambda: compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])


FLEX_TUNE = False


def causal_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j <= i


def prefill_configs(D: int, dtype: torch.dtype = BF16) -> list[Config]:
    if dtype == torch.float32:
        shapes = {64: "64x64w4s2 128x64w8s2 64x32w4s2", 128: "64x32w4s1 64x32w4s2 128x32w8s1"}[D]
    else:
        shapes = {
            64: "64x64w4s3 128x64w4s3 64x64w4s4 64x128w4s3",
            128: "64x64w4s3 128x64w8s3 128x128w8s3 64x64w4s4",
            256: "128x64w8s2 128x32w8s3 64x64w4s2",
            512: "64x64w8s1 64x32w8s2 128x32w8s2v2 128x16w8s3v2 64x32w4s3v2",
        }[D]
    return [config(shape) for shape in shapes.split()]


def config(shape: str) -> Config:
    """A launch by name: rows x keys, warps, stages and, if they are shared, the programs that share the values."""
    BM, BK, warps, stages, *slices = (int(n) for n in re.split("[xwsv]", shape))
    return Config(BM, BK, warps, stages, slices=slices[0] if slices else 1)


def tag(c: Config) -> str:
    text = f"{c.BM}x{c.BK} w{c.warps} s{c.stages}"
    return text + (f" p{c.splits}" if c.splits > 1 else "")


def prefill(sweep: bool) -> Iterator[Work]:
    for D, H in ((64, 32), (128, 16), (256, 8), (512, 4)):
        for L in (4096, 16384):
            for causal in (False, True):
                if L == 16384 and D == 512:
                    continue
                B = 16384 // L
                cells = L * (L + 1) / 2 if causal else L * L
                work = Work(f"prefill D{D} {L // 1024}k {'causal' if causal else 'full'}", 4 * D * B * H * cells)
                q, k, v = (randn(B, L, H, D).transpose(1, 2) for _ in range(3))
                work.ways["tilewise"] = lambda q=q, k=k, v=v, c=causal: [
                    lambda: tilewise.attention(q, k, v, causal=c, backend="triton")
                ]
                if sweep and L == 4096:
                    for c in prefill_configs(D):
                        work.ways[tag(c)] = lambda q=q, k=k, v=v, c=c, s=causal: [bound_call(c, q, k, v, causal=s)]
                if D <= 256:
                    work.ways["cudnn"] = lambda q=q, k=k, v=v, c=causal: [
                        sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, is_causal=c)
                    ]
                    work.ways["fa2"] = lambda q=q, k=k, v=v, c=causal: [
                        sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, is_causal=c)
                    ]
                    work.ways["flex"] = lambda q=q, k=k, v=v, c=causal: [
                        flex(q, k, v, mask_mod=causal_mod if c else None)
                    ]
                else:
                    work.ways["mem-eff"] = lambda q=q, k=k, v=v, c=causal: [
                        sdpa(SDPBackend.EFFICIENT_ATTENTION, q, k, v, is_causal=c)
                    ]
                yield work


def f32(sweep: bool) -> Iterator[Work]:
    for D, H in ((64, 16), (128, 8)):
        for causal in (False, True):
            B, L = 2, 4096
            cells = L * (L + 1) / 2 if causal else L * L
            work = Work(f"f32 D{D} 4k {'causal' if causal else 'full'}", 4 * D * B * H * cells)
            q, k, v = (randn(B, H, L, D, dtype=torch.float32) for _ in range(3))
            work.ways["tilewise"] = lambda q=q, k=k, v=v, c=causal: [
                lambda: tilewise.attention(q, k, v, causal=c, backend="triton")
            ]
            if sweep:
                for c in prefill_configs(D, torch.float32):
                    work.ways[tag(c)] = lambda q=q, k=k, v=v, c=c, s=causal: [bound_call(c, q, k, v, causal=s)]
            work.ways["mem-eff"] = lambda q=q, k=k, v=v, c=causal: [
                sdpa(SDPBackend.EFFICIENT_ATTENTION, q, k, v, is_causal=c)
            ]
            yield work


def options(sweep: bool) -> Iterator[Work]:
    """Window, masks, softcap."""
    B, H, L, D, W = 1, 16, 8192, 128, 1024
    q, k, v = (randn(B, H, L, D) for _ in range(3))
    cells = B * H * (L * W - W * (W - 1) / 2)
    i = torch.arange(L, device="cuda")
    seen = (i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < W)
    bias = torch.where(seen, 0.0, -torch.inf).to(BF16)
    window = Work("window 1024 of 8k", 4 * D * cells)
    window.ways["tilewise"] = lambda: [lambda: tilewise.attention(q, k, v, causal=True, window=W, backend="triton")]
    window.ways["bool mask"] = lambda: [lambda: tilewise.attention(q, k, v, mask=seen, backend="triton")]
    window.ways["additive mask"] = lambda: [lambda: tilewise.attention(q, k, v, mask=bias, backend="triton")]
    if sweep:
        for c in prefill_configs(128):
            window.ways[tag(c)] = lambda c=c: [bound_call(c, q, k, v, causal=True, window=W)]
            window.ways[f"bool {tag(c)}"] = lambda c=c: [bound_call(c, q, k, v, mask=seen)]
    window.ways["flex"] = lambda: [flex(q, k, v, mask_mod=lambda b, h, i, j: (j <= i) & (i - j < W))]
    window.ways["cudnn bool"] = lambda: [sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, attn_mask=seen)]
    yield window

    B, H, L, D = 4, 8, 4096, 256
    q2, k2, v2 = (randn(B, H, L, D) for _ in range(3))
    cap = Work("softcap 50 causal D256 4k", 4 * D * B * H * L * (L + 1) / 2)
    cap.ways["tilewise"] = lambda: [lambda: tilewise.attention(q2, k2, v2, causal=True, softcap=50.0, backend="triton")]
    if sweep:
        for c in prefill_configs(256):
            cap.ways[tag(c)] = lambda c=c: [bound_call(c, q2, k2, v2, causal=True, softcap=50.0)]
    cap.ways["flex"] = lambda: [
        flex(q2, k2, v2, score_mod=lambda s, b, h, i, j: 50.0 * torch.tanh(s / 50.0), mask_mod=causal_mod)
    ]
    yield cap


def packed(sweep: bool) -> Iterator[Work]:
    """Sequences of many lengths, the longest last."""
    H, D = 16, 128
    lengths = [300 + 37 * n for n in range(30)] + [8192]
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    q, k, v = (randn(sum(lengths), H, D) for _ in range(3))
    for causal in (False, True):
        cells = sum(n * (n + 1) / 2 if causal else n * n for n in lengths)
        work = Work(f"varlen {'causal' if causal else 'full'}, one of 8k last", 4 * D * H * cells)
        for name, most in (("tilewise", heuristics.MOST_ORDERED), ("as they come", 0)):
            work.ways[name] = lambda most=most, causal=causal: [ranked_call(most, q, k, v, cu, causal)]
        yield work


def ranked_call(most: int, q: Any, k: Any, v: Any, cu: Any, causal: bool) -> Way:
    """A packed call whose sequences are ranked if there are fewer than `most`."""
    usual, heuristics.MOST_ORDERED = heuristics.MOST_ORDERED, most
    try:
        call = checks.varlen(q, k, v, cu, cu, 8192, 8192, Options(causal=causal))
        return bound_way(heuristics.config(call.problem, 132, 90), call)
    finally:
        heuristics.MOST_ORDERED = usual


def decode_configs(D: int, group: int) -> list[Config]:
    shapes = {
        64: [(128, 4, 3), (128, 4, 5), (256, 4, 3), (64, 4, 6)],
        128: [(128, 4, 3), (64, 4, 4), (64, 4, 5), (128, 8, 4)],
        256: [(64, 4, 3), (32, 4, 5), (64, 8, 3)],
        512: [(32, 4, 3), (32, 4, 2), (64, 4, 2), (32, 2, 3), (32, 8, 4), (16, 4, 5)],
    }[D]
    return [Config(16, bk, w, s, group) for bk, w, s in shapes]


def split_choices(c: Config, programs: int, L: int) -> list[Config]:
    tiles = -(-L // c.BK)
    counts = sorted({max(1, min(tiles, 132 * n // programs)) for n in (1, 2, 4)})
    return [replace(c, splits=n) for n in counts]


def decode(sweep: bool) -> Iterator[Work]:
    for D, H, Hkv, B, L in (
        (128, 32, 8, 1, 4096), (128, 32, 8, 1, 32768), (128, 32, 8, 16, 8192), (128, 32, 8, 64, 4096),
        (128, 32, 32, 16, 8192), (64, 32, 8, 32, 16384), (256, 16, 8, 16, 8192), (512, 16, 2, 16, 8192),
    ):  # fmt: skip
        size = 2 * 2 * B * Hkv * L * D
        copies = max(1, min(8, -(-(256 << 20) // size)))
        yield decode_work(D, H, Hkv, B, L, copies, size, sweep)


def decode_work(D: int, H: int, Hkv: int, B: int, L: int, copies: int, size: int, sweep: bool) -> Work:
    work = Work(f"decode D{D} {H}/{Hkv} {B}x{L // 1024}k", bytes=size, graph=True)
    sets = [(randn(B, H, 1, D), randn(B, Hkv, L, D), randn(B, Hkv, L, D)) for _ in range(copies)]
    ways = work.ways
    ways["tilewise"] = lambda: [lambda s=s: tilewise.attention(*s, backend="triton") for s in sets]
    if sweep:
        for shape in decode_configs(D, H // Hkv):
            for c in split_choices(shape, B * Hkv, L):
                ways[tag(c)] = lambda c=c: [bound_call(c, *s) for s in sets]
    if D <= 256:
        ways["cudnn"] = lambda: [sdpa(SDPBackend.CUDNN_ATTENTION, *s, enable_gqa=True) for s in sets]
        ways["fa2"] = lambda: [sdpa(SDPBackend.FLASH_ATTENTION, *s, enable_gqa=True) for s in sets]
    for page in (16, 128):
        paged = [(s[0], *pages(s[1], s[2], page)) for s in sets]
        ways[f"paged {page}"] = lambda paged=paged: [
            lambda s=s: tilewise.paged_attention(*s, backend="triton") for s in paged
        ]
        if sweep and B >= 16:
            for shape in decode_configs(D, H // Hkv)[:3]:
                shape = replace(shape, stages=shape.stages + 1)
                for c in split_choices(shape, B * Hkv, L)[:2]:
                    ways[f"paged {page} {tag(c)}"] = lambda c=c, paged=paged: [
                        bound_call(c, *s, entry="paged") for s in paged
                    ]
    return work


def pages(k: torch.Tensor, v: torch.Tensor, page: int) -> tuple[torch.Tensor, ...]:
    """The same cache in shuffled pages."""
    B, Hkv, L, D = k.shape
    count = B * L // page
    order = torch.randperm(count, device="cuda")
    k_pages, v_pages = torch.empty(2, count, page, Hkv, D, device="cuda", dtype=k.dtype)
    for cache, out in ((k, k_pages), (v, v_pages)):
        out[order] = cache.transpose(1, 2).reshape(count, page, Hkv, D)
    table = order.view(B, L // page).to(torch.int32)
    return k_pages, v_pages, table, torch.full((B,), L, dtype=torch.int32, device="cuda")


def narrow(sweep: bool) -> Iterator[Work]:
    """Quantised caches: the same tokens in fewer bytes."""
    D, H, Hkv, B, L = 128, 32, 8, 32, 8192
    work = Work(f"narrow D{D} {H}/{Hkv} {B}x{L // 1024}k", bytes=2 * 2 * B * Hkv * L * D, graph=True, check=False)
    q, k, v = randn(B, H, 1, D), randn(B, Hkv, L, D), randn(B, Hkv, L, D)
    work.ways["bf16"] = lambda: [lambda: tilewise.attention(q, k, v, backend="triton")]
    for kind, group in (("fp8_e4m3", 128), ("fp8_e4m3", 64), ("int8", 128), ("int4", 128), ("int4", 64)):
        ck, cv = (tilewise.Quantised.from_float(x, kind, group) for x in (k, v))
        work.ways[f"{kind}/{group}"] = lambda ck=ck, cv=cv: [lambda: tilewise.attention(q, ck, cv, backend="triton")]
        if sweep and group == 128:
            for bk, w, s in (
                (64, 4, 3),
                (128, 4, 3),
                (128, 4, 4),
                (64, 4, 5),
                (128, 8, 3),
                (64, 2, 4),
                (128, 2, 3),
                (256, 4, 3),
                (256, 8, 3),
            ):
                c = Config(16, bk, w, s, H // Hkv, 1)
                work.ways[f"{kind}/{group} {tag(c)}"] = lambda c=c, ck=ck, cv=cv: [bound_call(c, q, ck, cv)]
    yield work


SUITES = {
    "prefill": prefill, "f32": f32, "options": options, "packed": packed, "decode": decode, "narrow": narrow,
}  # fmt: skip


def make_calls(work: Work) -> dict[str, list[Way]]:
    """The ways of a work that run, each checked against the first."""
    calls: dict[str, list[Way]] = {}
    want = None
    for name, make in work.ways.items():
        try:
            ways = make()
            got = ways[0]()
            torch.cuda.synchronize()
        except Exception as error:  # a peer without this kernel, or a launch that does not fit
            print(f"  {work.name} / {name}: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
            continue
        if want is None:
            want = got.float()
        elif work.check and not torch.allclose(got.float().reshape(want.shape), want, atol=3e-2, rtol=3e-2):
            print(f"  {work.name} / {name}: WRONG by {(got.float() - want).abs().max():.3g}", flush=True)
            continue
        calls[name] = ways
    return calls


def graphed(ways: list[Way]) -> Way:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for way in ways:
            way()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for way in ways:
            way()
    return graph.replay


def measure(work: Work, rounds: int, budget: float) -> dict[str, float]:
    """Seconds of each way: the median over rounds in which all take turns."""
    calls = make_calls(work)
    ready: dict[str, tuple[Way, int]] = {}
    for name, ways in calls.items():
        try:
            ready[name] = (graphed(ways), len(ways)) if work.graph else (ways[0], 1)
        except Exception as error:
            print(f"  {work.name} / {name}: no graph: {str(error).splitlines()[0][:100]}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in ready}
    start = time.perf_counter()
    for _ in range(rounds):
        for name, (run, count) in ready.items():
            run()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            repeats = 3
            events[0].record()
            for _ in range(repeats):
                run()
            events[1].record()
            torch.cuda.synchronize()
            times[name].append(events[0].elapsed_time(events[1]) * 1e-3 / repeats / count)
        if time.perf_counter() - start > budget:
            break
    return {name: sorted(ts)[len(ts) // 2] for name, ts in times.items()}


def host_cost() -> dict[str, float]:
    """Microseconds of host time of a decode call, by a loop that does not wait."""
    q, k, v = randn(1, 32, 1, 128), randn(1, 8, 4096, 128), randn(1, 8, 4096, 128)
    paged = (q, *pages(k, v, 16))
    call = checks.dense(q, k, v, Options())
    plan = planner.choose(call.problem, "triton")
    backend = planner.load("triton")
    ways: dict[str, Way] = {
        "attention": lambda: tilewise.attention(q, k, v, backend="triton"),
        "paged_attention": lambda: tilewise.paged_attention(*paged, backend="triton"),
        "backend run alone": lambda: backend.run(plan, call.tensors),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    }
    result = {}
    for name, way in ways.items():
        for _ in range(20):
            way()
        torch.cuda.synchronize()
        best = 1e9
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(20):
                way()
            best = min(best, (time.perf_counter() - start) / 20)
            torch.cuda.synchronize()
        result[name] = best * 1e6
        whole = []
        for _ in range(200):
            start = time.perf_counter()
            way()
            torch.cuda.synchronize()
            whole.append(time.perf_counter() - start)
        result[f"{name}, with the wait"] = sorted(whole)[100] * 1e6
    return result


def ceilings() -> dict[str, float]:
    a, b = randn(8192, 8192), randn(8192, 8192)
    x = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    y = torch.empty_like(x)
    result = {}
    for name, run, amount in (
        ("matmul TFLOPS", lambda: a @ b, 2 * 8192**3 / 1e12),
        ("copy TB/s", lambda: y.copy_(x), 8 * x.numel() / 1e12),
        ("read TB/s", lambda: x.sum(), 4 * x.numel() / 1e12),
    ):
        times = measure(Work(name, ways={"x": lambda run=run: [run]}, check=False), 10, 5)
        result[name] = amount / times["x"]
    return result


def show(work: Work, times: dict[str, float]) -> str:
    parts = []
    for name, seconds in times.items():
        if work.bytes:
            parts.append(f"{name} {seconds * 1e6:.1f}us {work.bytes / seconds / 1e12:.2f}")
        elif seconds < 1e-3:
            parts.append(f"{name} {seconds * 1e3:.3f}ms {work.flops / seconds / 1e12:.0f}")
        else:
            parts.append(f"{name} {work.flops / seconds / 1e12:.0f}")
    return f"{work.name}: " + " | ".join(parts)


def compile_first(args: argparse.Namespace) -> None:
    """Fills Triton's cache from several processes: compiling is most of a sweep's time."""
    parts = [
        subprocess.Popen(
            [sys.executable, __file__, "--suite", args.suite, "--part", f"{i}/{args.jobs}"]
            + ["--sweep"] * args.sweep + ["--only", args.only],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for i in range(args.jobs)
    ]  # fmt: skip
    for part in parts:
        part.wait()


def compile_part(args: argparse.Namespace) -> None:
    index, count = (int(n) for n in args.part.split("/"))
    torch.manual_seed(0)
    number = 0
    for name in args.suite.split(","):
        for work in SUITES[name](args.sweep):
            if args.only not in work.name:
                continue
            for way, make in work.ways.items():
                number += 1
                if number % count == index and not way.startswith(("cudnn", "fa2", "mem-eff")):
                    with suppress(Exception):
                        make()[0]()
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--suite", default=",".join(SUITES))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--part", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.part:
        compile_part(args)
        return
    start = time.perf_counter()
    if args.jobs > 1:
        compile_first(args)
        print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tilewise": tilewise.__version__,
        "command": " ".join(sys.argv),
        "ceilings": ceilings(),
        "host us": host_cost(),
        "rows": {},
    }
    lines = []
    for name in args.suite.split(","):
        for work in SUITES[name](args.sweep):
            if args.only not in work.name:
                continue
            times = measure(work, args.rounds, 12)
            record["rows"][work.name] = {"flops": work.flops, "bytes": work.bytes, "seconds": times}
            lines.append(show(work, times))
            print(f"{time.perf_counter() - start:.0f} s {work.name}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(record, indent=1) + "\n")
            torch.cuda.empty_cache()
    print(json.dumps({k: {n: round(x, 2) for n, x in record[k].items()} for k in ("ceilings", "host us")}))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
