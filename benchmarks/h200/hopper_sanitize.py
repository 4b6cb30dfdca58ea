"""Small calls of every variant of the Hopper kernels, to be run under a checker of memory accesses and races.

    python benchmarks/h200/hopper_sanitize.py  # compiles
    compute-sanitizer --tool memcheck python benchmarks/h200/hopper_sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/h200/hopper_sanitize.py

`--only WORD` runs the cases whose name holds it. Each result is compared with the torch backend's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sanitize import run

import tilewise

Case = Callable[[str], torch.Tensor]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def dense(H: int, Hkv: int, Lq: int, Lk: int, D: int, Dv: int = 0, dtype: Any = torch.bfloat16, **options: Any) -> Case:
    q, k, v = (randn(1, h, n, d, dtype=dtype) for h, n, d in ((H, Lq, D), (Hkv, Lk, D), (Hkv, Lk, Dv or D)))
    return lambda backend: tilewise.attention(q, k, v, backend=backend, **options)


def many(D: int) -> Case:
    """More tiles than a GPU has processors: counters and rings go round."""
    return dense(72, 72, 200, 200, D, causal=True)


def nonfinite(D: int) -> Case:
    """A NaN that half of the rows do not see: the tile is done again."""
    q, k, v = (randn(1, 2, 150, D) for _ in range(3))
    v[:, :, 100] = torch.nan
    return lambda backend: tilewise.attention(q, k, v, causal=True, backend=backend)[:, :, :100]


def packed() -> Case:
    lengths = (5, 70, 0, 133)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (randn(sum(lengths), 4, 64) for _ in range(3))
    return lambda backend: tilewise.varlen_attention(q, k, v, cu, cu, causal=True, backend=backend)


CASES: dict[str, Callable[[], Case]] = {
    "D64": lambda: dense(4, 2, 150, 170, 64),
    "D64 three consumers": lambda: dense(2, 2, 200, 2100, 64),
    "D64 three consumers causal": lambda: dense(2, 2, 200, 4200, 64, causal=True),
    "D128": lambda: dense(4, 2, 150, 170, 128),
    "D128 f16 causal": lambda: dense(4, 2, 150, 170, 128, dtype=torch.float16, causal=True),
    "D128 window softcap": lambda: dense(4, 2, 150, 170, 128, causal=True, window=50, softcap=20.0),
    "D192/128": lambda: dense(2, 2, 150, 170, 192, 128, causal=True),
    "D256": lambda: dense(2, 2, 150, 170, 256),
    "D256 causal": lambda: dense(2, 2, 150, 170, 256, causal=True),
    "D320": lambda: dense(2, 2, 140, 300, 320, causal=True),
    "D512": lambda: dense(2, 2, 140, 140, 512),
    "D512 causal": lambda: dense(2, 2, 140, 140, 512, causal=True),
    "D72 chunk sinks": lambda: dense(4, 2, 150, 170, 72, chunk=40, causal=True, sinks=torch.zeros(4, device="cuda")),
    "many tiles": lambda: many(64),
    "many tiles D256": lambda: many(256),
    "non-finite": lambda: nonfinite(64),
    "non-finite D256": lambda: nonfinite(256),
    "packed": packed,
}


if __name__ == "__main__":
    run(CASES, "hopper")
