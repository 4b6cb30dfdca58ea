"""Kernels in torch's own threads, in threads of tilewise's, and SDPA: interleaved, float32.

    python benchmarks/cpu/threads.py --json benchmarks/records/cpu/threads.json

Each call is timed alone and right after a product of torch, as it comes in a model: torch's threads wait for the next
product for a while, and hold the cores meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tilewise import attention
from tilewise.backends.cpu.threads import pool
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import aligned, write_json

# B, heads, KV heads, queries, keys, head dim
SHAPES = {
    "12 heads of 32, L 512": (1, 12, 12, 512, 512, 32),
    "8 heads of 64, L 512": (1, 8, 8, 512, 512, 64),
    "8 heads of 128, L 512": (1, 8, 8, 512, 512, 128),
    "8 x 12 heads of 32, L 64": (8, 12, 12, 64, 64, 32),
    "9/3 heads of 64, L 1500": (1, 9, 3, 1500, 1500, 64),
    "decode 9/3 heads of 64, 1500 keys": (1, 9, 3, 1, 1500, 64),
    "decode 32/8 heads of 128, 8192 keys": (1, 32, 8, 1, 8192, 128),
}
ROUNDS = 60
WAYS = ("torch's threads", "own threads", "SDPA")


def measure(B: int, H: int, Hkv: int, Lq: int, Lk: int, D: int, after_a_product: bool) -> dict[str, float]:
    """Median microseconds of each way."""
    q, k, v = torch.randn(B, H, Lq, D), torch.randn(B, Hkv, Lk, D), torch.randn(B, Hkv, Lk, D)
    matrix, parallel = torch.randn(600, 600), pool.parallel
    assert parallel is not None, "there is no GNU OpenMP here"
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    results: dict[str, Any] = {}
    for _ in range(ROUNDS):
        for way in WAYS:
            pool.parallel = None if way == "own threads" else parallel
            for _ in range(2):  # the second is timed: it comes after one of its own kind
                if after_a_product:
                    matrix @ matrix
                start = time.perf_counter()
                if way == "SDPA":
                    results[way] = scaled_dot_product_attention(q, k, v, enable_gqa=Hkv != H)
                else:
                    results[way] = attention(q, k, v)
                end = time.perf_counter()
            times[way].append(end - start)
    pool.parallel = parallel
    assert results["own threads"].equal(results["torch's threads"])
    return {way: statistics.median(taken) * 1e6 for way, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, lines = [], [["microseconds", *WAYS, *(f"{way}, after a product" for way in WAYS)]]
    for name, shape in SHAPES.items():
        alone, after = measure(*shape, False), measure(*shape, True)
        rows.append({"shape": name, "alone": alone, "after_a_product": after})
        lines.append([name, *(f"{us:.0f}" for us in (*alone.values(), *after.values()))])
    print("\n".join(aligned(lines)))
    if options.json:
        write_json(options.json, describe("python benchmarks/cpu/threads.py") | {"rows": rows})


if __name__ == "__main__":
    main()
