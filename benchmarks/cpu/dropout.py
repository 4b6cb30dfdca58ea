"""Forward and backward pass with dropout, beside SDPA with dropout, and ours without.

    python benchmarks/cpu/dropout.py --json benchmarks/records/cpu/dropout.json

Interleaved, the least time of many repeats, float32, 8 heads of 64, dropout 0.1. The seed is drawn in the call. With
`--threads 1` times are CPU time, which holds on a busy machine too; else wall time.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import aligned, write_json

LENGTHS = (512, 2048)
WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "SDPA": partial(scaled_dot_product_attention, dropout_p=0.1),
    "tilewise": partial(tilewise.attention, dropout_p=0.1),
    "without": tilewise.attention,
}


def check(L: int) -> None:
    """Against plain torch, by the mask of a seed."""
    q, k, v = (torch.randn(1, 2, L, 64, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 2, L, 64)
    kept = tilewise.dropout_mask((1, 2, L, L), 0.1, 7)
    want = (torch.softmax(q @ k.mT * 64**-0.5, -1) * kept / (1 - round(0.1 * 2**16) / 2**16)) @ v
    out = tilewise.attention(q, k, v, dropout_p=0.1, dropout_seed=7)
    torch.testing.assert_close(out, want)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(want, (q, k, v), dout), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def measure(L: int, seconds: float, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of each way."""
    q, k, v = (torch.randn(1, 8, L, 64, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 8, L, 64)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["SDPA"]) < 4:
        for way, function in WAYS.items():
            start = clock()
            torch.autograd.grad(function(q, k, v), (q, k, v), dout)
            times[way].append(clock() - start)
    least = {way: min(taken[1:]) * 1e3 for way, taken in times.items()}
    speeds = {"of SDPA": least["SDPA"] / least["tilewise"], "of without": least["without"] / least["tilewise"]}
    return {"L": L, "ms": least, **speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each length")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rows = []
    for L in LENGTHS:
        check(min(L, 600))
        rows.append(measure(L, options.seconds, clock))
    header = ["L", *(f"{way} ms" for way in WAYS), "of SDPA", "of without"]
    shown = [
        [str(r["L"]), *(f"{r['ms'][way]:.2f}" for way in WAYS), f"{r['of SDPA']:.2f}x", f"{r['of without']:.2f}x"]
        for r in rows
    ]
    print("\n".join(aligned([header, *shown])))
    if options.json:
        how = {"threads": options.threads, "clock": "CPU" if options.threads == 1 else "wall"}
        write_json(options.json, describe(shlex.join(["python", *sys.argv])) | how | {"rows": rows})


if __name__ == "__main__":
    main()
