"""The caches on the CPU: what a step costs in Python, what a shared prefix saves, how fast tokens are stored.

    python benchmarks/cpu/caches.py --json benchmarks/records/cpu/caches.json

Overhead: append and attend for 64 sequences, as they are and with kernels that do nothing: what is left is Python.
Cascade: a decode step of 32 sequences that share 2048 tokens and have 16 of their own, with and without; interleaved.
Append: 2048 tokens of 8 heads of 128 into each storage, against copying them.
Errors: attention over each storage against float32, on peaked inputs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from tilewise import KVCache, PagedKVCache, attention
from tilewise.backends.cpu import compiler
from tilewise.backends.cpu.threads import pool
from tilewise.dispatch import call_cache
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.measure import interleaved
from tilewise.tools.bench.report import aligned, write_json

STEPS, BLOCK = 400, 50
SHAPES = {"32/32 heads of 128": (32, 32, 128), "12/12 heads of 64": (12, 12, 64), "32/8 heads of 128": (32, 8, 128),
          "9/3 heads of 64": (9, 3, 64)}  # fmt: skip


def overhead(sequences: int = 64) -> list[dict[str, Any]]:
    """Of steps of one token for each sequence, after a pass that makes all plans."""
    k, v = torch.randn(2, sequences, 2, 1, 64)
    q = torch.randn(sequences, 8, 1, 64)

    def run(way: str, clock: Any = time.perf_counter) -> float:
        cache = PagedKVCache(sequences * 40, 16, 2, 64, "f32")
        ids = [cache.create() for _ in range(sequences)]
        tokens = list(range(sequences))
        times = []
        for _ in range(STEPS):
            start = clock()
            if way == "append, attend":
                cache.append(ids, k, v)
                cache.attend(ids, q)
            else:
                batch = cache.extend(ids, tokens=tokens if "ids" in way else None)
                batch.write(k, v)
                batch.attend(q)
            times.append(clock() - start)
        # As in `tilewise.tools.bench`: the best of the medians of blocks, for others may take the cores meanwhile.
        return min(statistics.median(times[i : i + BLOCK]) for i in range(0, STEPS, BLOCK))

    ways = ("extend, write, attend", "extend with token ids, write, attend", "append, attend")
    for way in ways:
        run(way)
    whole = {way: run(way) for way in ways}
    kept = compiler.entry, pool.run_kernel
    compiler.entry, pool.run_kernel = lambda name: _nothing, _nothing
    call_cache.forget()  # cached calls hold on to their kernel
    try:
        # Nothing is left for other threads: the time of this one's own is all of it, whoever else uses the core.
        # Interleaved, the best of five: a shared core makes it up to 1.6 times as long.
        rounds = [{way: run(way, time.thread_time) for way in ways} for _ in range(5)]
        python = {way: min(times[way] for times in rounds) for way in ways}
    finally:
        compiler.entry, pool.run_kernel = kept
        call_cache.forget()
    return [{"way": way, "python_us": python[way] * 1e6, "whole_us": whole[way] * 1e6} for way in ways]


def _nothing(*_: Any) -> None: ...


def cascade(heads: int, kv_heads: int, width: int, dtype: str, sequences: int = 32) -> dict[str, Any]:
    prefix, own = 2048, 16
    cache = PagedKVCache((prefix + sequences * (own + 16)) // 16 + sequences, 16, kv_heads, width, dtype)
    root = cache.create()
    cache.append(root, *torch.randn(2, prefix, kv_heads, width))
    ids = [cache.fork(root) for _ in range(sequences)]
    cache.append(ids, *torch.randn(2, sequences, kv_heads, own, width))
    pages = cache.stats()
    assert pages.used == prefix // 16 + sequences * own // 16, "the prefix is there once"
    q = torch.randn(sequences, heads, 1, width)
    batch = cache.view(ids)
    apart, together = batch.attend(q, cascade=False), batch.attend(q)
    error = (apart - together).abs().max().item()
    assert error < 1e-4, error
    without, with_it = interleaved([lambda: batch.attend(q, cascade=False), lambda: batch.attend(q)], 8.0)
    return {
        "dtype": dtype, "sequences": sequences, "prefix": prefix, "own": own, "pages_used": pages.used,
        "pages_shared": pages.shared, "chosen": bool(batch.shared_prefixes(heads)), "ms_without": without.seconds * 1e3,
        "ms_with": with_it.seconds * 1e3, "ratio": without.seconds / with_it.seconds,
        "spread": [without.spread, with_it.spread], "difference": error,
    }  # fmt: skip


def appending(dtype: str) -> dict[str, Any]:
    tokens = 2048
    k, v = torch.randn(2, tokens, 8, 128)
    cache = PagedKVCache(tokens // 16, 16, 8, 128, dtype)
    sequence, copy = cache.create(), torch.empty(2, tokens, 8, 128)

    def store() -> None:
        cache.truncate(sequence, 0)
        cache.append(sequence, k, v)

    ours, peer = interleaved([store, lambda: (copy[0].copy_(k), copy[1].copy_(v))], 3.0)
    read = 2 * k.nbytes
    return {
        "dtype": dtype, "bytes_per_token": cache.bytes_per_token, "ms": ours.seconds * 1e3,
        "gb_per_s_read": read / ours.seconds / 1e9, "copy_ms": peer.seconds * 1e3, "ratio": peer.seconds / ours.seconds,
    }  # fmt: skip


def errors(dtype: str, group: int, rotate: bool, outlier: float) -> dict[str, Any]:
    """Of attention over a stored cache against float32, relative to the output's size; scores have a spread of 3.

    With `outlier`, three of 128 elements of every key are that many times as large, as in real models.
    """
    g = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(1, heads, 1024, 128, generator=g) for heads in (4, 4, 16))
    k[..., [3, 40, 77]] *= outlier
    q *= 3 / (q @ k.repeat_interleave(4, 1).transpose(2, 3) / 128**0.5).std()
    exact = attention(q, k, v, causal=True)
    cache = KVCache(1, 4, 1024, 128, dtype, group=group, rotate=rotate)
    cache.append(k, v)
    error = (cache.attend(q) - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    return {"dtype": dtype, "group": group, "rotate": rotate, "outlier": outlier, "error": error.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    data: dict[str, Any] = describe("python benchmarks/cpu/caches.py")
    data["overhead"] = overhead()
    lines = [["a step of 64 sequences", "Python", "in all"]]
    lines += [[r["way"], f"{r['python_us']:.0f} us", f"{r['whole_us']:.0f} us"] for r in data["overhead"]]
    print("\n".join(aligned(lines)), end="\n\n", flush=True)
    data["cascade"] = []
    lines = [["32 sequences share 2048 tokens", "storage", "without", "with", "ratio"]]
    for name, shape in SHAPES.items():
        for dtype in ("f32", "int8"):
            r = cascade(*shape, dtype)
            data["cascade"].append({"shape": name, **r})
            lines.append([name, dtype, f"{r['ms_without']:.2f} ms", f"{r['ms_with']:.2f} ms", f"{r['ratio']:.2f}x"])
    print("\n".join(aligned(lines)), end="\n\n", flush=True)
    data["append"] = [appending(dtype) for dtype in ("f32", "f16", "fp8_e4m3", "int8", "int4")]
    lines = [["2048 tokens of float32 into", "B/token", "time", "read", "copying them"]]
    for r in data["append"]:
        speed = f"{r['gb_per_s_read']:.1f} GB/s"
        lines.append([r["dtype"], str(r["bytes_per_token"]), f"{r['ms']:.2f} ms", speed, f"{r['copy_ms']:.2f} ms"])
    print("\n".join(aligned(lines)))
    kinds = [("f16", 64, False), ("bf16", 64, False), ("fp8_e4m3", 64, False), ("int8", 64, False), ("int8", 32, False)]
    kinds += [("int4", group, rotate) for group in (128, 64, 32) for rotate in (False, True)]
    data["errors"] = [errors(*kind, outlier) for kind in kinds for outlier in (1.0, 20.0)]
    lines = [["relative error of attention", "group", "rotated", "even keys", "three large elements"]]
    for (dtype, group, rotate), even, odd in zip(kinds, data["errors"][::2], data["errors"][1::2], strict=True):
        name = [dtype, str(group) if dtype[-1] != "6" else "", "yes" * rotate]
        lines.append([*name, f"{even['error']:.2%}", f"{odd['error']:.2%}"])
    print("\n" + "\n".join(aligned(lines)))
    if options.json:
        write_json(options.json, data)


if __name__ == "__main__":
    main()
