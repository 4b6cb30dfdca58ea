"""Quantised caches in pages and in rows, one query each: every launch checked against float64, timed interleaved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from timing import Way, Work, randn
from ways import bound_way

from tilewise import Quantised
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.triton import tuned
from tilewise.core.options import Options
from tilewise.validation import calls

KINDS = ("bf16", "fp8_e4m3", "int8", "int4")


def in_pages(x: torch.Tensor, page: int, order: torch.Tensor) -> torch.Tensor:
    """Rows [B, Hkv, L, D] in shuffled pages [count, page, Hkv, D]."""
    B, Hkv, L, D = x.shape
    bits = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
    out = torch.empty(B * L // page, page, Hkv, D, device="cuda", dtype=bits.dtype)
    out[order] = bits.transpose(1, 2).reshape(-1, page, Hkv, D)
    return out.view(x.dtype)


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: list[int], length: int) -> torch.Tensor:
    """Attention of some sequences in float64."""
    group = q.shape[1] // k.shape[1]
    kd, vd = (x[rows, :, :length].double().repeat_interleave(group, 1) for x in (k, v))
    s = q[rows].double() @ kd.transpose(2, 3) / q.shape[-1] ** 0.5
    queries = q.shape[2]
    if queries > 1:  # causal
        s += torch.full_like(s, float("-inf")).triu(length - queries + 1)
    return s.softmax(-1) @ vd


def checked(way: Way, want: torch.Tensor, rows: list[int], out: Any = None) -> Way:
    """The way itself, once its result is as near to `want` as bfloat16 allows; its output is filled with NaN first."""
    if out is not None:
        out.fill_(float("nan"))
    got = way()[rows].double()
    error = ((got - want).norm() / want.norm()).item()
    assert error < 4e-3, f"off by {error:.2e}"
    return way


def cache_work(name: str, kind: str, group: int, page: int, shape: tuple[int, ...]) -> Work:
    D, H, Hkv, B, L, *more = shape
    queries = more[0] if more else 1
    size = 2 * B * Hkv * L * (2 * D if kind == "bf16" else D // (2 if kind == "int4" else 1) + 4 * -(-D // group))
    work = Work(name, bytes=size, graph=True, check=False)
    # Where it is only to be compiled, a small cache will do: kernels are the same.
    rows_of, keys = (2, min(L, 4096)) if "SMALL" in os.environ else (B, L)

    def sets() -> list[tuple[Any, ...]]:
        torch.manual_seed(B + L + D)
        made = []
        for _ in range(max(1, min(8, -(-(256 << 20) // size)))):
            q, k, v = randn(rows_of, H, queries, D), randn(rows_of, Hkv, keys, D), randn(rows_of, Hkv, keys, D)
            order = torch.randperm(rows_of * keys // page, device="cuda") if page else None
            table = order.view(rows_of, keys // page).to(torch.int32) if page else None
            stored = [x if kind == "bf16" else Quantised.from_float(x, kind, group) for x in (k, v)]
            wide = [x if kind == "bf16" else x.dequantise(torch.float32) for x in stored]
            rows = sorted({0, rows_of // 2, rows_of - 1})
            want = oracle(q, *wide, rows, keys)
            short = oracle(q, *wide, rows, keys - 21)
            if page:
                stored = [
                    in_pages(x, page, order) if kind == "bf16"
                    else Quantised(in_pages(x.data, page, order), in_pages(x.scales, page, order), kind, group)
                    for x in stored
                ]  # fmt: skip
            made.append((q, *stored, table, want, short, rows))
        return made

    def make() -> list[Way]:
        ways = []
        for q, k, v, table, want, short, rows in sets():
            # The last tile is not whole at first.
            for length, right in ((keys - 21, short), (keys, want)):
                if page:
                    lengths = torch.full((rows_of,), length, dtype=torch.int32, device="cuda")
                    call = calls.paged(q, k, v, table, lengths, Options(causal=queries > 1))
                elif length == keys:
                    call = calls.dense(
                        q, k, v, Options(causal=queries > 1, q_offset=keys - queries if queries > 1 else None)
                    )
                else:
                    continue
                config = tuned.config_of(replace(call.problem, batch=B, kv_len=L), nvidia(90))
                way = checked(bound_way(config, call), right, rows, call.out)
            ways.append(way)
        return ways

    work.ways["tilewise"] = make
    return work


def quantised_pages() -> Iterator[Work]:
    main = (128, 32, 8, 64, 4096)
    for page in (16, 0, 128):
        for kind in KINDS:
            yield cache_work(f"{kind} page {page} 64x4k", kind, 64, page, main)
    yield cache_work("bf16 page 16 16x8k D512", "bf16", 64, 16, (512, 16, 2, 16, 8192))
    yield cache_work("bf16 page 0 16x8k D512", "bf16", 64, 0, (512, 16, 2, 16, 8192))
    yield cache_work("bf16 page 0 16x8k", "bf16", 64, 0, (128, 32, 8, 16, 8192))
    for kind in KINDS[1:]:
        for page in (16, 0):
            for group in (128, 32):
                yield cache_work(f"{kind}/{group} page {page} 64x4k", kind, group, page, main)
    for kind in ("fp8_e4m3", "int4"):
        yield cache_work(f"{kind} page 16 64x4k, 64/8", kind, 64, 16, (128, 64, 8, 64, 4096))
        yield cache_work(f"{kind} page 16 64x4k, 2 queries", kind, 64, 16, (*main, 2))
        yield cache_work(f"{kind} page 0 16x8k D256", kind, 64, 0, (256, 16, 8, 16, 8192))
        yield cache_work(f"{kind} page 0 32x8k D64", kind, 64, 0, (64, 32, 8, 32, 8192))
    sizes = {
        "1x4k": (128, 32, 8, 1, 4096), "1x32k": (128, 32, 8, 1, 32768), "16x8k": (128, 32, 8, 16, 8192),
        "16x8k 32/32": (128, 32, 32, 16, 8192), "32x16k D64": (64, 32, 8, 32, 16384), "1x4k D64": (64, 32, 8, 1, 4096),
        "1x32k D64": (64, 32, 8, 1, 32768), "16x8k D256": (256, 16, 8, 16, 8192),
    }  # fmt: skip
    for kind in ("bf16", "fp8_e4m3", "int4"):
        for name, size in sizes.items():
            yield cache_work(f"{kind} page 16 {name}", kind, 64, 16, size)
