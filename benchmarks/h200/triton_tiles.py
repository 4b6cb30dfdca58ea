"""Times tiles of the Triton backend beside each other, where loops spill registers and where little was measured.

    PYTHONPATH=src python benchmarks/h200/triton_tiles.py --json triton_tiles.json

A row is a call and tiles (BM, BK, warps, stages). Each tile, the
planner's among them, is checked against the oracle, then all are timed interleaved, in CUDA graphs. Kernels are
compiled by processes of their own first. Tiles of gradients: backward_triton.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
from tilewise.backends.triton.flipped_products import pack_of
from tilewise.backends.triton.launch import Launcher
from tilewise.backends.triton.spec import Config
from tilewise.core.options import Options
from tilewise.core.problem import Problem
from tilewise.testing.check import check_call
from tilewise.validation import calls

Tile = tuple[int, int, int, int]
WIDE = [(64, 64, 8, 1), (64, 32, 8, 2), (128, 32, 8, 1), (64, 64, 8, 2)]
FEW = [(16, 128, 4, 3), (16, 64, 4, 3), (16, 32, 4, 3), (16, 128, 8, 3)]
DENSE = [(64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 8, 2), (128, 32, 8, 3)]
ROWS: dict[str, list[Tile]] = {
    "f32 D64 causal": [(64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (32, 64, 4, 2)],
    "int4 prefill D128 causal": [(64, 64, 4, 3), (64, 32, 4, 3), (64, 64, 8, 3), (128, 32, 8, 3)],
    "decode D128, 8 queries, bool mask": [(32, 64, 4, 3), (32, 32, 4, 3), (32, 64, 8, 3)],
    "decode D128, 2 queries, bool mask": [(16, 64, 4, 6), *FEW],
    "decode D128, 1 query, bool mask": FEW,
    "decode D128, 1 query, float mask": FEW,
    "decode D64, 1 query, bool mask": FEW,
    "decode D64, 2 queries, k_bias": FEW,
    "decode D128, 2 queries, k_bias": [(16, 64, 4, 4), *FEW],
    "decode D256, 1 query, bool mask": [(16, 64, 4, 3), (16, 32, 4, 3), (16, 64, 8, 3), (16, 64, 4, 2)],
    "decode D256, 2 queries, k_bias": [(16, 64, 4, 3), (16, 32, 4, 3), (16, 64, 8, 3), (16, 64, 4, 2)],
    "D576/512, all options": [(64, 16, 8, 2), (64, 16, 8, 3), (64, 32, 8, 1), *WIDE],
    "D576/512, causal": [(64, 16, 8, 2), (64, 16, 8, 3), (64, 32, 8, 1), *WIDE],
    "D576/512, bool mask": WIDE,
    "D512/512, bool mask": WIDE,
    "D320/320, bool mask": [(64, 32, 8, 2), (64, 16, 8, 2), (128, 32, 8, 2), *WIDE],
    "D384/384, bool mask": [(128, 32, 8, 2), (64, 32, 8, 2), (64, 64, 8, 2), (128, 16, 8, 2)],
    "D320/320, k_bias": [(128, 32, 8, 2), *WIDE],
    "D256/256, bool mask": [(128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2)],
    "D256/256, k_bias": [(128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2)],
    "D128/128, k_bias": DENSE,
    "D64/64, k_bias": DENSE,
    "pages of 16, int4 in groups of 32": [(16, 32, 1, 3), (16, 32, 2, 3), (16, 64, 4, 3), (8, 32, 1, 3)],
    "pages of 16, codebook4": [(8, 32, 1, 3), (8, 32, 2, 3)],
    "pages of 16, int8, 2 queries": [(16, 32, 1, 3), (16, 32, 4, 3), (16, 64, 4, 3), (16, 32, 2, 3)],
    "pages of 16, k_bias, 2 queries": [(16, 64, 4, 4), *FEW],
    "pages of 16, tree of 2 queries": [(16, 64, 4, 4), *FEW],
    "pages of 16, tree of 8 queries": [(32, 64, 4, 3), (32, 32, 8, 3), (32, 32, 4, 3)],
}


def made(name: str, small: bool) -> calls.Call:
    """The call of a row; a small one has awkward sizes and few cells, for the oracle."""
    g = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=g).to(dtype)

    def options(B: int, H: int, Lq: int, L: int) -> Options:
        """What the name says; masks and trees are random."""
        found: dict[str, Any] = {"causal": "mask" not in name, "return_lse": True}
        if "mask" in name:
            seen = torch.rand(B if Lq < 16 else 1, 1, Lq, L, device="cuda", generator=g) < 0.8
            found["mask"] = seen if "bool" in name else torch.where(seen, 0.5, -torch.inf).to(torch.bfloat16)
        if "k_bias" in name:
            found["k_bias"] = random(B, H, L, dtype=torch.float32)
        if "tree" in name:
            found["tree_mask"] = torch.rand(B, Lq, Lq, device="cuda", generator=g) < 0.5
        if "all options" in name:
            found |= {"softcap": 30.0, "alibi_slopes": alibi_slopes(H).cuda(), "window": L // 2}
            found["sinks"] = random(H, dtype=torch.float32)
        return Options(**found)

    few = re.search(r"(\d+) quer", name)
    queries = int(few[1]) if few else 1
    if name.startswith("pages"):
        B, L = (3, 272) if small else (64, 4096)
        q, k, v = random(B, 32, queries, 128), random(B * L // 16, 16, 8, 128), random(B * L // 16, 16, 8, 128)
        for kind, group in (("int4", 32), ("int8", 64), ("codebook4", 64)):
            if kind in name:
                k, v = (Quantised.from_float(x, kind, group) for x in (k, v))
        table = torch.randperm(B * L // 16, device="cuda", generator=g).to(torch.int32).view(B, -1)
        lengths = torch.full((B,), L - 5 * small, dtype=torch.int32, device="cuda")
        return calls.paged(q, k, v, table, lengths, options(B, 32, queries, L))
    D, Dv = (int(x or 0) for x in re.search(r"D(\d+)(?:/(\d+))?", name).groups())  # type: ignore[union-attr]
    if name.startswith("decode"):
        B, L = (2, 270) if small else (32, 8192)
        q, k, v = random(B, 32, queries, D), random(B, 8, L, D), random(B, 8, L, D)
        return calls.dense(q, k, v, options(B, 32, queries, L))
    B, L = (1, 270) if small else (4, 4096)
    dtype = torch.float32 if "f32" in name else torch.bfloat16
    H, Hkv = 16, 16 if "f32" in name else 4
    q, k, v = (
        random(B, H, L, D, dtype=dtype),
        random(B, Hkv, L, D, dtype=dtype),
        random(B, Hkv, L, Dv or D, dtype=dtype),
    )
    if "int4" in name:
        k, v = (Quantised.from_float(x, "int4", 64) for x in (k, v))
    return calls.dense(q, k, v, options(B, H, L, L))


def launcher(call: calls.Call, tile: Tile) -> Launcher:
    """Triton's launches with this tile, also where the bound on shared memory would refuse it."""
    p, target = call.problem, target_of(call.problem.device)
    BM, BK, warps, stages = tile
    if tile == chosen(p):
        return Launcher(p, config.config_of(p, target), target)
    pack = pack_of(p.group, BM) if config.is_decode(p) else 1
    fitted = config.fitted
    config.fitted = lambda problem, c, target: c
    try:
        c = config.config_of(p, target, replace(Config(BM, BK, warps, stages), pack=pack))
        return Launcher(p, c, target)
    finally:
        config.fitted = fitted


def chosen(p: Problem) -> Tile:
    """The planner's tile."""
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
    except Exception as error:
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
    rows = {name: list(dict.fromkeys([chosen(made(name, small=False).problem), *ROWS[name]])) for name in wanted}
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
