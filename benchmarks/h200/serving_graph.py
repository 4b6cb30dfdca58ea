"""Decode steps of a paged cache in CUDA graphs: checked against eager ones, then the host's time of both.

    python benchmarks/h200/serving_graph.py --json benchmarks/records/h200/serving_graph.json

1. Steps of `PagedKVCache.static_batch` captured by hand and compiled by `torch.compile(mode="reduce-overhead")`. As
   sequences grow, join, fork and leave, each replay must give the bits of an eager step over a cache of its own, and
   leave the same bytes in it.
2. A step of 32 layers (64 sequences, 32/8 heads of 128, pages of 16): the host's time until it returns, and the whole
   with the wait, eager and captured. Only what the cache does is in it.
3. Decode in pages of 16 with packed queries and with queries `[B, H, 1, D]`, interleaved, in graphs: one token a
   sequence is planned alike in both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import Work, measure
from torch._dynamo.utils import counters

from tilewise import PagedKVCache, paged_attention, plan

BF16, PAGE = torch.bfloat16, 16
H, HKV, D = 32, 8, 128


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def filled(dtype: str, layers: int, sequences: int, tokens: int, room: int) -> tuple[PagedKVCache, list[int]]:
    """A cache with `room` tokens for each sequence, `tokens` of them there; the same bytes each time."""
    torch.manual_seed(0)
    cache = PagedKVCache(sequences * -(-room // PAGE), PAGE, HKV, D, dtype, layers=layers, device="cuda")
    for x in (cache.store.k.data, cache.store.k.scales, cache.store.v.data, cache.store.v.scales):
        if x is not None:
            x.view(torch.uint8).fill_(255)
    ids = [cache.create() for _ in range(sequences)]
    batch = cache.extend(ids, tokens)
    for layer in range(layers):
        batch.write(randn(sequences, HKV, tokens, D), randn(sequences, HKV, tokens, D), layer)
    return cache, ids


def step(batch: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layers: int) -> torch.Tensor:
    """Layers whose keys are made of what the one before gives, by nothing that rounds."""
    for layer in range(layers):
        batch.write(k, v, layer)
        q = batch.attend(q, layer)
        k = q[:, ::4].contiguous()
    return q


def captured(batch: Any, inputs: list[torch.Tensor], layers: int) -> tuple[Callable[[], Any], torch.Tensor]:
    """A replay, and where its result lies. What the first call needs is there already."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(batch, *inputs, layers)
    return graph.replay, out


def check(dtype: str, compiled: bool, steps: int = 60, layers: int = 3, rows: int = 8) -> str:
    """Replays against eager steps; what is wrong, or nothing."""
    (cache, ids), (other, _) = (filled(dtype, layers, rows, 40, 400) for _ in range(2))
    batches = [x.static_batch(rows, 300) for x in (cache, other)]
    inputs = [randn(rows, n, D) for n in (H, HKV, HKV)]
    run: Any = None
    if compiled:
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(lambda *given: step(batches[0], *given, layers), fullgraph=True, mode="reduce-overhead")
    for n in range(steps):
        if n % 20 == 11:
            for x in (cache, other):
                x.free(ids[0])
            ids = ids[1:]
        if n % 20 == 15:
            new, _ = (x.fork(ids[1]) for x in (cache, other))
            ids = [*ids, new]
        for x in inputs:
            x.normal_()
        for batch in batches:
            batch.extend(ids)
        want = step(batches[1], *inputs, layers)
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
            got = run(*inputs)
        elif n < 2:  # compiled and planned by these, outside of a capture
            got = step(batches[0], *inputs, layers)
        else:
            if run is None:
                run, out = captured(batches[0], inputs, layers)
            out.fill_(torch.nan)
            run()
            got = out
        if not torch.equal(got[: len(ids)], want[: len(ids)]):
            off = (got[: len(ids)].float() - want[: len(ids)].float()).abs().max()
            return f"step {n}: off by {off:.3g}"
        for mine, theirs in ((cache.store.k, other.store.k), (cache.store.v, other.store.v)):
            for a, b in ((mine.data, theirs.data), (mine.scales, theirs.scales)):
                if a is not None and not a.view(torch.uint8).equal(b.view(torch.uint8)):
                    return f"step {n}: other bytes in the cache"
    if compiled and counters["inductor"]["cudagraph_skips"]:
        return "run without a graph"
    if compiled and counters["inductor"]["possibly_missed_reinplacing_opportunities"]:
        return "the cache was copied"
    return ""


