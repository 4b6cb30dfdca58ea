"""One query over a cache: plain, in pages, quantised; in CUDA graphs over caches that do not fit in L2.

And what an eager call costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from timing import Way, Work, randn
from torch.nn.attention import SDPBackend
from ways import pages, sdpa

import tilewise
from tilewise.core.options import Options
from tilewise.dispatch import planner
from tilewise.validation import calls


def decode() -> Iterator[Work]:
    for D, H, Hkv, B, L in (
        (128, 32, 8, 1, 4096), (128, 32, 8, 1, 32768), (128, 32, 8, 16, 8192), (128, 32, 8, 64, 4096),
        (128, 32, 32, 16, 8192), (64, 32, 8, 32, 16384), (256, 16, 8, 16, 8192), (512, 16, 2, 16, 8192),
    ):  # fmt: skip
        size = 2 * 2 * B * Hkv * L * D
        copies = max(1, min(8, -(-(256 << 20) // size)))
        yield decode_work(D, H, Hkv, B, L, copies, size)


def decode_work(D: int, H: int, Hkv: int, B: int, L: int, copies: int, size: int) -> Work:
    work = Work(f"decode D{D} {H}/{Hkv} {B}x{L // 1024}k", bytes=size, graph=True)
    sets = [(randn(B, H, 1, D), randn(B, Hkv, L, D), randn(B, Hkv, L, D)) for _ in range(copies)]
    ways = work.ways
    ways["tilewise"] = lambda: [lambda s=s: tilewise.attention(*s, backend="triton") for s in sets]
    if D <= 256:
        ways["cudnn"] = lambda: [sdpa(SDPBackend.CUDNN_ATTENTION, *s, enable_gqa=True) for s in sets]
        ways["fa2"] = lambda: [sdpa(SDPBackend.FLASH_ATTENTION, *s, enable_gqa=True) for s in sets]
    for page in (16, 128):
        paged = [(s[0], *pages(s[1], s[2], page)) for s in sets]
        ways[f"paged {page}"] = lambda paged=paged: [
            lambda s=s: tilewise.paged_attention(*s, backend="triton") for s in paged
        ]
    return work


def quantised() -> Iterator[Work]:
    """Quantised caches: the same tokens in fewer bytes."""
    D, H, Hkv, B, L = 128, 32, 8, 32, 8192
    work = Work(f"narrow D{D} {H}/{Hkv} {B}x{L // 1024}k", bytes=2 * 2 * B * Hkv * L * D, graph=True, check=False)
    q, k, v = randn(B, H, 1, D), randn(B, Hkv, L, D), randn(B, Hkv, L, D)
    work.ways["bf16"] = lambda: [lambda: tilewise.attention(q, k, v, backend="triton")]
    for kind, group in (("fp8_e4m3", 128), ("fp8_e4m3", 64), ("int8", 128), ("int4", 128), ("int4", 64)):
        ck, cv = (tilewise.Quantised.from_float(x, kind, group) for x in (k, v))
        work.ways[f"{kind}/{group}"] = lambda ck=ck, cv=cv: [lambda: tilewise.attention(q, ck, cv, backend="triton")]
    yield work


def host_cost(rounds: int = 30) -> dict[str, float]:
    """Microseconds of an eager decode call of 1 x 4k keys: of host time, by calls that do not wait, and with the wait
    for its end. Beside a kernel that does next to nothing: no call is faster.
    """
    q, k, v = randn(1, 32, 1, 128), randn(1, 8, 4096, 128), randn(1, 8, 4096, 128)
    paged = (q, *pages(k, v, 16))
    call = calls.dense(q, k, v, Options())
    plan = planner.choose(call.problem, "triton")
    backend = planner.load("triton")
    one = torch.zeros(1, device="cuda")
    ways: dict[str, Way] = {
        "attention": lambda: tilewise.attention(q, k, v, backend="triton"),
        "paged_attention": lambda: tilewise.paged_attention(*paged, backend="triton"),
        "paged_attention, unchecked": lambda: tilewise.paged_attention(*paged, backend="triton", validate=False),
        "backend run alone": lambda: backend.run(plan, call.tensors),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "one number cleared": lambda: one.zero_(),
    }
    for way in ways.values():
        for _ in range(20):
            way()
    torch.cuda.synchronize()
    free: dict[str, list[float]] = {name: [] for name in ways}
    waited: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            for _ in range(20):
                way()
            free[name].append((time.perf_counter() - start) / 20)
            torch.cuda.synchronize()
            for _ in range(20):
                start = time.perf_counter()
                way()
                torch.cuda.synchronize()
                waited[name].append(time.perf_counter() - start)
    result = {}
    for name in ways:
        result[name] = sorted(free[name])[rounds // 2] * 1e6
        result[f"{name}, with the wait"] = sorted(waited[name])[len(waited[name]) // 2] * 1e6
    return result
