"""Two source trees on a GPU, interleaved: prefill, decode, pages, quantised caches by CUDA graphs; Python of a call.

    python benchmarks/h200/trees.py --against ../before --json trees.json

Each tree has a process of its own, which compiles all first and then times one work when it is told to, so that the
trees are interleaved. Only the public API is used. `host` rows are the time from one call to the next while the GPU
keeps up: what a call costs in Python. Both trees run on one core: cores of one host differ by 1.8 times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

ROUNDS = 5
SECONDS = 0.06  # of one work in a round
HOST_CALLS = 400
PARTS = 8  # processes of a tree that compile


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def in_pages(x: torch.Tensor, page: int, order: torch.Tensor) -> torch.Tensor:
    """Rows [B, Hkv, L, D] in shuffled pages [count, page, Hkv, D]."""
    B, Hkv, L, D = x.shape
    out = torch.empty(B * L // page, page, Hkv, D, device="cuda", dtype=x.dtype)
    out[order] = x.transpose(1, 2).reshape(-1, page, Hkv, D)
    return out


def works() -> dict[str, Callable[[], Callable[[], Any]]]:
    """Each makes its tensors and returns a call."""
    import tilewise

    def dense(D: int, H: int, Hkv: int, B: int, Lq: int, L: int, kind: str = "", **options: Any) -> Callable[[], Any]:
        q, k, v = randn(B, H, Lq, D), randn(B, Hkv, L, D), randn(B, Hkv, L, D)
        if options.pop("lengths", False):
            options["kv_lengths"] = torch.full((B,), L - 3, device="cuda", dtype=torch.int32)
        if kind:
            k, v = (tilewise.Quantised.from_float(x, kind, 64) for x in (k, v))
        return lambda: tilewise.attention(q, k, v, **options)

    def paged(D: int, H: int, Hkv: int, B: int, L: int, page: int, **options: Any) -> Callable[[], Any]:
        q = randn(B, H, 1, D)
        order = torch.randperm(B * L // page, device="cuda")
        k, v = (in_pages(randn(B, Hkv, L, D), page, order) for _ in range(2))
        table = order.view(B, -1).int()
        lengths = torch.full((B,), L, device="cuda", dtype=torch.int32)
        return lambda: tilewise.paged_attention(q, k, v, table, lengths, **options)

    def packed(D: int, H: int, Hkv: int, lengths: list[int]) -> Callable[[], Any]:
        q, k, v = (randn(sum(lengths), h, D) for h in (H, Hkv, Hkv))
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        ends = {"max_q": max(lengths), "max_k": max(lengths)}
        return lambda: tilewise.varlen_attention(q, k, v, cu, cu, causal=True, **ends)

    found: dict[str, Callable[[], Callable[[], Any]]] = {}
    for D, H, Hkv in ((64, 32, 32), (128, 16, 16), (128, 32, 8), (256, 8, 8)):
        for L in (1024, 4096, 16384):
            for causal in (False, True):
                name = f"prefill D{D} {H}/{Hkv} {L // 1024}k {'causal' if causal else 'full'}"
                found[name] = lambda a=(D, H, Hkv, 16384 // L, L, L), c=causal: dense(*a, causal=c)
    found["prefill packed D128"] = lambda: packed(128, 16, 16, [4096, 2048, 64, 1024, 512, 4096, 128, 4096])
    for D, H, Hkv, B, L in (
        (128, 32, 8, 1, 4096), (128, 32, 8, 16, 8192), (128, 32, 8, 64, 4096), (64, 32, 8, 32, 16384),
        (256, 16, 8, 16, 8192), (512, 16, 2, 16, 8192),
    ):  # fmt: skip
        found[f"decode D{D} {H}/{Hkv} {B}x{L // 1024}k"] = lambda a=(D, H, Hkv, B, 1, L): dense(*a)
    for page in (16, 128):
        found[f"pages of {page} D128 32/8 64x4k"] = lambda page=page: paged(128, 32, 8, 64, 4096, page)
    for kind in ("int8", "int4", "fp8_e4m3"):
        found[f"decode {kind} D128 32/8 32x8k"] = lambda kind=kind: dense(128, 32, 8, 32, 1, 8192, kind)
    small = (128, 8, 8, 1, 1, 64)
    found["host plain"] = lambda: dense(*small)
    found["host causal prefill"] = lambda: dense(128, 8, 8, 1, 64, 64, causal=True)
    found["host lengths"] = lambda: dense(*small, lengths=True)
    found["host pages"] = lambda: paged(128, 8, 8, 1, 64, 16)
    found["host packed"] = lambda: packed(128, 8, 8, [32, 32])
    found["host int8"] = lambda: dense(*small, "int8")
    return found


def graphed(call: Callable[[], Any]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return lambda: (call, graph.replay())[1]  # the graph has the addresses of the call's tensors


def microseconds(name: str, run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    if name.startswith("host"):
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            run()
        took = (time.perf_counter() - start) / HOST_CALLS
        torch.cuda.synchronize()
        return took * 1e6
    times = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or not times:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(3):
            run()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) * 1e3 / 3)
    return statistics.median(times)


def serve() -> None:
    """A worker: names come by lines, times go. A work's memory is freed before the next one."""
    torch.manual_seed(0)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    made = works()
    current, run = "", lambda: None
    for line in sys.stdin:
        name = line.strip()
        if name != current:
            run = call = lambda: None
            torch.cuda.empty_cache()
            call = made[name]()
            run = call if name.startswith("host") else graphed(call)
            for _ in range(3):
                run()
            current = name
        print(microseconds(name, run), flush=True)


