"""A causal window of 512 of 4096 keys as an option, as a bool mask and as an additive one, beside SDPA by that mask.

python benchmarks/cpu/window_masks.py --json benchmarks/records/cpu/window_masks.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.measure import interleaved
from tilewise.tools.bench.report import write_json

BARS = {"bool": 6.0, "additive": 4.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, 4096, 128).unbind(0)
    back = torch.arange(4096)[:, None] - torch.arange(4096)
    seen = (back >= 0) & (back < 512)
    masks = {"bool": seen, "additive": torch.zeros(4096, 4096).masked_fill(~seen, float("-inf"))}
    calls = {"option": lambda: tilewise.attention(q, k, v, causal=True, window=512)}
    for name, mask in masks.items():
        calls[f"tilewise {name}"] = lambda mask=mask: tilewise.attention(q, k, v, mask=mask)
        calls[f"SDPA {name}"] = lambda mask=mask: scaled_dot_product_attention(q, k, v, attn_mask=mask)
    want = calls["SDPA bool"]()
    for name, call in calls.items():
        error = float((call() - want).abs().max())
        assert error < 1e-4, f"{name}: off by {error}"
    found = dict(zip(calls, interleaved(list(calls.values()), given.seconds), strict=True))
    ms = {name: 1e3 * timing.seconds for name, timing in found.items()}
    for name, value in ms.items():
        print(f"{name:18} {value:7.1f} ms")
    ratios = {name: ms[f"SDPA {name}"] / ms[f"tilewise {name}"] for name in masks}
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}x of SDPA by the same mask (bar {BARS[name]:.0f}x)")
    if given.json:
        about = describe("python benchmarks/cpu/window_masks.py")
        write_json(
            given.json,
            {**about, "heads": 8, "head_dim": 128, "length": 4096, "window": 512, "ms": ms, "ratios": ratios},
        )


if __name__ == "__main__":
    main()
