"""What this machine allows, beside what the CPU kernels reach: the limits that LOG.md speaks of.

    python benchmarks/cpu/limits.py --json benchmarks/records/cpu/limits.json

reading     a cache of 8k keys (32/8 heads, D 128) that stays in the last-level cache: sums over as many bytes by the
            same threads, and decode
pages       decode of pages of 16, shuffled, beside the same rows in a row (4 x 8192 keys, 32/8 heads, D 128)
narrow      decode of int8 and int4 caches beside float16, 8k keys
products    a float32 matmul by the same threads, and prefill at D 512 and D 32
tiles       float32 scores as six products of bf16 parts by matrix tiles, and by vectors, in one thread, many times: the
            speed of tiles depends on what else the physical core does, which shows as a wide spread here
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numba import njit

from tilewise import Quantised, attention, paged_attention
from tilewise.backends.cpu.codegen.vector import Emit, Value, microkernel
from tilewise.backends.cpu.gemm import amx
from tilewise.backends.cpu.gemm.fp32 import KEYS, PANEL, gemm_keys_all
from tilewise.core.storage import QuantDtype
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.measure import interleaved
from tilewise.tools.bench.report import write_json

KEYS_OF_TILE = 96
SIX = [(2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0)]  # of nine products of three parts, those that float32 can hold


def reading(budget: float) -> dict[str, float]:
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k, v = (torch.randn(1, heads, n, 128).to(dtype) for heads, n in ((32, 1), (8, 8192), (8, 8192)))
        size = k.nbytes + v.nbytes
        buffer = torch.ones(size // 4)
        calls: list[Callable[[], object]] = [
            lambda q=q, k=k, v=v: attention(q, k, v),
            lambda buffer=buffer: buffer.sum(),
        ]
        ours, sums = interleaved(calls, budget)
        name = str(dtype).removeprefix("torch.")
        found |= {f"{name} decode GB/s": size / ours.seconds / 1e9, f"{name} sum GB/s": size / sums.seconds / 1e9}
        found[f"{name} share"] = sums.seconds / ours.seconds
    return found


def pages(budget: float) -> dict[str, float]:
    found = {}
    count = 4 * 8192 // 16
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k, v = torch.randn(4, 32, 1, 128).to(dtype), *(torch.randn(count, 16, 8, 128).to(dtype) for _ in range(2))
        table = torch.randperm(count).int().view(4, -1)
        lengths = torch.full((4,), 8192, dtype=torch.int32)
        rows = [x[table.long()].flatten(1, 2).transpose(1, 2).contiguous() for x in (k, v)]
        calls: list[Callable[[], object]] = [
            partial(paged_attention, q, k, v, table, lengths),
            partial(attention, q, *rows),
        ]
        paged, in_a_row = interleaved(calls, budget)
        name = str(dtype).removeprefix("torch.")
        found |= {f"{name} paged ms": 1e3 * paged.seconds, f"{name} in a row ms": 1e3 * in_a_row.seconds}
        found[f"{name} share"] = in_a_row.seconds / paged.seconds
    return found


def narrow(budget: float) -> dict[str, float]:
    found = {}
    q, k, v = torch.randn(1, 32, 1, 128).half(), *torch.randn(2, 1, 8, 8192, 128).half()
    kinds: tuple[QuantDtype, ...] = ("int8", "int4")
    for kind in kinds:
        packed = [Quantised.from_float(x, kind) for x in (k, v)]
        calls: list[Callable[[], object]] = [partial(attention, q, *packed), partial(attention, q, k, v)]
        ours, wide = interleaved(calls, budget)
        found |= {f"{kind} ms": 1e3 * ours.seconds, f"{kind} float16 ms": 1e3 * wide.seconds}
        found[f"{kind} speed of float16"] = wide.seconds / ours.seconds
    return found


def products(budget: float) -> dict[str, float]:
    square = torch.ones(1536, 1536)
    found = {}
    for head_dim, length in ((512, 1024), (32, 512)):
        x = torch.randn(1, 8, length, head_dim)
        ours, matmul = interleaved([lambda x=x: attention(x, x, x), lambda: square @ square], budget)
        speed, most = 4 * 8 * length**2 * head_dim / ours.seconds / 1e9, 2 * 1536**3 / matmul.seconds / 1e9
        found |= {
            f"D {head_dim} GFLOP/s": speed,
            f"D {head_dim} matmul GFLOP/s": most,
            f"D {head_dim} share": speed / most,
        }
    return found


@microkernel("iiiiii")
def scores_by_tiles(e: Emit, k: Value, k_part: Value, q: Value, q_part: Value, s: Value, steps: Value) -> None:
    for tile in range(4):
        amx._tile(e, "tilezero", tile)
    amx.multiply(e, SIX, k, k_part, q, q_part, steps, amx.nothing)
    for tile in range(4):
        corner = tile // 2 * 16 * 4 * PANEL + tile % 2 * 64
        amx._tile(e, "tilestored64", tile, amx._at(e, s, corner), e.i64(4 * PANEL))


@njit(nogil=True)
def by_tiles(configuration, k, q, s, head_dim, panels, times):
    amx.load_tile_config(configuration)
    steps = head_dim // 32
    for _ in range(times):
        for half in range(2 * panels):
            for j in range(KEYS_OF_TILE // 32):
                at = s + j * 32 * 4 * PANEL + half % 2 * 128
                scores_by_tiles(k + j * steps * 2048, 2 * KEYS_OF_TILE * head_dim, q + half * steps * 2048,
                                2 * PANEL * panels * head_dim, at, steps)  # fmt: skip
    amx.release()


@njit(nogil=True)
def by_vectors(table, q, s, head_dim, panels, times):
    for _ in range(times):
        for panel in range(panels):
            for j in range(0, KEYS_OF_TILE, KEYS):
                gemm_keys_all(table + 8 * j, 0, q + 4 * panel * PANEL * head_dim, s + 4 * j * PANEL, head_dim)


def numbers(count: int, bf16: bool) -> np.ndarray:
    """Normal numbers on a cache line."""
    some = np.random.default_rng(0).standard_normal(count + 64).astype(np.float32)
    if bf16:
        some = (some.view(np.uint32) >> 16).astype(np.uint16)
    return some[-some.ctypes.data % 64 // some.itemsize :][:count]


def tiles(rounds: int) -> dict[str, float]:
    if not amx.usable():
        return {}
    head_dim, panels, times = 128, 6, 20
    k, q = numbers(3 * KEYS_OF_TILE * head_dim, True), numbers(3 * PANEL * panels * head_dim, True)
    k32, q32 = numbers(KEYS_OF_TILE * head_dim, False), numbers(PANEL * panels * head_dim, False)
    s = numbers(2 * KEYS_OF_TILE * PANEL, False)
    table = np.array([k32.ctypes.data + 4 * i * head_dim for i in range(KEYS_OF_TILE)])
    flops = 2 * KEYS_OF_TILE * PANEL * panels * head_dim * times / 1e9
    tiles_at = (amx.TILE_CONFIG.ctypes.data, k.ctypes.data, q.ctypes.data, s.ctypes.data)
    vectors_at = (table.ctypes.data, q32.ctypes.data, s.ctypes.data)
    ways = {
        "tiles": lambda: by_tiles(*tiles_at, head_dim, panels, times),
        "vectors": lambda: by_vectors(*vectors_at, head_dim, panels, times),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            call()
            start = time.thread_time()
            call()
            speeds[name].append(flops / (time.thread_time() - start))
        time.sleep(0.01)
    found = {}
    for name, each in speeds.items():
        low, middle, high = np.quantile(each, [0.05, 0.5, 0.95])
        found |= {f"{name} slow GFLOP/s": low, f"{name} median": middle, f"{name} fast": high}
    return {name: float(value) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", type=float, default=3.0, help="seconds for each pair")
    args = parser.parse_args()
    about = describe("python benchmarks/cpu/limits.py --json benchmarks/records/cpu/limits.json")
    with torch.no_grad():
        about |= {part.__name__: part(args.budget) for part in (reading, pages, narrow, products)}
        about["tiles"] = tiles(400)
    for part in ("reading", "pages", "narrow", "products", "tiles"):
        print(part)
        for name, value in about[part].items():
            print(f"  {name:28}{value:10.3g}")
    if args.json:
        write_json(args.json, about)


if __name__ == "__main__":
    main()
