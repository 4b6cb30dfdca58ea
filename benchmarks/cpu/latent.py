"""Absorbed decode of latent attention (one KV head, 576 / 512, V in K) beside what the machine allows, in one run.

    python benchmarks/cpu/latent.py --json benchmarks/records/cpu/latent.json

For each dtype and number of heads, interleaved, the best of several of each: the call; the same with V in a tensor of
its own; a sum over a buffer that no cache holds (the read speed); a matmul of the same dtype. A call can be no faster
than the slower of reading its rows and multiplying them: "of what both allow" is that share. `--threads 1` times one
thread by its own clock (`time.thread_time`), which others disturb little; with more, run it where nothing
else runs. Then rows of 656 bytes, the expanded form (192 / 128) in prefill beside SDPA, and new rows into a cache.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilewise import KVCache, Quantised, attention, plan
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import write_json

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
D, DV, SCALE = 576, 512, 192**-0.5
SQUARE = 768


def best(calls: list[Callable[[], object]], rounds: int, clock: Callable[[], float]) -> list[float]:
    """Seconds of each, interleaved: the least of `rounds`."""
    least = [float("inf")] * len(calls)
    for call in calls:
        call()
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = clock()
            call()
            least[i] = min(least[i], clock() - start)
    return least


def absorbed(name: str, heads: int, keys: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    dtype = DTYPES[name]
    q, k = torch.randn(1, heads, 1, D).to(dtype), torch.randn(1, 1, keys, D).to(dtype)
    v, apart = k[..., :DV], k[..., :DV].contiguous()
    buffer, square = torch.ones(64 << 20, dtype=torch.uint8).view(torch.int64), torch.randn(SQUARE, SQUARE).to(dtype)
    calls: list[Callable[[], object]] = [
        partial(attention, q, k, v, scale=SCALE),
        partial(attention, q, k, apart, scale=SCALE),
        buffer.sum,
        lambda: square @ square,
    ]
    ours, separate, read, matmul = best(calls, rounds, clock)
    read_speed, matmul_speed = buffer.nbytes / read, 2 * SQUARE**3 / matmul
    flops = 2 * heads * keys * (D + DV)
    roof = max(k.nbytes / read_speed, flops / matmul_speed)
    return {
        "dtype": name, "heads": heads, "keys": keys, "kernel": plan(q, k, v).kernel, "us": 1e6 * ours,
        "V apart us": 1e6 * separate, "GB/s": k.nbytes / ours / 1e9, "read GB/s": read_speed / 1e9,
        "GFLOP/s": flops / ours / 1e9, "matmul GFLOP/s": matmul_speed / 1e9, "of read": k.nbytes / ours / read_speed,
        "of matmul": flops / ours / matmul_speed, "of roof": roof / ours,
    }  # fmt: skip


def narrow(heads: int, keys: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Rows of 656 bytes beside those of bf16."""
    q, k = torch.randn(1, heads, 1, D).bfloat16(), torch.randn(1, 1, keys, D)
    wide, stored = k.bfloat16(), Quantised.from_float(k, "fp8_latent", 128)
    inside = Quantised(stored.data[..., :528], None, "fp8_latent", 128)
    calls: list[Callable[[], object]] = [
        partial(attention, q, stored, inside),
        partial(attention, q, wide, wide[..., :DV]),
    ]
    ours, bf16 = best(calls, rounds, clock)
    return {"heads": heads, "backend": plan(q, stored, inside).backend, "us": 1e6 * ours, "bf16 us": 1e6 * bf16}


def expanded(name: str, length: int, heads: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Prefill of the expanded form: what `kv_b_proj` gives, with `k_shared`; keys in one tensor, which holds the
    rope part once for each head, and with the copy that makes it; and torch's SDPA over those.
    """
    dtype = DTYPES[name]
    q, rope = torch.randn(1, heads, length, 192).to(dtype), torch.randn(1, 1, length, 64).to(dtype)
    own, v = torch.randn(1, length, heads, 256).to(dtype).transpose(1, 2).split(128, -1)

    def joined() -> torch.Tensor:
        return torch.cat((own, rope.expand(1, heads, length, 64)), -1)

    k = joined()
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
    calls: list[Callable[[], object]] = [
        partial(attention, q, own, v, k_shared=rope, causal=True),
        partial(attention, q, k, v, causal=True),
        lambda: attention(q, joined(), v, causal=True),
        sdpa,
    ]
    ours, whole, with_copy, theirs = best(calls, rounds, clock)
    flops = heads * length * (length + 1) * (192 + 128)
    return {
        "dtype": name,
        "length": length,
        "heads": heads,
        "ms": 1e3 * ours,
        "k in one tensor ms": 1e3 * whole,
        "with its copy ms": 1e3 * with_copy,
        "SDPA ms": 1e3 * theirs,
        "GFLOP/s": flops / ours / 1e9,
    }


def appending(tokens: int, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """New rows into a latent cache and into one with V apart, us."""
    k = torch.randn(1, 1, tokens, D).bfloat16()
    caches = [KVCache(1, 1, tokens, D, "bf16", latent=DV), KVCache(1, 1, tokens, D, "bf16", value_dim=DV)]

    def append(cache: KVCache) -> None:
        cache.reset()
        cache.append(k, None if cache.latent else k[..., :DV])

    inside, apart = best([partial(append, cache) for cache in caches], rounds, clock)
    return {"tokens": tokens, "latent us": 1e6 * inside, "V apart us": 1e6 * apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    about = describe(
        f"python benchmarks/cpu/latent.py --threads {args.threads} --json benchmarks/records/cpu/latent.json"
    )
    about |= {"threads": args.threads, "load": os.getloadavg()[0]}
    with torch.no_grad():
        about["absorbed"] = []
        for name in DTYPES:
            for heads in HEADS:
                row = absorbed(name, heads, args.keys, args.rounds, clock)
                about["absorbed"].append(row)
                print(
                    f"{name:5}{heads:4} heads {row['us']:9.0f} us (V apart {row['V apart us']:9.0f})  "
                    f"{row['GB/s']:5.1f} GB/s {row['of read']:5.0%} of reading  {row['GFLOP/s']:4.0f} GFLOP/s "
                    f"{row['of matmul']:5.0%} of matmul  {row['of roof']:5.0%} of what both allow",
                    flush=True,
                )
        about["fp8_latent"] = [narrow(heads, args.keys, max(3, args.rounds // 3), clock) for heads in (16, 128)]
        about["expanded"] = [expanded(name, 1024, 16, max(3, args.rounds // 3), clock) for name in DTYPES]
        about["appending"] = appending(2048, args.rounds, clock)
    for part in ("fp8_latent", "expanded", "appending"):
        print(part, about[part])
    if args.json:
        write_json(args.json, about)


if __name__ == "__main__":
    main()
