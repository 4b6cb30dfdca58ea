"""Times the Triton backend's tiles whose loops spill registers on sm_90 beside tiles that do not.

    PYTHONPATH=src python benchmarks/h200/spilled_tiles.py --json spilled_tiles.json

The rows are the calls that docs/platforms.md names, with sizes, and tiles (BM, BK, warps, stages). Each tile, the
planner's among them, is checked against the oracle, then all are timed interleaved, in CUDA graphs. Kernels are
compiled by processes of their own first. Tiles of gradients: backward_triton.py.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from timing import Way, graphed, seconds

from tilewise import Quantised, alibi_slopes
from tilewise.backends.gpu.target import target_of
from tilewise.backends.triton import config
from tilewise.backends.triton.launch import Launcher
from tilewise.backends.triton.quantised import pack_of
from tilewise.backends.triton.spec import Config
from tilewise.core.options import Options
from tilewise.core.plan import Plan
from tilewise.testing.check import Mismatch, check_call
from tilewise.validation import calls

Tile = tuple[int, int, int, int]
ROWS: dict[str, list[Tile]] = {
    "f32 D64 causal": [(64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (32, 64, 4, 2)],
    "int4 prefill D128 causal": [(64, 64, 4, 3), (64, 32, 4, 3), (64, 64, 8, 3), (128, 32, 8, 3)],
    "decode of 8 queries, bool mask": [(32, 64, 4, 3), (32, 32, 4, 3), (32, 64, 8, 3)],
    "D576/512, all options": [(64, 64, 8, 1), (64, 16, 8, 2), (64, 16, 8, 3), (64, 32, 8, 2), (64, 32, 8, 1)],
    "D576/512, causal": [(64, 64, 8, 1), (64, 16, 8, 2), (64, 16, 8, 3), (64, 32, 8, 2), (64, 32, 8, 1)],
    "D320, bool mask": [(64, 64, 8, 1), (64, 32, 8, 2), (64, 16, 8, 2), (64, 64, 8, 2), (128, 32, 8, 1)],
    "pages of 16, int4 in groups of 32": [(16, 32, 1, 3), (16, 32, 2, 3), (16, 64, 4, 3), (8, 32, 1, 3)],
    "pages of 16, codebook4": [(8, 32, 1, 3), (8, 32, 2, 3)],
    "pages of 16, int8, 2 queries": [(16, 32, 1, 3), (16, 32, 4, 3), (16, 64, 4, 3), (16, 32, 2, 3)],
    "pages of 16, k_bias, 2 queries": [(16, 128, 4, 3), (16, 64, 4, 3), (16, 64, 4, 4), (16, 128, 8, 3)],
    "k_bias, 2 queries": [(16, 128, 4, 3), (16, 64, 4, 3), (16, 64, 4, 4), (16, 128, 8, 3)],
    "pages of 16, tree of 2": [(16, 128, 4, 3), (16, 64, 4, 3), (16, 64, 4, 4), (16, 128, 8, 3)],
    "decode of 2 queries, bool mask": [(16, 64, 4, 6), (16, 64, 4, 3), (16, 128, 4, 3), (16, 32, 4, 3)],
    "pages of 16, tree of 8": [(32, 64, 4, 3), (32, 32, 8, 3), (32, 32, 4, 3)],
}


def made(name: str, small: bool) -> calls.Call:
    """The call of a row; a small one has awkward sizes and few cells, for the oracle."""
    g = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=g).to(dtype)

    L, B = (270, 1) if small else (4096, 4)
    if name.startswith("f32"):
        q, k, v = (random(B, 16, L, 64, dtype=torch.float32) for _ in range(3))
        return calls.dense(q, k, v, Options(causal=True, return_lse=True))
    if name.startswith("int4"):
        q, k, v = random(B, 16, L, 128), random(B, 4, L, 128), random(B, 4, L, 128)
        k, v = (Quantised.from_float(x, "int4", 64) for x in (k, v))
        return calls.dense(q, k, v, Options(causal=True, return_lse=True))
    if name.startswith("D320"):
        q, k, v = random(B, 8, L, 320), random(B, 8, L, 320), random(B, 8, L, 320)
        mask = torch.rand(1, 1, L, L, device="cuda", generator=g) < 0.8
        return calls.dense(q, k, v, Options(mask=mask, return_lse=True))
    if "mask" in name:
        queries = 2 if "2 queries" in name else 8
        B, L = (2, 270) if small else (32, 8192)
        q, k, v = random(B, 32, queries, 128), random(B, 8, L, 128), random(B, 8, L, 128)
        mask = torch.rand(B, 1, queries, L, device="cuda", generator=g) < 0.8
        return calls.dense(q, k, v, Options(causal=True, mask=mask, return_lse=True))
    if name.startswith("D576"):
        q, k, v = random(B, 16, L, 576), random(B, 4, L, 576), random(B, 4, L, 512)
        if "all options" not in name:
            return calls.dense(q, k, v, Options(causal=True, return_lse=True))
        more = {"softcap": 30.0, "alibi_slopes": alibi_slopes(16).cuda(), "sinks": random(16, dtype=torch.float32)}
        return calls.dense(q, k, v, Options(causal=True, window=L // 2, return_lse=True, **more))
    B, L = (3, 272) if small else (64, 4096)
    queries = 8 if "tree of 8" in name else 2 if "2 queries" in name or "tree of 2" in name else 1
    if name.startswith("k_bias"):
        q, k, v = random(B, 32, queries, 128), random(B, 8, L, 128), random(B, 8, L, 128)
        return calls.dense(q, k, v, Options(causal=True, k_bias=random(B, 32, L, dtype=torch.float32), return_lse=True))
    q, k, v = random(B, 32, queries, 128), random(B * L // 16, 16, 8, 128), random(B * L // 16, 16, 8, 128)
    options: dict[str, Any] = {"causal": True, "return_lse": True}
    for kind, group in (("int4", 32), ("int8", 64), ("codebook4", 64)):
        if kind in name:
            k, v = (Quantised.from_float(x, kind, group) for x in (k, v))
    if "k_bias" in name:
        options["k_bias"] = random(B, 32, L, dtype=torch.float32)
    if "tree" in name:
        options["tree_mask"] = torch.rand(B, queries, queries, device="cuda", generator=g) < 0.5
    table = torch.randperm(B * L // 16, device="cuda", generator=g).to(torch.int32).view(B, -1)
    lengths = torch.full((B,), L - 5 * small, dtype=torch.int32, device="cuda")
    return calls.paged(q, k, v, table, lengths, Options(**options))


def launcher(call: calls.Call, tile: Tile) -> Launcher:
    """Triton's launches with this tile, also where the bound on shared memory would refuse it."""
    p, target = call.problem, target_of(call.problem.device)
    BM, BK, warps, stages = tile
    pack = pack_of(p.group, BM) if config.is_decode(p) else 1
    fitted = config.fitted
    config.fitted = lambda problem, c, target: c
    try:
        c = config.config_of(p, target, replace(Config(BM, BK, warps, stages), pack=pack))
        return Launcher(Plan(p, "triton", "", (BM // pack, BK)), c, target)
    finally:
        config.fitted = fitted


def chosen(name: str) -> Tile:
    """The planner's tile."""
    p = made(name, small=False).problem
    c = config.config_of(p, target_of(p.device))
    return c.BM, c.BK, c.warps, c.stages


def checked(given: tuple[str, Tile]) -> str:
    """Compiles a tile's kernels and runs them on small sizes: what is wrong, or nothing."""
    try:
        call = made(given[0], small=True)
        call.tensors.out.fill_(float("nan"))
        launcher(call, given[1])(call.tensors)
        check_call(call, call.tensors.out, call.tensors.lse)
        launcher(made(given[0], small=False), given[1])(made(given[0], small=False).tensors)  # may be another kernel
        torch.cuda.synchronize()
    except (Mismatch, RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def timed(name: str, tiles: list[Tile], budget: float) -> dict[str, float]:
    """Microseconds of each tile."""
    runs: dict[str, Way] = {}
    for tile in tiles:
        call = made(name, small=False)
        launch = launcher(call, tile)
        runs["x".join(map(str, tile))] = graphed([lambda launch=launch, call=call: launch(call.tensors)])
    return {tile: round(t * 1e6, 1) for tile, t in seconds(runs, 30, budget).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a row")
    parser.add_argument("--only", default="", help="rows whose names hold one of these words, comma separated")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    wanted = [name for name in ROWS if any(word in name for word in args.only.split(","))]
    rows = {name: list(dict.fromkeys([chosen(name), *ROWS[name]])) for name in wanted}
    work = [(name, tile) for name, tiles in rows.items() for tile in tiles]
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        wrong = dict(zip(work, pool.map(checked, work), strict=True))
    record: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "rows": {}}
    for name, tiles in rows.items():
        found = {"x".join(map(str, tile)): text for tile in tiles if (text := wrong[name, tile])}
        us = timed(name, [tile for tile in tiles if not wrong[name, tile]], args.budget)
        record["rows"][name] = {"chosen": "x".join(map(str, tiles[0])), "us": us, "wrong": found}
        print(name, us, found or "", flush=True)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
