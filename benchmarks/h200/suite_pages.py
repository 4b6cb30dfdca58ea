"""Quantised caches in pages and in rows, one query each: every launch checked against float64, then timed in turns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from timing import Way, Work, randn
from ways import bound_way

from tilewise import Quantised, checks
from tilewise.backends.triton import tuned
from tilewise.backends.triton.spec import Config
from tilewise.options import Options

KINDS = ("bf16", "fp8_e4m3", "int8", "int4")
# Rows x keys, warps, stages, splits of launches to try; 8 rows are flipped products.
PLAIN = (
    "16x64 w4 s5 p1", "16x64 w4 s4 p2 pages", "16x64 w4 s3 p2 pages", "16x64 w4 s3 p1 pages", "16x128 w4 s3 p1 pages",
    "16x64 w4 s5 p1 late", "16x64 w4 s5 p2 late", "16x64 w4 s5 p2",
)  # fmt: skip
NARROW = (
    "16x128 w4 s3 p1", "16x128 w4 s3 p2", "16x32 w1 s3 p2", "8x32 w1 s3 p1", "8x32 w1 s3 p2", "8x32 w1 s3 p4",
    "8x32 w1 s4 p2",
)  # fmt: skip
LAUNCHES = {
    "bf16": PLAIN,
    "fp8_e4m3": NARROW,
    "int8": NARROW[:5],
    "int4": (*NARROW, "16x256 w4 s3 p1", "8x64 w1 s3 p2"),
}
ONE_WARP = ("8x32 w1 s3 p1", "8x32 w1 s3 p2", "8x32 w1 s3 p4", "8x32 w1 s3 p8", "16x128 w4 s3 p1")
SHORT = ("8x32 w1 s3 p32", "8x32 w1 s3 p64", "8x32 w1 s3 p128")
CAUSAL = ("16x32 w1 s3 p1", "16x32 w1 s3 p2", "16x64 w4 s3 p1", "16x64 w4 s5 p1 rows", "16x128 w4 s3 p1")


def launch(shape: str, pack: int) -> Config:
    rows, warps, stages, splits, *_ = shape.split()
    BM, BK = (int(n) for n in rows.split("x"))
    return Config(BM, BK, int(warps[1:]), int(stages[1:]), pack, splits=int(splits[1:]))


def in_pages(x: torch.Tensor, page: int, order: torch.Tensor) -> torch.Tensor:
    """Rows [B, Hkv, L, D] in shuffled pages [count, page, Hkv, D]."""
    B, Hkv, L, D = x.shape
    bits = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
    out = torch.empty(B * L // page, page, Hkv, D, device="cuda", dtype=bits.dtype)
    out[order] = bits.transpose(1, 2).reshape(-1, page, Hkv, D)
    return out.view(x.dtype)


def spec(shape: str) -> dict[str, Any]:
    """How pages are looked up, if the launch says so: "pages" a tile ahead, "late" in the pipeline, or row by row."""
    words = {"pages": ("pages", True), "late": ("pages", False), "rows": ("rows", False)}
    found = words.get(shape.split()[-1])
    return {} if found is None else dict(zip(("lookup", "ahead"), found, strict=True))


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


def cache_work(name: str, kind: str, group: int, page: int, shape: tuple[int, ...], tried: Sequence[str]) -> Work:
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

    kept: list[Any] = []

    def make(c: Config | None, **how: Any) -> list[Way]:
        if not kept:
            kept.extend(sets())
        ways = []
        for q, k, v, table, want, short, rows in kept:
            # The last tile is not whole at first.
            for length, right in ((keys - 21, short), (keys, want)):
                if page:
                    lengths = torch.full((rows_of,), length, dtype=torch.int32, device="cuda")
                    call = checks.paged(q, k, v, table, lengths, None, None, Options(causal=queries > 1))
                elif length == keys:
                    call = checks.dense(
                        q, k, v, Options(causal=queries > 1, q_offset=keys - queries if queries > 1 else None)
                    )
                else:
                    continue
                own = c or tuned.config(replace(call.problem, batch=B, kv_len=L), 132, 90)
                way = checked(bound_way(own, call, **how), right, rows, call.out)
            ways.append(way)
        return ways

    work.ways["tilewise"] = lambda: make(None)
    for text in tried:
        work.ways[text] = lambda text=text: make(launch(text, H // Hkv), **spec(text))
    return work


def narrow_pages(sweep: bool) -> Iterator[Work]:
    main = (128, 32, 8, 64, 4096)
    for page in (16, 0, 128):
        for kind in KINDS:
            tried = LAUNCHES[kind] if sweep and (page == 16 or kind != "bf16") else ()
            yield cache_work(f"{kind} page {page} 64x4k", kind, 64, page, main, tried)
    one, plain, short, causal = (x if sweep else () for x in (ONE_WARP, PLAIN[:5], SHORT, CAUSAL))
    for kind in ("fp8_e4m3", "int8", "int4"):
        for page in (16, 0):
            yield cache_work(f"{kind}/128 page {page} 64x4k", kind, 128, page, main, one[1::3])
    for kind in ("fp8_e4m3", "int4"):
        yield cache_work(f"{kind} page 16 64x4k, 2 queries", kind, 64, 16, (*main, 2), causal)
        yield cache_work(f"{kind} page 0 64x4k, 2 queries", kind, 64, 0, (*main, 2), (*causal[:2], *causal[-1:]))
        yield cache_work(f"{kind} page 0 32x8k D64", kind, 64, 0, (64, 32, 8, 32, 8192), one)
        yield cache_work(f"{kind} page 0 16x8k D256", kind, 64, 0, (256, 16, 8, 16, 8192), one[:4])
    for kind in ("bf16", "fp8_e4m3", "int4"):
        some = plain if kind == "bf16" else one[:4]
        yield cache_work(f"{kind} page 16 1x4k", kind, 64, 16, (128, 32, 8, 1, 4096), ())
        yield cache_work(f"{kind} page 16 1x32k", kind, 64, 16, (128, 32, 8, 1, 32768), short)
        yield cache_work(f"{kind} page 16 16x8k", kind, 64, 16, (128, 32, 8, 16, 8192), some)
        yield cache_work(f"{kind} page 16 16x8k 32/32", kind, 64, 16, (128, 32, 32, 16, 8192), some)
        yield cache_work(f"{kind} page 16 32x16k D64", kind, 64, 16, (64, 32, 8, 32, 16384), some)
        yield cache_work(f"{kind} page 16 16x8k D256", kind, 64, 16, (256, 16, 8, 16, 8192), some)
