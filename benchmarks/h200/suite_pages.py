"""Quantised caches in pages and in rows, one query each: every launch checked against float64, timed interleaved."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from timing import Way, Work, randn
from ways import bound_way

from tilewise import Quantised
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.triton import config, tuned
from tilewise.backends.triton.spec import Config
from tilewise.core.options import Options
from tilewise.validation import calls

KINDS = ("bf16", "fp8_e4m3", "int8", "int4")
# Rows x keys, warps, stages, splits of launches to try; 8 rows are flipped products. What follows is told in `spec`.
PLAIN = ("16x64 w4 s4 p2 pages", "16x64 w4 s5 p1", "16x64 w4 s5 p2 late")
NARROW = ("8x32 w1 s3 p1", "8x32 w1 s3 p2", "8x32 w1 s3 p2 cut", "8x64 w1 s3 p1", "8x64 w1 s3 p2", "8x64 w1 s4 p1")
INT4 = (*NARROW, "8x64 w1 s2 p1", "8x64 w1 s2 p2", "8x128 w1 s3 p1", "8x64 w1 s3 p3", "8x64 w1 s3 p4")
WIDE = (
    "16x16 w4 s7 p4 late", "16x16 w4 s8 p4 late", "16x16 w4 s10 p4 late", "8x16 w4 s7 p4 late", "8x16 w4 s9 p4 late",
    "8x32 w4 s3 p4 pages", "8x32 w2 s3 p4 pages", "16x32 w4 s3 p4 pages", "8x32 w4 s3 p8 pages", "16x16 w2 s7 p4 late",
    "8x16 w4 s5 p4 tile", "8x16 w2 s5 p4 tile",
)  # fmt: skip
LAUNCHES = {"bf16": PLAIN, "fp8_e4m3": NARROW, "int8": NARROW[:4], "int4": INT4}
BEFORE = {"fp8_e4m3": ("8x32 w1 s3 p1 cut",), "int8": ("8x32 w1 s3 p1 cut",)}
MANY = ("16x32 w1 s3 p1", "16x32 w1 s3 p2", "16x32 w1 s3 p4", "8x32 w1 s3 p1 cut", "8x32 w1 s3 p2 cut")
SPLIT = ("8x32 w1 s3 p4", "8x32 w1 s3 p8", "8x64 w1 s3 p2", "8x64 w1 s3 p4", "8x64 w1 s3 p8")
SHORT = ("8x32 w1 s3 p64", "8x64 w1 s3 p32", "8x64 w1 s3 p64")
SHORT_QUANTISED = ("8x32 w1 s3 p32", "8x32 w1 s3 p64", "8x64 w1 s3 p16", "8x64 w1 s3 p64")
CAUSAL = ("16x32 w1 s3 p2", "16x64 w1 s3 p1", "16x64 w1 s3 p2")


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
    """How pages are looked up, if the launch says so: a tile ahead ("pages", of one page "tile"), in the pipeline
    ("late"), or row by row ("rows").
    """
    one = "tile" if "x16 " in shape else "pages"
    words = {"pages": ("pages", True), "tile": (one, True), "late": (one, False), "rows": ("rows", False)}
    found = words.get(shape.split()[-1])
    return {} if found is None else dict(zip(("lookup", "prefetch"), found, strict=True))


@contextmanager
def ways_of(shape: str) -> Iterator[None]:
    """With "cut", a launch's scale groups are multiplied one after the other and not beside one another."""
    kept = config.row_groups
    if shape.endswith("cut"):
        config.row_groups = lambda problem, c: 1
    try:
        yield
    finally:
        config.row_groups = kept


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
                    call = calls.paged(q, k, v, table, lengths, Options(causal=queries > 1))
                elif length == keys:
                    call = calls.dense(
                        q, k, v, Options(causal=queries > 1, q_offset=keys - queries if queries > 1 else None)
                    )
                else:
                    continue
                own = c or tuned.config_of(replace(call.problem, batch=B, kv_len=L), nvidia(90))
                way = checked(bound_way(own, call, **how), right, rows, call.out)
            ways.append(way)
        return ways

    def made(text: str) -> list[Way]:
        with ways_of(text):
            return make(launch(text, H // Hkv), **spec(text))

    work.ways["tilewise"] = lambda: make(None)
    for text in tried:
        work.ways[text] = lambda text=text: made(text)
    return work


def quantised_pages(sweep: bool) -> Iterator[Work]:
    main = (128, 32, 8, 64, 4096)
    for page in (16, 0, 128):
        for kind in KINDS:
            tried = LAUNCHES[kind] if sweep and (page == 16 or kind != "bf16") else BEFORE.get(kind, ())
            yield cache_work(f"{kind} page {page} 64x4k", kind, 64, page, main, tried)
    many, split, short, wide, causal = (x if sweep else () for x in (MANY, SPLIT, SHORT, WIDE, CAUSAL))
    yield cache_work("bf16 page 16 16x8k D512", "bf16", 64, 16, (512, 16, 2, 16, 8192), wide)
    yield cache_work("bf16 page 0 16x8k D512", "bf16", 64, 0, (512, 16, 2, 16, 8192), ())
    yield cache_work("bf16 page 0 16x8k", "bf16", 64, 0, (128, 32, 8, 16, 8192), ())
    for kind in KINDS[1:]:
        for page in (16, 0):
            tried = (*NARROW[:2], *INT4[3:8]) if sweep else ()
            yield cache_work(f"{kind}/128 page {page} 64x4k", kind, 128, page, main, tried)
            yield cache_work(f"{kind}/32 page {page} 64x4k", kind, 32, page, main, many)
    for kind in ("fp8_e4m3", "int4"):
        yield cache_work(f"{kind} page 16 64x4k, 64/8", kind, 64, 16, (128, 64, 8, 64, 4096), many)
        yield cache_work(f"{kind} page 16 64x4k, 2 queries", kind, 64, 16, (*main, 2), causal)
        yield cache_work(f"{kind} page 0 16x8k D256", kind, 64, 0, (256, 16, 8, 16, 8192), split)
        yield cache_work(f"{kind} page 0 32x8k D64", kind, 64, 0, (64, 32, 8, 32, 8192), (*split, "16x128 w4 s3 p1"))
    for kind in ("bf16", "fp8_e4m3", "int4"):
        some = () if kind == "bf16" else split
        yield cache_work(f"{kind} page 16 1x4k", kind, 64, 16, (128, 32, 8, 1, 4096), ())
        yield cache_work(f"{kind} page 16 1x32k", kind, 64, 16, (128, 32, 8, 1, 32768), short if some else ())
        yield cache_work(f"{kind} page 16 16x8k", kind, 64, 16, (128, 32, 8, 16, 8192), some)
        yield cache_work(f"{kind} page 16 16x8k 32/32", kind, 64, 16, (128, 32, 32, 16, 8192), some[2:4])
        yield cache_work(f"{kind} page 16 32x16k D64", kind, 64, 16, (64, 32, 8, 32, 16384), some)
        yield cache_work(f"{kind} page 16 1x4k D64", kind, 64, 16, (64, 32, 8, 1, 4096), some and SHORT_QUANTISED)
        yield cache_work(f"{kind} page 16 1x32k D64", kind, 64, 16, (64, 32, 8, 1, 32768), some and SHORT_QUANTISED)
        yield cache_work(f"{kind} page 16 16x8k D256", kind, 64, 16, (256, 16, 8, 16, 8192), some)
