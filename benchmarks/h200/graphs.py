"""Captured calls against eager ones: lengths, tables and tensors change in place between the replays of a CUDA graph.

    python benchmarks/h200/graphs.py --json graphs.json

Each case is captured by hand (`torch.cuda.graph`) and compiled (`torch.compile(mode="reduce-overhead")`, which captures
by itself); a replay must give the bits of an eager call on the same memory, five times over. A compiled case also fails
if Inductor ran it without a graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

import tilewise
from tilewise import PagedKVCache, Quantised

BF16 = torch.bfloat16
CASES: dict[str, Callable[[], tuple[Call, Change]]] = {}
Call = Callable[..., torch.Tensor]
Change = Callable[[], tuple[Any, ...]]


def case(make: Any) -> Any:
    CASES[make.__name__] = make
    return make


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def renew(*tensors: torch.Tensor) -> None:
    for x in tensors:
        x.normal_()


def lengths(into: torch.Tensor, least: int, most: int) -> None:
    into.copy_(torch.randint(least, most + 1, into.shape))


@case
def prefill_causal(H: int = 8, L: int = 300) -> tuple[Call, Change]:
    """Dense, all tensors new."""
    given = randn(2, H, L, 128), randn(2, H // 4, L, 128), randn(2, H // 4, L, 128)

    def change() -> tuple[Any, ...]:
        renew(*given)
        return given

    return lambda q, k, v: tilewise.attention(q, k, v, causal=True), change


@case
def prefill_long() -> tuple[Call, Change]:
    """Enough to do for the Hopper kernels, whose programs draw their work from a counter."""
    return prefill_causal(16, 1500)


@case
def decode() -> tuple[Call, Change]:
    """One query, other lengths each time: a row may be empty."""
    q, k, v = randn(4, 8, 1, 128), randn(4, 2, 2000, 128), randn(4, 2, 2000, 128)
    counts = torch.zeros(4, dtype=torch.int32, device="cuda")

    def change() -> tuple[Any, ...]:
        renew(q, k, v)
        lengths(counts, 0, 2000)
        return q, k, v, counts

    return lambda q, k, v, n: tilewise.attention(q, k, v, kv_lengths=n, causal=True), change


@case
def decode_int4() -> tuple[Call, Change]:
    """Quantised: bytes and scales new."""
    q = randn(2, 8, 1, 128)
    parts = [Quantised.from_float(randn(2, 2, 700, 128), "int4", 64) for _ in range(2)]

    def change() -> tuple[Any, ...]:
        renew(q)
        for part in parts:
            fresh = Quantised.from_float(randn(2, 2, 700, 128), "int4", 64)
            part.data.copy_(fresh.data)
            part.scales.copy_(fresh.scales)
        return q, *(x for part in parts for x in (part.data, part.scales))

    def call(q: Any, k: Any, k_scales: Any, v: Any, v_scales: Any) -> torch.Tensor:
        return tilewise.attention(q, Quantised(k, k_scales, "int4", 64), Quantised(v, v_scales, "int4", 64))

    return call, change


@case
def paged() -> tuple[Call, Change]:
    """Pages dealt out anew, other lengths."""
    q, pages = randn(4, 8, 1, 128), randn(2, 256, 16, 2, 128)
    table = torch.zeros(4, 60, dtype=torch.int32, device="cuda")
    counts = torch.zeros(4, dtype=torch.int32, device="cuda")

    def change() -> tuple[Any, ...]:
        renew(q, pages)
        table.copy_(torch.randperm(256)[:240].view(4, 60))
        lengths(counts, 1, 960)
        return q, pages[0], pages[1], table, counts

    return tilewise.paged_attention, change


def paged_quantised(kind: str, group: int, page: int) -> tuple[Call, Change]:
    """Pages of a quantised cache dealt out anew, other lengths; bytes and scales new."""
    q = randn(4, 8, 1, 128)
    parts = [Quantised.from_float(randn(64, page, 2, 128), kind, group) for _ in range(2)]
    table = torch.zeros(4, 16, dtype=torch.int32, device="cuda")
    counts = torch.zeros(4, dtype=torch.int32, device="cuda")

    def change() -> tuple[Any, ...]:
        renew(q)
        for part in parts:
            fresh = Quantised.from_float(randn(64, page, 2, 128), kind, group)
            part.data.copy_(fresh.data)
            part.scales.copy_(fresh.scales)
        table.copy_(torch.randperm(64).view(4, 16))
        lengths(counts, 1, 16 * page)
        return q, *(x for part in parts for x in (part.data, part.scales)), table, counts

    def call(q: Any, k: Any, k_scales: Any, v: Any, v_scales: Any, table: Any, counts: Any) -> torch.Tensor:
        k, v = Quantised(k, k_scales, kind, group), Quantised(v, v_scales, kind, group)
        return tilewise.paged_attention(q, k, v, table, counts)

    return call, change


for page in (16, 128):
    for kind in ("fp8_e4m3", "int8", "int4"):
        for group in (32, 64, 128):
            CASES[f"pages of {page}, {kind} of {group}"] = partial(paged_quantised, kind, group, page)


@case
def cache() -> tuple[Call, Change]:
    """What `PagedKVCache.attend` does in a step, on the cache's own pages; a step appends, forks and frees."""
    cache = PagedKVCache(400, 16, 2, 128, BF16, device="cuda")
    ids = [cache.create() for _ in range(4)]
    cache.append(ids, randn(4, 2, 100, 128), randn(4, 2, 100, 128))
    q = randn(4, 8, 1, 128)
    table = torch.zeros(4, 40, dtype=torch.int32, device="cuda")
    counts = torch.zeros(4, dtype=torch.int32, device="cuda")
    k, v = cache.store.operands(0)

    def change() -> tuple[Any, ...]:
        renew(q)
        cache.free(ids.pop(0))
        ids.append(cache.fork(ids[0]))
        cache.append(ids, randn(4, 2, 20, 128), randn(4, 2, 20, 128))
        batch = cache.view(ids)
        table[:, : batch.block_table.shape[1]].copy_(batch.block_table)
        counts.copy_(batch.context_lens)
        return q, k, v, table, counts

    return tilewise.paged_attention, change


