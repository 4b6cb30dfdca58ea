"""Times Triton's kernels over rows that hold values (576 columns, values the first 512): read once against twice.

    PYTHONPATH=src python benchmarks/h200/latent_once.py --out results

Each way is a tile (BM, BK, warps, stages) and whether chunks of V are loaded again. Ways of a row are checked against
float64 on the dequantised rows, then timed interleaved in CUDA graphs. Kernels are compiled in parallel first. "bytes"
reads rows of `fp8_latent` byte by byte; "two" plans for two programs on a processor at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from latent import compile_alone
from latent_cases import Result, judge
from timing import Way, graphed, seconds

from tilewise import Quantised
from tilewise.backends.gpu.target import target_of
from tilewise.backends.triton import config
from tilewise.backends.triton.flipped_products import pack_of
from tilewise.backends.triton.launch import Launcher
from tilewise.backends.triton.spec import Config
from tilewise.core.options import Options
from tilewise.core.plan import Plan
from tilewise.validation import calls

SCALE = 576**-0.5
NARROW = [("twice", (16, 32, 4, 3)), ("once", (16, 32, 4, 3)), ("once, two", (16, 32, 4, 3)), ("once", (16, 64, 8, 3))]
WIDE = [("twice", (64, 16, 8, 3)), ("once", (64, 16, 8, 3)), ("once", (32, 64, 8, 2)), ("once", (32, 64, 8, 3)),
        ("twice", (32, 64, 8, 2)), ("once", (16, 32, 4, 3))]  # fmt: skip
FLOAT = [("twice", (16, 16, 4, 2)), ("once", (16, 16, 4, 2))]
LONG = [("twice", (64, 64, 8, 1)), ("once", (64, 64, 8, 1)), ("once", (32, 64, 8, 2))]
BYTES = [("bytes, twice", (16, 32, 4, 3))]
BATCH, KEYS = 16, 8192
# format, heads, page (0: contiguous), queries, ways
ROWS: dict[str, tuple[str, int, int, int, list[Any]]] = {
    "fp8_latent, 16 heads, pages": ("fp8_latent/128", 16, 64, 1, BYTES + NARROW),
    "fp8_latent, 128 heads, pages": ("fp8_latent/128", 128, 64, 1, WIDE),
    "int8, 16 heads, pages": ("int8/128", 16, 64, 1, NARROW),
    "int8, 128 heads, pages": ("int8/128", 128, 64, 1, WIDE),
    "fp8_e4m3, 16 heads, pages": ("fp8_e4m3/128", 16, 64, 1, NARROW[:2]),
    "float32, 16 heads, pages": ("", 16, 64, 1, FLOAT),
    "fp8_latent, 1 head, pages": ("fp8_latent/128", 1, 64, 1, BYTES + NARROW[:2]),
    "int8, 1 head, pages": ("int8/128", 1, 64, 1, NARROW[:2]),
    "fp8_latent, 16 heads, contiguous": ("fp8_latent/128", 16, 0, 1, NARROW[:2]),
    "int8, 16 heads, contiguous": ("int8/128", 16, 0, 1, NARROW[:2]),
    "float32, 16 heads, contiguous": ("", 16, 0, 1, FLOAT),
    "int8, prefill, 16 heads": ("int8/128", 16, 0, 2048, LONG),
    "fp8_latent, prefill, 16 heads": ("fp8_latent/128", 16, 0, 2048, LONG),
}


class Row:
    """Inputs of a row, in copies that do not fit into L2 together, and the result for the last one."""

    def __init__(self, name: str, empty: bool = False) -> None:
        stored, self.heads, self.page, self.q_len, self.ways = ROWS[name]
        self.kind, _, group = stored.partition("/")
        self.batch, self.keys = (BATCH, KEYS) if self.q_len == 1 else (2, 2048)
        torch.manual_seed(1)
        dtype = torch.bfloat16 if self.kind else torch.float32
        size = self.batch * self.keys * {"": 2304, "fp8_latent": 656}.get(self.kind, 608)
        self.copies = 1 if empty or self.q_len > 1 else -(-300_000_000 // size)
        self.rows = size
        self.q = torch.randn(self.batch, self.heads, self.q_len, 576, device="cuda", dtype=dtype)
        pages = self.batch * self.keys // (self.page or self.keys)
        self.table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(self.batch, -1)
        self.lengths = torch.full((self.batch,), self.keys, dtype=torch.int32, device="cuda")
        self.caches: list[tuple[Any, Any]] = []
        for _ in range(self.copies):
            x = torch.randn(pages, self.page or self.keys, 1, 576, device="cuda", dtype=dtype)
            self.caches.append(self.stored(x, int(group or 0)))
        self.want = None if empty else self.oracle()

    def stored(self, x: torch.Tensor, group: int) -> tuple[Any, Any]:
        """K, and V in it."""
        x = x if self.page else x.transpose(1, 2)
        if not self.kind:
            return x, x[..., :512]
        k = Quantised.from_float(x, self.kind, group)
        if self.kind == "fp8_latent":
            return k, Quantised(k.data[..., :528], None, self.kind, group)
        return k, Quantised(k.data[..., :512], k.scales[..., : 512 // group], self.kind, group)

    def oracle(self) -> Result:
        k = self.caches[-1][0]
        k = k.dequantise() if self.kind else k
        out, lse = [], []
        for b in range(self.batch):
            rows = (k[self.table[b].long()].reshape(-1, 576) if self.page else k[b, 0]).double()
            s = self.q[b].double() @ rows.T * SCALE
            if self.q_len > 1:
                s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(self.keys - self.q_len + 1), float("-inf"))
            lse.append(torch.logsumexp(s, -1))
            out.append(torch.softmax(s, -1) @ rows[:, :512])
        return torch.stack(out), torch.stack(lse)

    def call(self, cache: tuple[Any, Any]) -> calls.Call:
        options = Options(scale=SCALE, causal=True, return_lse=True)
        if self.page:
            return calls.paged(self.q, *cache, self.table, self.lengths, options)
        return calls.dense(self.q, *cache, options)


def launcher(call: calls.Call, way: tuple[str, tuple[int, ...]]) -> Any:
    """Triton's launches with this tile. The bound on shared memory is not asked."""
    p, target = call.problem, target_of(call.problem.device)
    how, (BM, BK, warps, stages) = way
    pack = pack_of(p.group, BM) if p.q_len == 1 else 1
    keep = config.fitted, config.programs_at_once
    config.fitted = lambda problem, c, target: c
    if how.endswith("two"):
        config.programs_at_once = lambda problem, c: 2
    try:
        c = config.config_of(p, target, Config(BM, BK, warps, stages, pack))
        made = Launcher(Plan(p, "triton", "", (BM // pack, BK)), c, target)
    finally:
        config.fitted, config.programs_at_once = keep
    if how.startswith("bytes"):
        made.spec = config.spec(p, c, target, pairs=False)
    made.spec = replace(made.spec, v_in_k=how.startswith("once"))
    return made


def label(way: tuple[str, tuple[int, ...]]) -> str:
    return f"{way[0]} {'x'.join(map(str, way[1]))}"


def warm(given: tuple[str, int]) -> str:
    """Compiles a way into Triton's cache."""
    name, number = given
    try:
        row = Row(name, empty=True)
        call = row.call(row.caches[0])
        made = launcher(call, row.ways[number])
        floats = torch.empty(1 << 20, device="cuda")
        memory = (floats, floats, None, floats.view(torch.int32), None)
        if not made.spec.split:
            memory = (None, None, None, memory[3] if made.spec.guard == "flag" else None, None)
        elif made.spec.guard != "flag":
            memory = (floats, floats, None, None, None)
        kernel, fixup, arguments = made.attention(call.tensors, memory)
        for each in (kernel, fixup):
            if each is not None:
                compile_alone(each, arguments)
        if made.spec.split:
            compile_alone(made.combiner, made.combine_arguments(call.tensors, floats, floats))
    except Exception as error:
        return f"{given}: {type(error).__name__}: {str(error)[-300:]}"
    return ""


def time_row(name: str, budget: float) -> dict[str, Any]:
    row = Row(name)
    runs: dict[str, Way] = {}
    wrong: dict[str, str] = {}
    splits: dict[str, int] = {}
    for way in row.ways:
        try:
            made = []
            for cache in row.caches:
                call = row.call(cache)
                launch = launcher(call, way)
                made.append(lambda launch=launch, call=call: launch(call.tensors))
            for run in made:
                run()
            torch.cuda.synchronize()
            assert row.want is not None
            if text := judge(label(way), (call.tensors.out, call.tensors.lse), row.want):
                wrong[label(way)] = text
            splits[label(way)] = launch.config.splits
            runs[label(way)] = graphed(made)
        except Exception as error:
            wrong[label(way)] = f"{type(error).__name__}: {str(error)[-200:]}"
    us = {way: round(t / row.copies * 1e6, 1) for way, t in seconds(runs, 30, budget).items()}
    rates = {way: round(row.rows / t / 1e6, 2) for way, t in us.items()}
    return {"row": name, "us": us, "TB/s of rows": rates, "splits": splits, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--compile", action="store_true", help="and no more")
    parser.add_argument("--compiled", action="store_true", help="all has been compiled before")
    args = parser.parse_args()
    start = time.perf_counter()
    work = [(name, i) for name, row in ROWS.items() for i in range(len(row[-1]))]
    work.sort(key=lambda given: "prefill" not in given[0])
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for text in pool.map(warm, [] if args.compiled else work):
            if text:
                print("not compiled:", text, flush=True)
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    if args.compile:
        return
    rows = []
    for name in ROWS:
        rows.append(time_row(name, args.budget))
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "latent_once.json").write_text(json.dumps(rows, indent=1) + "\n")
    for r in rows:
        print(r["row"])
        for way, us in r["us"].items():
            print(f"  {way:26} {us:8.1f} us {r['TB/s of rows'][way]:5} TB/s  {r['splits'].get(way)} splits")
        for text in r["wrong"].values():
            print("  WRONG:", text)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
