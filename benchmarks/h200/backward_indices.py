"""Gradients with `block_indices` and `key_indices` on a GPU (Triton), beside SDPA with the mask that they mean.

    python benchmarks/h200/backward_indices.py --json backward_indices.json

Each row is checked first, at 1,024 tokens, against plain torch in float32, and must give the same bits twice. Times are
of the backward pass alone, interleaved.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from timing import seconds

from tilewise import attention
from tilewise.tools.bench.machine import describe

CUDA = torch.device("cuda", 0)
H, D = 16, 128
# name: tokens, keys of a block (1: keys one by one), share of keys that a query sees
ROWS = {
    "blocks of 128, 10% of 8k": (8192, 128, 0.1),
    "blocks of 64, 10% of 8k": (8192, 64, 0.1),
    "blocks of 64, 50% of 4k": (4096, 64, 0.5),
    "keys one by one, 512 of 4k": (4096, 1, 0.125),
}


def indices_of(L: int, block: int, share: float) -> tuple[dict[str, Any], torch.Tensor]:
    """The options of a row, and the bool mask [L, L] that they mean."""
    count = L // block
    scores = torch.rand(count, count, device=CUDA, generator=torch.Generator(CUDA).manual_seed(0))
    scores.diagonal().fill_(2)
    best = scores.topk(max(1, round(share * count)), 1).indices
    mask = torch.zeros(count, count, dtype=torch.bool, device=CUDA).scatter_(1, best, True)
    if block == 1:
        return {"key_indices": best.int()[None]}, mask
    whole = mask.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return {"block_indices": best.int()[None], "block_size": block}, whole


def tensors(L: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, H, L, D, device=CUDA, dtype=dtype, requires_grad=True) for _ in range(3)]


def gradients(out: torch.Tensor, inputs: list[torch.Tensor], dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out, inputs, dout, retain_graph=True)


def check(block: int, share: float) -> str:
    """The largest error of a gradient over its largest value, and whether bits repeat."""
    L = 1024
    options, mask = indices_of(L, block, share)
    inputs = tensors(L, torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    dout = torch.randn_like(inputs[0])
    out = attention(*inputs, **options)
    got, again = (gradients(out, inputs, dout) for _ in range(2))
    scores = (exact[0] @ exact[1].mT * D**-0.5).masked_fill(~mask, -torch.inf)
    want = gradients(scores.softmax(-1) @ exact[2], exact, dout.float())
    error = max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
    bits = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    return f"error {error:.1e}" + " WRONG" * (not error < 2e-2) + " DIFFERENT BITS" * (not bits)


def row(name: str) -> dict[str, Any]:
    L, block, share = ROWS[name]
    said = check(block, share)
    options, mask = indices_of(L, block, share)
    inputs = tensors(L, torch.bfloat16)
    dout = torch.randn_like(inputs[0])
    sdpa = torch.nn.functional.scaled_dot_product_attention
    outs = {
        "tilewise": attention(*inputs, **options),
        "sdpa": sdpa(*inputs, attn_mask=mask),
        "dense": attention(*inputs),
    }
    ways = {way: lambda out=out: gradients(out, inputs, dout) for way, out in outs.items()}
    times = seconds(ways, 5, 1.0)
    ratio = times["sdpa"] / times["tilewise"]
    print(
        f"{name}: {' '.join(f'{way} {s * 1e3:.2f} ms' for way, s in times.items())}, {ratio:.2f}x; {said}", flush=True
    )
    return {
        "row": name,
        "ms": {way: round(s * 1e3, 3) for way, s in times.items()},
        "x": round(ratio, 2),
        "check": said,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    record = describe("python benchmarks/h200/backward_indices.py", CUDA) | {"rows": [row(name) for name in ROWS]}
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
