"""Times forward kernels beside FlashAttention 4 and cuDNN, in one run and interleaved.

    python benchmarks/h200/forward.py --peers FOLDER --json forward.json

`--peers` is a folder with a module `peers_load` that gives the other libraries' kernels. The cells are those in which
FlashAttention 4 has led, and some others.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from timing import ceilings, seconds
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise

# D, H, L, causal
CELLS = [
    (64, 32, 16384, False), (64, 32, 16384, True), (256, 8, 4096, False), (256, 8, 16384, False),
    (256, 8, 16384, True), (128, 16, 4096, True), (128, 16, 16384, False),
]  # fmt: skip


def cell(args: Any, D: int, H: int, L: int, causal: bool) -> dict[str, Any]:
    B = 16384 // L
    q, k, v = (torch.randn(B, L, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    ways: dict[str, Any] = {"tilewise": lambda: tilewise.attention(q, k, v, causal=causal, layout="blhd")}

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal)

    ways["cudnn"] = cudnn
    if args.peers:
        sys.path.insert(0, args.peers)
        import peers_load

        fa4 = peers_load.fa4()
        ways["fa4"] = lambda: fa4.fa4_fwd(q, k, v, causal)
    for run in ways.values():
        run()
    flops = 4 * D * B * H * (L * (L + 1) / 2 if causal else L * L)
    rates = {n: round(flops / t / 1e12, 1) for n, t in seconds(ways, args.rounds, args.budget).items()}
    name = f"D{D} {H}/{H} {L // 1024}k {'causal' if causal else 'full'}"
    best = max(rate for n, rate in rates.items() if n != "tilewise")
    row = {"work": name, "TFLOPS": rates, "of the best": round(rates["tilewise"] / best, 3)}
    print(name.ljust(22), rates, row["of the best"], flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", help="folder of peers_load.py")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=1.5, help="seconds a cell")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"device": "H200", "torch": torch.__version__, "ceilings": ceilings(), "rows": []}
    for shape in CELLS:
        report["rows"].append(cell(args, *shape))
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
