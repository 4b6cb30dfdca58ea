"""Small backward passes of every variant, to be run under a checker of memory accesses and races.

    python benchmarks/h200/backward_sanitize.py  # compiles
    compute-sanitizer --tool memcheck python benchmarks/h200/backward_sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/h200/backward_sanitize.py

`--only WORD` runs the cases whose name holds it. Each gradient is compared with the torch backend's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sanitize import run

import tilewise

Case = Callable[[str], torch.Tensor]


def case(entry: Callable[..., Any], inputs: list[torch.Tensor], *fixed: Any, fast: str, **options: Any) -> Case:
    """All gradients in one row, as shares of the largest, by the backend `fast` or by another one that is named."""
    more = [x for x in options.values() if isinstance(x, torch.Tensor) and x.dtype.is_floating_point]
    dout: list[torch.Tensor] = []
    largest: list[torch.Tensor] = []  # of the first call, which is torch's

    def call(backend: str) -> torch.Tensor:
        leaves = [x.detach().requires_grad_() for x in inputs]
        extra = {id(x): x.detach().requires_grad_() for x in more}
        given = {name: extra.get(id(x), x) for name, x in options.items()}
        out = entry(*leaves, *fixed, backend=fast if backend == "hopper" else backend, **given)
        if not dout:
            dout.append(torch.randn_like(out))
        grads = torch.autograd.grad(out, [*leaves, *extra.values()], dout[0])
        if not largest:
            largest.extend(g.abs().max().float() for g in grads)
        return torch.cat([g.reshape(-1).float() / top for g, top in zip(grads, largest, strict=True)])

    return call


def dense(fast: str, H: int, Hkv: int, Lq: int, Lk: int, D: int, Dv: int = 0, dtype: Any = torch.bfloat16,
          **options: Any) -> Case:  # fmt: skip
    sizes = ((H, Lq, D), (Hkv, Lk, D), (Hkv, Lk, Dv or D))
    inputs = [torch.randn(1, *size, device="cuda", dtype=dtype) for size in sizes]
    return case(tilewise.attention, inputs, fast=fast, **options)


def packed(fast: str, D: int, **options: Any) -> Case:
    lengths = (5, 70, 0, 133)
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    inputs = [torch.randn(sum(lengths), 4, D, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return case(tilewise.varlen_attention, inputs, cu, cu, fast=fast, **options)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda")


def masked(D: int, heads: int, dtype: Any = torch.bfloat16, Lk: int = 176, **options: Any) -> Case:
    """With an additive mask that has so many heads of four."""
    return dense("hopper", 4, 4, 150, Lk, D, mask=torch.randn(1, heads, 150, Lk, device="cuda", dtype=dtype), **options)


CASES: dict[str, Callable[[], Case]] = {
    "hopper D64": lambda: dense("hopper", 4, 2, 150, 170, 64),
    "hopper D64 causal": lambda: dense("hopper", 4, 4, 300, 300, 64, causal=True),
    "hopper D128": lambda: dense("hopper", 4, 2, 150, 170, 128),
    "hopper D128 f16 causal": lambda: dense("hopper", 4, 2, 300, 300, 128, dtype=torch.float16, causal=True),
    "hopper D128 causal": lambda: dense("hopper", 4, 4, 300, 300, 128, causal=True),
    "hopper D128 one program": lambda: dense("hopper", 1, 1, 4300, 200, 128),
    "hopper D128 window softcap": lambda: dense("hopper", 4, 2, 300, 300, 128, causal=True, window=50, softcap=20.0),
    "hopper D96 window sinks": lambda: dense("hopper", 4, 2, 300, 300, 96, window=(50, 20), sinks=zeros(4)),
    "hopper many blocks": lambda: dense("hopper", 72, 72, 300, 300, 64, causal=True),
    "hopper split D128": lambda: dense("hopper", 4, 2, 500, 256, 128),
    "hopper split D64 causal": lambda: dense("hopper", 8, 2, 700, 300, 64, causal=True),
    "hopper packed": lambda: packed("hopper", 64, causal=True),
    "hopper packed D128": lambda: packed("hopper", 128, causal=True, window=30),
    "hopper D192/128": lambda: dense("hopper", 2, 2, 150, 170, 192, 128, causal=True),
    "hopper D256": lambda: dense("hopper", 2, 1, 150, 170, 256),
    "hopper D256 causal": lambda: dense("hopper", 2, 2, 300, 300, 256, causal=True),
    "hopper D192/128 window": lambda: dense("hopper", 2, 1, 300, 300, 192, 128, window=(50, 20), softcap=20.0),
    "hopper D512": lambda: dense("hopper", 2, 1, 150, 170, 512),
    "hopper D512 causal": lambda: dense("hopper", 2, 2, 200, 200, 512, causal=True),
    "hopper mask dense": lambda: masked(64, 4),
    "hopper mask dense D128 causal": lambda: masked(128, 4, causal=True),
    "hopper mask dense softcap": lambda: masked(64, 4, softcap=20.0),
    "hopper mask dense f32": lambda: masked(64, 4, torch.float32, 171),
    "hopper mask shared": lambda: masked(64, 1),
    "hopper mask shared D128 window": lambda: masked(128, 1, window=(60, 20)),
    "hopper mask shared f32": lambda: masked(64, 1, torch.float32, 171),
    "triton D64 f32": lambda: dense("triton", 4, 2, 70, 90, 64, dtype=torch.float32, causal=True),
    "triton D128 ALiBi": lambda: dense("triton", 4, 2, 150, 170, 128, alibi_slopes=zeros(4) + 0.1),
    "triton mask": lambda: dense("triton", 4, 4, 150, 170, 64, mask=torch.randn(1, 1, 150, 170, device="cuda")),
    "triton dense mask": lambda: dense("triton", 4, 4, 150, 170, 64, mask=torch.randn(1, 4, 150, 170, device="cuda")),
    "triton D512 softcap": lambda: dense("triton", 2, 1, 100, 130, 512, softcap=20.0),
    "triton packed": lambda: packed("triton", 72, causal=True),
}


if __name__ == "__main__":
    run(CASES, "hopper")