def named(chosen: Iterable[str], only: str) -> list[str]:
    return [name for name in chosen if any(word in name for word in only.split(","))]


def compile_some(part: int, only: str) -> None:
    """Every `PARTS`-th work, once."""
    chosen = works()
    for name in named(chosen, only)[part::PARTS]:
        chosen[name]()()
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--against", type=Path, help="another source tree")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="works whose name holds one of these, between commas"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    if args.compile is not None:
        compile_some(args.compile, args.only)
        return
    start = time.perf_counter()
    trees = {"before": args.against, "now": Path(__file__).resolve().parents[2]}

    def begin(word: str, *arguments: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(trees[word].resolve() / "src")}
        command = [sys.executable, __file__, *arguments]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    compiling = [begin(word, "--only", args.only, "--compile", str(part)) for part in range(PARTS) for word in trees]
    if any(process.wait() for process in compiling):
        raise SystemExit("a work failed")
    workers = {word: begin(word, "--serve") for word in trees}
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)

    def ask(word: str, name: str) -> float:
        stdin, stdout = workers[word].stdin, workers[word].stdout
        assert stdin is not None
        assert stdout is not None
        print(name, file=stdin, flush=True)
        return float(stdout.readline())

    rows = []
    for name in named(works(), args.only):
        times: dict[str, list[float]] = {word: [] for word in workers}
        for n in range(ROUNDS):
            for word in list(workers)[:: 1 if n % 2 else -1]:
                times[word].append(ask(word, name))
        us = {word: round(statistics.median(ts), 2) for word, ts in times.items()}
        rows.append({"work": name, "us": us, "now is faster by": round(us["before"] / us["now"], 3)})
        print(f"{name:34s} {us['before']:10.1f} {us['now']:10.1f}  {rows[-1]['now is faster by']:.3f}", flush=True)
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait(30)
    for kind in ("prefill", "decode", "pages", "host"):
        ratios = [r["now is faster by"] for r in rows if r["work"].startswith(kind)]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            print(f"{kind:8s} {len(ratios)} rows: {mean:.3f}, lowest {min(ratios)}")
    if args.json:
        record = {
            "device": "H200",
            "torch": torch.__version__,
            "what": "a source tree beside an earlier one",
            "rows": rows,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
