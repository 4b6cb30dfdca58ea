"""Four bits as a codebook (as TurboQuant has them) beside int4, at the same bytes: the error of attention.

    python benchmarks/cpu/codebook.py --json benchmarks/records/cpu/codebook.json

K and V are rotated, then stored in 4 bits and a float32 scale for each group: int4 as it is, whose scale is set by the
largest magnitude; int4 and the codebook with the best of several scales; the codebook (the 16 levels that are best for
normal numbers, Lloyd-Max) with a scale set by the root mean square. Plain torch, float32, 128 columns; keys whose
elements are alike, and keys of which three elements are 20 times as large. Errors are relative to the output.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tilewise import Quantised, attention
from tilewise.kv_cache import hadamard
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import write_json

HALF = torch.tensor([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326])
LEVELS = torch.cat([-HALF.flip(0), HALF])
D, SEEDS = 128, 4


def stored(x: torch.Tensor, group: int, unit: Callable, steps: Callable, factors: Sequence[float]) -> torch.Tensor:
    """`x` through `steps` in units of each group's scale times that of `factors` which errs least."""
    y = x.unflatten(-1, (-1, group))
    scale = unit(y)
    tried = torch.stack([steps(y / (scale * factor)) * scale * factor for factor in factors])
    least = (tried - y).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return tried.gather(0, least.expand(1, *y.shape))[0].flatten(-2)


def nearest(y: torch.Tensor) -> torch.Tensor:
    return LEVELS[(y[..., None] - LEVELS).abs().argmin(-1)]


WAYS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "int4": lambda x, group: Quantised.from_float(x, "int4", group).dequantise(),
    "int4, best scale": lambda x, group: stored(
        x, group, lambda y: y.abs().amax(-1, keepdim=True) / 7, lambda y: y.round().clamp(-8, 7),
        [0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0],
    ),
    "codebook": lambda x, group: stored(x, group, lambda y: y.square().mean(-1, keepdim=True).sqrt(), nearest, [1.0]),
    "codebook, best scale": lambda x, group: stored(
        x, group, lambda y: y.square().mean(-1, keepdim=True).sqrt(), nearest,
        [0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2],
    ),
}  # fmt: skip


def errors(large: bool, group: int) -> dict[str, float]:
    """Of each way, the mean over some inputs."""
    found = dict.fromkeys(WAYS, 0.0)
    for seed in range(SEEDS):
        random = torch.Generator().manual_seed(seed)
        k, v = torch.randn(2, 1, 2, 400, D, generator=random)
        q = torch.randn(1, 8, 64, D, generator=random) * 3
        if large:
            some = torch.arange(D) % 50 == 5
            k, q = k * torch.where(some, 20.0, 1.0), q / torch.where(some, 8.0, 1.0)
        exact = attention(q, k, v)
        turned = [hadamard.rotate(x) for x in (q, k, v)]
        for name, way in WAYS.items():
            out = hadamard.rotate_back(attention(turned[0], way(turned[1], group), way(turned[2], group)))
            found[name] += float((out - exact).norm() / exact.norm()) / SEEDS
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    about = describe("python benchmarks/cpu/codebook.py --json benchmarks/records/cpu/codebook.json")
    about["rows"] = []
    for large in (False, True):
        for group in (32, 64, 128):
            row = {"keys": "three large" if large else "alike", "group": group, **errors(large, group)}
            about["rows"].append(row)
            print(" ".join(f"{name} {x:.3f}" if isinstance(x, float) else f"{name} {x}," for name, x in row.items()))
    if args.json:
        write_json(args.json, about)


if __name__ == "__main__":
    main()
