"""Small calls of every kernel, to be run under a checker of memory accesses and races.

    python benchmarks/h200/sanitize.py  # compiles
    compute-sanitizer --tool memcheck python benchmarks/h200/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/h200/sanitize.py

`--only WORD` runs the cases whose name holds it. Each result is compared with the torch backend's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import tilewise
from tilewise import KVCache, PagedKVCache, Quantised

BF16 = torch.bfloat16
Case = Callable[[str | None], Any]


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def dense(H: int, Hkv: int, Lq: int, Lk: int, D: int, dtype: torch.dtype = BF16, **options: Any) -> Case:
    q, k, v = randn(2, H, Lq, D, dtype=dtype), randn(2, Hkv, Lk, D, dtype=dtype), randn(2, Hkv, Lk, D, dtype=dtype)
    return lambda backend: tilewise.attention(q, k, v, backend=backend, **options)


def quantised(kind: str, group: int, Lq: int = 1, D: int = 128, **options: Any) -> Case:
    q = randn(2, 8, Lq, D)
    k, v = (Quantised.from_float(randn(2, 2, 333, D), kind, group) for _ in range(2))
    return lambda backend: tilewise.attention(q, k, v, backend=backend, **options)


def nonfinite() -> Case:
    """A NaN that half of the rows do not see: the tile is done again."""
    q, k, v = randn(1, 4, 150, 64), randn(1, 4, 150, 64), randn(1, 4, 150, 64)
    v[:, :, 100] = torch.nan
    return lambda backend: tilewise.attention(q, k, v, causal=True, backend=backend)[:, :, :100]


def packed(causal: bool) -> Case:
    lengths = (5, 70, 0, 133)
    q, k, v = randn(sum(lengths), 4, 64), randn(sum(lengths), 4, 64), randn(sum(lengths), 4, 64)
    cu = ints(0, *lengths).cumsum(0).int()
    return lambda backend: tilewise.varlen_attention(q, k, v, cu, cu, causal=causal, backend=backend)


def paged(page: int, D: int, dtype: torch.dtype = BF16) -> Case:
    q = randn(2, 8, 1, D, dtype=dtype)
    k, v = randn(40, page, 2, D, dtype=dtype), randn(40, page, 2, D, dtype=dtype)
    counts = ints(7 * page - 3, 3 * page + 1)
    table = torch.randperm(40, device="cuda")[:14].view(2, 7).int()
    return lambda backend: tilewise.paged_attention(q, k, v, table, counts, backend=backend)


def paged_quantised(kind: str, group: int, page: int, D: int, heads: int = 8, Lq: int = 1, **options: Any) -> Case:
    """A quantised cache in pages; sequences end inside a page, and pages outside of them hold NaN."""
    q = randn(2, heads, Lq, D)
    k, v = (Quantised.from_float(randn(40, page, 2, D), kind, group) for _ in range(2))
    counts = ints(7 * page - 3, 3 * page + 1)
    order = torch.randperm(40, device="cuda")
    for x in (k, v):
        x.scales[order[14:]] = torch.nan
    table = order[:14].view(2, 7).int()
    return lambda backend: tilewise.paged_attention(q, k, v, table, counts, backend=backend, **options)


def masked(dtype: torch.dtype) -> Case:
    q, k, v = (randn(1, 4, 190, 64) for _ in range(3))
    mask = torch.rand(190, 190, device="cuda") < 0.3
    mask[:, 64:128] = False
    if dtype != torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf).to(dtype)
    return lambda backend: tilewise.attention(q, k, v, mask=mask, backend=backend)


def appended(kind: str, ring: bool) -> Case:
    """A cache that is filled in ragged steps, and what it then gives."""
    parts = [randn(2, 2, 2, n, 64) for n in (30, 1, 9)]
    q = randn(2, 4, 1, 64, dtype=torch.float32)

    def run(backend: str | None) -> torch.Tensor:
        if ring:
            cache: Any = KVCache(2, 2, 32, 64, kind, ring=True, device="cuda")
            for k, v in parts:
                cache.append(k, v)
            return cache.attend(q, window=32, backend=backend)
        cache = PagedKVCache(16, 8, 2, 64, kind, device="cuda")
        ids = [cache.create(), cache.create()]
        for k, v in parts:
            cache.append(ids, k, v)
        return cache.attend(ids, q, backend=backend)

    return run


CASES: dict[str, Callable[[], Case]] = {
    "prefill": lambda: dense(4, 2, 150, 170, 128),
    "prefill causal window": lambda: dense(4, 2, 150, 170, 72, causal=True, window=50, softcap=20.0),
    "prefill D512": lambda: dense(2, 2, 140, 140, 512),
    "prefill D512 causal": lambda: dense(2, 2, 140, 140, 512, causal=True),
    "prefill f32": lambda: dense(2, 2, 70, 70, 64, torch.float32, causal=True),
    "non-finite": nonfinite,
    "bool mask": lambda: masked(torch.bool),
    "additive mask": lambda: masked(BF16),
    "packed": lambda: packed(False),
    "packed causal": lambda: packed(True),
    "decode": lambda: dense(8, 2, 1, 1500, 128),
    "decode of 4": lambda: dense(8, 2, 4, 900, 64, causal=True),
    "pages of 16": lambda: paged(16, 128),
    "pages of 128": lambda: paged(128, 128),
    "pages of 16 D512": lambda: paged(16, 512),
    "int4": lambda: quantised("int4", 128),
    "int4 of 64": lambda: quantised("int4", 64),
    "int4 causal": lambda: quantised("int4", 128, Lq=3, causal=True),
    "int8": lambda: quantised("int8", 128),
    "fp8": lambda: quantised("fp8_e4m3", 128),
    **{
        f"pages of {page}, {kind} of {group}, D{D}": partial(paged_quantised, kind, group, page, D)
        for kind in ("fp8_e4m3", "int8", "int4")
        for page, group, D in ((16, 64, 128), (16, 128, 128), (16, 32, 128), (128, 64, 128), (24, 64, 128),
                               (16, 64, 256), (16, 64, 64), (16, 128, 512))
    },
    **{
        f"pages of 16, {kind}, {name}": partial(paged_quantised, kind, 64, 16, 128, **options)
        for kind in ("fp8_e4m3", "int8", "int4")
        for name, options in {
            "16 heads": {"heads": 16}, "2 queries": {"Lq": 2, "causal": True}, "in splits": {"split_size": 32},
        }.items()
    },
    "append int4": lambda: appended("int4", False),
    "append fp8 ring": lambda: appended("fp8_e4m3", True),
    "append bf16": lambda: appended("bf16", False),
}  # fmt: skip


def run(cases: dict[str, Callable[[], Case]], backend: str) -> None:
    """Runs the cases that the command line names, beside the torch backend; ends with status 1 if one differs."""
    parser = argparse.ArgumentParser(description="small calls, to be run under compute-sanitizer")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="the case of this name, or those whose name holds it"
    )
    options = parser.parse_args()
    wrong = 0
    for name, make in cases.items():
        if options.only not in name or (options.only in cases and options.only != name):
            continue
        torch.manual_seed(0)
        call = make()
        want = call("torch").float()
        for _ in range(2):  # through Triton, then by address
            error = (call(backend).float() - want).abs().max().item()
        wrong += not error < 0.03
        print(f"{name:36} {error:.2g}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    run(CASES, "triton")
