"""Forward mode, the gradients of a loss of it, and double backward, beside SDPA's math backend.

    python benchmarks/cpu/derivatives.py --json benchmarks/records/cpu/derivatives.json

Interleaved, the least time of many repeats, float32, 8 heads of 64, every input moves. Each work contains its forward
pass, and the last two contain the backward passes. Memory is the peak of a process beside that of one with 128 tokens.
With `--threads 1` times are CPU time, which holds on a busy machine too; else wall time.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import aligned, write_json

WORK = [("jvp", 1024), ("jvp", 4096), ("loss of a jvp", 1024), ("double backward", 1024)]


def math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v)


WAYS: dict[str, Callable[..., torch.Tensor]] = {"math": math, "tilewise": tilewise.attention}


def results(work: str, function: Callable[..., torch.Tensor], L: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A function that does the work."""
    random = torch.Generator().manual_seed(L)
    q, k, v, *tangents = (torch.randn(1, 8, L, 64, generator=random) for _ in range(6))
    inputs = tuple(x.requires_grad_(work != "jvp") for x in (q, k, v))

    def along() -> tuple[torch.Tensor, ...]:
        return (jvp(function, inputs, tuple(tangents))[1],)

    def loss() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(along()[0].square().sum(), inputs)

    def twice() -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), inputs)

    return {"jvp": along, "loss of a jvp": loss, "double backward": twice}[work]


def measure(work: str, L: int, seconds: float, clock: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of each way, and of our forward pass."""
    ways: dict[str, Callable[[], Any]] = {way: results(work, function, L) for way, function in WAYS.items()}
    for x, y in zip(*(run() for run in ways.values()), strict=True):
        torch.testing.assert_close(x, y, atol=1e-4 * float(x.abs().max()), rtol=0.0)
    q, k, v = (torch.randn(1, 8, L, 64) for _ in range(3))
    ways["forward"] = lambda: tilewise.attention(q, k, v)
    times: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["math"]) < 4:
        for way, run in ways.items():
            start = clock()
            run()
            times[way].append(clock() - start)
    least = {way: min(taken[1:]) * 1e3 for way, taken in times.items()}
    speeds = {"of math": least["math"] / least["tilewise"], "of forward": least["forward"] / least["tilewise"]}
    return {"work": work, "L": L, "ms": least, **speeds}


def peak(work: str, way: str, L: int) -> float:
    """MiB of a process that does the work once."""
    command = [sys.executable, __file__, "--once", work, way, str(L)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each case")
    parser.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.once:
        work, way, L = options.once
        results(work, WAYS[way], int(L))()
        status = Path("/proc/self/status").read_text()  # getrusage would tell the parent's peak
        print(int(status.partition("VmHWM:")[2].split()[0]) / 1024)
        return
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rows, lines = [], [["", "math ms", "tilewise ms", "forward ms", "of math", "of forward"]]
    for work, L in WORK:
        row = measure(work, L, options.seconds, clock)
        rows.append(row)
        ms = [f"{x:.1f}" for x in row["ms"].values()]
        lines.append([f"{work} {L}", *ms, f"{row['of math']:.2f}", f"{row['of forward']:.2f}"])
        print(*lines[-1], flush=True)
    memory: list[dict[str, Any]] = []
    for work in dict(WORK):
        for way in WAYS:
            least, *more = (peak(work, way, L) for L in (128, 1024, 2048))
            memory.append({"work": work, "way": way, "MiB": [round(x - least) for x in more]})
            print(*memory[-1].values(), flush=True)
    print("\n".join(aligned(lines)))
    if options.json:
        how = {"threads": options.threads, "clock": "CPU" if options.threads == 1 else "wall"}
        write_json(options.json, describe(shlex.join(["python", *sys.argv])) | how | {"rows": rows, "memory": memory})


if __name__ == "__main__":
    main()
