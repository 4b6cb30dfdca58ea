"""The kernel that appends to caches, on a GPU: its bytes against plain torch, its time, and the caches above it.

    python benchmarks/h200/caches.py --json caches.json

Checks first: every storage type, contiguous, ring and paged, packed and padded, bfloat16 and float32 sources, against
`InTorch` byte for byte; then a paged cache and a cascade against the reference backend. Then times: tokens of a decode
step of 64 sequences and a prompt of 8192 stored, against a copy of as many bytes; whole steps (append, attend); and a
step of sequences that share a prefix, with and without a cascade.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tilewise import KVCache, PagedKVCache, attention
from tilewise.backends.torch.kv_write import Append as InTorch
from tilewise.backends.triton.kv_write import Append
from tilewise.core.kv_store import RowFormat, WriteSlots

DEVICE = torch.device("cuda")
TYPES = ("f32", "f16", "bf16", "fp8_e4m3", "int8", "int4")
WAYS = {"without": False, "with": True}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def check_bytes(share: int, shares: int) -> int:
    """How many combinations of a share store the same bytes as torch; stops at the first that does not."""
    sizes = ((64, 64, 32), (80, 48, 128), (96, 6, 64), (128, 576, 64))
    sources = (torch.float32, torch.bfloat16, torch.float16)
    mine = list(product(TYPES, sources, sizes, (False, True), (False, True)))[share::shares]
    torch.manual_seed(share)
    for dtype, source, (D, Dv, group), paged, packed in mine:
        outer, slots = (9, 3) if paged else (5, 7)
        sides = []
        for _ in range(2):
            formats = (RowFormat.of("dtype", dtype, group, width) for width in (D, Dv))
            stores = [f.empty(outer, 2, slots, device=DEVICE) for f in formats]
            for x in (x for s in stores for x in (s.data, s.scales) if x is not None):
                x.view(torch.uint8).fill_(77)
            sides.append(stores)
        cu = ints(0, 2, 2, 7 if paged else 13, 7 if paged else 13, 10 if paged else 16)
        table = torch.tensor([[8, 1, 0], [2, 2, 2], [0, 3, 4], [1, 1, 5], [6, 7, 0]]).int().to(DEVICE)
        tokens = int(cu[-1])
        shape = (1, 2, tokens) if packed else (5, 2, 11)
        k, v = (torch.randn(*shape, w, device=DEVICE).mul(3).to(source) for w in (D, Dv))
        k[0, 0, 0] = 0
        places = WriteSlots(ints(1, 0, 2, 6, 0), cu, tokens, packed, table if paged else None)
        kernel = Append(*sides[0], slots)
        kernel(k, v, places)
        kernel(k, v, places)  # once more, by addresses
        InTorch(*sides[1], slots)(k, v, places)
        for a, b in zip(*sides, strict=True):
            for x, y in ((a.data, b.data), (a.scales, b.scales)):
                same = x is None or x.view(torch.uint8).equal(y.view(torch.uint8))
                assert same, f"{dtype} from {source}, {D}/{Dv}, group {group}, paged {paged}, packed {packed}"
    return len(mine)


def check_caches(dtype: str) -> dict[str, float]:
    """The largest differences from the reference backend over the same stored rows."""
    torch.manual_seed(0)
    cache = PagedKVCache(256, 16, 4, 128, dtype, device=DEVICE)
    root = cache.create()
    cache.append(root, *torch.randn(2, 500, 4, 128, device=DEVICE, dtype=torch.bfloat16))
    ids = [cache.fork(root) for _ in range(8)]
    for _ in range(20):
        cache.append(ids, *torch.randn(2, 8, 4, 1, 128, device=DEVICE, dtype=torch.bfloat16))
    q = torch.randn(8, 16, 1, 128, device=DEVICE)
    worst = {}
    for name, choice in (("plain", False), ("cascade", True)):
        out = cache.attend(ids, q, cascade=choice)
        worst[f"{dtype} {name}"] = max(
            (out[b].cpu() - attention(q[b : b + 1].cpu(), cache.keys(n)[None].cpu(), cache.values(n)[None].cpu(),
                                      backend="reference")[0]).abs().max().item()
            for b, n in enumerate(ids)
        )  # fmt: skip
    ring = KVCache(2, 4, 64, 128, dtype, ring=True, device=DEVICE)
    for _ in range(30):
        ring.append(*torch.randn(2, 2, 4, 7, 128, device=DEVICE))
        out = ring.attend(q[:2], window=64)
    keys, values = (torch.stack([read(b) for b in range(2)]).cpu() for read in (ring.keys, ring.values))
    want = attention(q[:2].cpu(), keys, values, backend="reference")
    worst[f"{dtype} ring"] = (out.cpu() - want).abs().max().item()
    return worst


def microseconds(call: Any, rounds: int = 200, warm: int = 10) -> float:
    """Of one call on the device, from a full queue, after `warm` others: the card takes milliseconds to speed up."""
    for _ in range(warm):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(rounds):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / rounds


def times() -> list[dict[str, Any]]:
    results = []
    for dtype in TYPES:
        for sequences, tokens in ((64, 1), (1, 8192)):
            cache = PagedKVCache(1024, 16, 8, 128, dtype, device=DEVICE)
            ids = [cache.create() for _ in range(sequences)]
            batch = cache.extend(ids, tokens)
            k, v = torch.randn(2, 1, 8, sequences * tokens, 128, device=DEVICE, dtype=torch.bfloat16)
            places = WriteSlots(batch._starts, batch.cu_seqlens, batch.tokens, True, batch.block_table)
            write, to = cache.store.writer(0), torch.empty_like(k)
            results.append({
                "dtype": dtype, "sequences": sequences, "tokens": tokens,
                "append_us": microseconds(lambda w=write, k=k, v=v, p=places: w(k, v, p)),
                "copy_us": microseconds(lambda k=k, v=v, to=to: (to.copy_(k), to.copy_(v))),
            })  # fmt: skip
    return results


def steps() -> list[dict[str, Any]]:
    """A decode step of 64 sequences, 32/8 heads of 128: one token stored for each, and attended to.

    Its time on the device from a full queue, and what the host takes for it. Beside it attention alone, before any step
    and after 310 of them, when sequences are that much longer; also without the host, in a CUDA graph.
    """
    results = []
    for dtype in TYPES:
        for context in (1024, 4096):
            cache = PagedKVCache(64 * (context // 16 + 64), 16, 8, 128, dtype, device=DEVICE)
            ids = [cache.create() for _ in range(64)]
            for part in range(0, 64, 16):
                k, v = torch.randn(2, 16, 8, context, 128, device=DEVICE, dtype=torch.bfloat16)
                cache.append(ids[part : part + 16], k, v)
            k, v = torch.randn(2, 64, 8, 1, 128, device=DEVICE, dtype=torch.bfloat16)
            q = torch.randn(64, 32, 1, 128, device=DEVICE, dtype=torch.float32 if dtype == "f32" else torch.bfloat16)

            def step(cache: Any = cache, ids: Any = ids, k: Any = k, v: Any = v, q: Any = q) -> None:
                cache.append(ids, k, v)
                cache.attend(ids, q)

            batch = cache.view(ids)
            alone = microseconds(lambda b=batch, q=q: b.attend(q), warm=200)
            graph = microseconds(captured(lambda b=batch, q=q: b.attend(q)))
            whole = microseconds(step)
            host = host_microseconds(step)
            batch = cache.view(ids)
            results.append({
                "dtype": dtype, "context": context, "step_us": whole, "host_us": host, "attend_us": alone,
                "graph_us": graph, "TB_per_s": cache.bytes_per_token * 64 * context / graph / 1e6,
                "context_after": cache.length(ids[0]), "after_us": microseconds(lambda b=batch, q=q: b.attend(q)),
            })  # fmt: skip
    return results


def captured(call: Any) -> Any:
    """Replays a call from a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def host_microseconds(call: Any, rounds: int = 100) -> float:
    """The median of what a call takes before it returns, with nothing queued before it."""
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[rounds // 2] * 1e6


def cascades() -> list[dict[str, Any]]:
    """Sequences that share a prompt and have 64 tokens of their own."""
    results = []
    for heads, kv_heads, prefix, sequences in ((32, 32, 4096, 32), (32, 8, 4096, 32), (32, 8, 16384, 64)):
        cache = PagedKVCache(prefix // 16 + sequences * 8, 16, kv_heads, 128, "bf16", device=DEVICE)
        root = cache.create()
        cache.append(root, *torch.randn(2, prefix, kv_heads, 128, device=DEVICE, dtype=torch.bfloat16))
        ids = [cache.fork(root) for _ in range(sequences)]
        cache.append(ids, *torch.randn(2, sequences, kv_heads, 64, 128, device=DEVICE, dtype=torch.bfloat16))
        q = torch.randn(sequences, heads, 1, 128, device=DEVICE, dtype=torch.bfloat16)
        batch = cache.view(ids)
        calls = {way: (lambda c=c, b=batch, q=q: b.attend(q, cascade=c)) for way, c in WAYS.items()}
        error = (calls["without"]().float() - calls["with"]().float()).abs().max().item()
        assert error < 1e-2, error
        taken = {way: microseconds(call, warm=100) for way, call in calls.items()}
        results.append({
            "heads": heads, "kv_heads": kv_heads, "prefix": prefix, "sequences": sequences, "us": taken,
            "chosen": bool(batch.shared_prefixes(heads)), "ratio": taken["without"] / taken["with"],
            "difference": error,
        })  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    options = parser.parse_args()
    torch.manual_seed(0)
    data: dict[str, Any] = {"device": torch.cuda.get_device_name().removeprefix("NVIDIA ")}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:  # most of the time is compiling
        differences = pool.map(check_caches, TYPES)
        data["combinations"] = sum(pool.map(check_bytes, range(options.jobs), [options.jobs] * options.jobs))
        print(f"{data['combinations']} combinations store the same bytes as torch")
        data["differences"] = {name: x for part in differences for name, x in part.items()}
    print("largest difference from the reference:", max(data["differences"].values()))
    assert max(data["differences"].values()) < 1e-3
    data["times"] = times()
    for r in data["times"]:
        work = f"{r['dtype']:9} {r['sequences']:3} x {r['tokens']:5}"
        print(f"{work}: {r['append_us']:7.1f} us, copy {r['copy_us']:7.1f} us")
    data["steps"] = steps()
    for r in data["steps"]:
        print(f"step of 64, {r['dtype']:9} {r['context']:5}: {r['step_us']:7.1f} us, host {r['host_us']:6.1f},"
              f" attention {r['attend_us']:7.1f} us, in a graph {r['graph_us']:7.1f}, {r['TB_per_s']:.2f} TB/s,"
              f" of {r['context_after']} tokens {r['after_us']:7.1f} us")  # fmt: skip
    data["cascades"] = cascades()
    for r in data["cascades"]:
        work = f"{r['sequences']} sequences share {r['prefix']}, {r['heads']}/{r['kv_heads']}"
        print(f"{work}: {r['us']['without']:7.1f} us, cascade {r['us']['with']:7.1f} us, {r['ratio']:.2f}x")
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