@case
def varlen() -> tuple[Call, Change]:
    """Packed sequences, cut anew; the same longest."""
    q, k, v = randn(600, 4, 64), randn(600, 4, 64), randn(600, 4, 64)
    cu = torch.zeros(7, dtype=torch.int32, device="cuda")

    def change() -> tuple[Any, ...]:
        renew(q, k, v)
        cu[1:].copy_(torch.cat([torch.randperm(599)[:5].sort().values + 1, torch.tensor([600])]))
        return q, k, v, cu

    def call(q: Any, k: Any, v: Any, cu: Any) -> torch.Tensor:
        return tilewise.varlen_attention(q, k, v, cu, cu, max_q=600, max_k=600)

    return call, change


@case
def mask() -> tuple[Call, Change]:
    """A mask whose tiles are classified inside the graph."""
    q, k, v = (randn(1, 4, 500, 64) for _ in range(3))
    seen = torch.zeros(500, 500, dtype=torch.bool, device="cuda")

    def change() -> tuple[Any, ...]:
        renew(q, k, v)
        start = int(torch.randint(0, 400, ()))
        seen.zero_()
        seen[:, start : start + 100] = torch.rand(500, 100, device="cuda") < 0.5
        return q, k, v, seen

    return lambda q, k, v, seen: tilewise.attention(q, k, v, mask=seen), change


def check(name: str, compiled: bool) -> str:
    """Captures one case and replays it; what is wrong, or nothing."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    call, change = CASES[name]()
    given = change()
    if compiled:
        counters.clear()
        run = torch.compile(call, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):  # compiled, warmed up, captured
            torch.compiler.cudagraph_mark_step_begin()
            run(*given)
        if counters["inductor"]["cudagraph_skips"]:
            return "run without a graph"
    else:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(*given)
    for turn in range(5):
        given = change()
        want = call(*given)
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
            got = run(*given)
        else:
            captured.fill_(torch.nan)
            graph.replay()
            got = captured
        if not torch.equal(got, want):
            return f"turn {turn}: off by {(got.float() - want.float()).abs().max():.3g}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name holds it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with torch.no_grad():
        for name in CASES:
            if options.only not in name:
                continue
            for compiled in (False, True):
                start = time.perf_counter()
                try:
                    wrong = check(name, compiled)
                except Exception as error:
                    wrong = f"{type(error).__name__}: {str(error)[:300]}"
                how = "torch.compile" if compiled else "torch.cuda.graph"
                results.append({"case": name, "by": how, "wrong": wrong, "seconds": time.perf_counter() - start})
                print(f"{name:28} {how:17} {wrong or 'equal'}", flush=True)
    if options.json:
        data = {
            "device": torch.cuda.get_device_name().removeprefix("NVIDIA "),
            "torch": torch.__version__,
            "results": results,
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    raise SystemExit(any(r["wrong"] for r in results))


if __name__ == "__main__":
    main()