def host_times(context: int, layers: int = 32, rows: int = 64, rounds: int = 40) -> dict[str, Any]:
    """Microseconds of a step: until the host is done with it, and with the wait. All ways are interleaved."""
    cache, ids = filled("bf16", layers, rows, context, context + 8 * rounds)
    batch = cache.static_batch(rows, context + 8 * rounds)
    inputs = [randn(rows, n, D) for n in (H, HKV, HKV)]

    def plain() -> None:
        step(cache.extend(ids), *inputs, layers)

    def static() -> None:
        batch.extend(ids)
        step(batch, *inputs, layers)

    for _ in range(3):
        plain()
        static()
    batch.extend(ids)
    replay, _ = captured(batch, inputs, layers)
    replay()

    def graph() -> None:
        batch.extend(ids)
        replay()

    ways = {"eager": plain, "static, eager": static, "graph": graph}
    host: dict[str, list[float]] = {name: [] for name in ways}
    whole: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            way()
            host[name].append(time.perf_counter() - start)
            torch.cuda.synchronize()
            whole[name].append(time.perf_counter() - start)

    def median(taken: dict[str, list[float]]) -> dict[str, float]:
        return {name: sorted(x)[len(x) // 2] * 1e6 for name, x in taken.items()}

    return {"context": context, "layers": layers, "rows": rows, "host_us": median(host), "step_us": median(whole)}


def packed_decode(rows: int, context: int) -> dict[str, Any]:
    """Seconds of the same decode with packed queries and with queries of rank 4."""
    pages = context // PAGE
    k, v = randn(2, rows * pages, PAGE, HKV, D)
    table = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
    lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")
    cu, q = torch.arange(rows + 1, dtype=torch.int32, device="cuda"), randn(rows, H, D)
    packed = {"cu_seqlens_q": cu, "max_q": 1, "causal": True, "validate": False}
    unpacked = {"causal": True, "validate": False}
    work = Work(f"{rows} x {context}", bytes=2.0 * k.nbytes, graph=True, check=True)
    work.ways = {
        "unpacked": lambda: [lambda: paged_attention(q[:, :, None], k, v, table, lengths, **unpacked)],
        "packed": lambda: [lambda: paged_attention(q, k, v, table, lengths, **packed)],
    }
    found = measure(work, 31, 2.0)
    tables = {"block_table": table, "context_lens": lengths}
    plans = [plan(x, k, v, **tables, **o) for x, o in ((q[:, :, None], unpacked), (q, packed))]
    return {"case": work.name, "seconds": found, "plans": [x.summary() for x in plans]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which nothing more is begun")
    options = parser.parse_args()
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name().removeprefix("NVIDIA "),
        "torch": torch.__version__,
    }

    def keep() -> None:
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")

    parts: list[tuple[str, str, Callable[[], Any]]] = []  # what matters most first

    def add(part: str, name: str, call: Callable[[], Any]) -> None:
        parts.append((part, name, call))

    add("checks", "bf16 by torch.cuda.graph", lambda: check("bf16", False))
    add("host", "256", lambda: host_times(256))
    for rows, context in ((64, 1024), (64, 4096)):
        add("packed", f"{rows} x {context}", lambda rows=rows, context=context: packed_decode(rows, context))
    add("checks", "bf16 by torch.compile", lambda: check("bf16", True))
    add("checks", "int8 by torch.cuda.graph", lambda: check("int8", False))
    add("packed", "8 x 4096", lambda: packed_decode(8, 4096))
    add("checks", "fp8_e4m3 by torch.cuda.graph", lambda: check("fp8_e4m3", False))
    add("host", "1024", lambda: host_times(1024))
    add("checks", "int8 by torch.compile", lambda: check("int8", True))
    wrong, begun = False, time.perf_counter()
    with torch.no_grad():
        for part, name, call in parts:
            start = time.perf_counter()
            if start - begun > options.seconds:
                print(f"{part} {name}: left out, the time is up")
                continue
            try:
                found: Any = call()
            except Exception as error:
                found, wrong = f"{type(error).__name__}: {str(error)[-400:]}", True
            wrong |= part == "checks" and bool(found)
            record.setdefault(part, {})[name] = found
            print(f"{part} {name}: {found or 'equal'} ({time.perf_counter() - start:.0f} s)", flush=True)
            keep()
    for name, row in record.get("packed", {}).items():
        if isinstance(row, dict):
            a, b = row["seconds"]["unpacked"], row["seconds"]["packed"]
            print(f"packed {name}: {a * 1e6:.1f} us unpacked, {b * 1e6:.1f} us packed, {a / b:.3f}x")
    for name, row in record.get("host", {}).items():
        if isinstance(row, dict):
            print(f"host, context {name}: " + ", ".join(f"{n} {x:.0f} us" for n, x in row["host_us"].items()))
            print(f"whole, context {name}: " + ", ".join(f"{n} {x:.0f} us" for n, x in row["step_us"].items()))
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
