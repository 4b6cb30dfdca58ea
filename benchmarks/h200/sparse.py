"""Checks and times latent attention by key indices on Hopper beside FlashMLA: sparse prefill and sparse decode.

    PYTHONPATH=src python benchmarks/h200/sparse.py --out results --peers DIR
    PYTHONPATH=src ncu -k regex:latent_decode -c 1 -s 1 --set full python benchmarks/h200/sparse.py \\
        --one "decode 128 x 2048 of 8k, fp8"
    PYTHONPATH=src compute-sanitizer --tool memcheck python benchmarks/h200/sparse.py --sanitize

Calls go through `attention` and `paged_attention`. Kernels are compiled in parallel first. Then the conformance suite's
latent cases with indices are checked, then each row against float64 on some of its queries, and again in a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from latent_cases import BF16, SCALE
from timing import Way, graphed, seconds

from tilewise import Quantised, Unsupported, attention, paged_attention
from tilewise.backends import hopper
from tilewise.backends.gpu.launch_program import Workspaces
from tilewise.backends.hopper.mla.launch import launcher_of
from tilewise.core.options import Options
from tilewise.core.storage import stored_as
from tilewise.dispatch import planner
from tilewise.testing.case import Case, make
from tilewise.testing.cases import INDICES, LATENT, LATENT_ROWS
from tilewise.testing.check import Mismatch, check_case
from tilewise.validation import calls

OWN, PEER = "tilewise", "FlashMLA"
CHECKED = 48  # queries that are checked
# name: batch, queries, keys, heads, indices, cache
ROWS = {
    "prefill 4096 x 2048 of 8k": (1, 4096, 8192, 128, 2048, ""),
    "prefill 4096 x 2048 of 32k": (1, 4096, 32768, 128, 2048, ""),
    "decode 128 x 2048 of 8k, bf16": (128, 1, 8192, 128, 2048, "bf16"),
    "decode 32 x 2048 of 8k, bf16": (32, 1, 8192, 128, 2048, "bf16"),
    "decode 128 x 2048 of 8k, fp8": (128, 1, 8192, 128, 2048, "fp8_latent"),
    "decode 32 x 2048 of 8k, fp8": (32, 1, 8192, 128, 2048, "fp8_latent"),
}


def served(problem: Any) -> bool:
    return hopper.supports(problem) is None


def conforming() -> list[Case]:
    """Cases of the conformance suite with indices, or in rows that hold their scales, that the Hopper kernels serve."""
    listed = [c for c in (*INDICES, *LATENT_ROWS, *LATENT) if c.D == 576 and c.dtype != "f32"]
    return [c for c in listed if served(make(c, "cuda").checked(return_lse=True).problem)]


class Row:
    """Inputs of a row."""

    def __init__(self, name: str, empty: bool = False) -> None:
        self.name = name
        self.batch, self.q_len, self.keys, self.heads, self.chosen, self.cache = ROWS[name]
        torch.manual_seed(1)
        fill = torch.empty if empty else torch.randn
        self.q = fill(self.batch, self.q_len, self.heads, 576, device="cuda", dtype=BF16)
        rows = self.batch * self.q_len
        if empty:
            self.indices = torch.empty(rows, self.chosen, dtype=torch.int32, device="cuda")
        else:
            order = [
                torch.rand(256, self.keys, device="cuda").argsort(1)[:, : self.chosen] for _ in range(-(-rows // 256))
            ]
            self.indices = torch.cat(order)[:rows].int()
            self.indices[:, 7] = -1
        self.indices = self.indices.view(self.batch, self.q_len, self.chosen).contiguous()
        pages = self.batch * self.keys // 64
        self.rows = fill(pages * 64, 576, device="cuda", dtype=BF16)
        if self.cache:
            self.table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(self.batch, -1)
            self.lengths = torch.full((self.batch,), self.keys, dtype=torch.int32, device="cuda")
        if self.cache == "fp8_latent" and empty:
            self.bytes = torch.empty(pages * 64, 656, device="cuda", dtype=torch.uint8)
        elif self.cache == "fp8_latent":
            self.bytes = torch.cat(
                [Quantised.from_float(part, "fp8_latent", group=128).data for part in self.rows.split(1 << 16)]
            )

    def arguments(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        options = {"scale": SCALE, "key_indices": self.indices, "return_lse": True}
        q = self.q.transpose(1, 2)
        if not self.cache:
            k = self.rows[None, None]
            return attention, (q, k, k[..., :512]), options
        if self.cache == "bf16":
            k = self.rows.view(-1, 64, 1, 576)
            return paged_attention, (q, k, k[..., :512], self.table, self.lengths), options
        stored = self.bytes.view(-1, 64, 1, 656)
        k, v = (Quantised(stored[..., :n], None, "fp8_latent", 128) for n in (656, 528))
        return paged_attention, (q, k, v, self.table, self.lengths), options

    def checked(self) -> calls.Call:
        function, args, options = self.arguments()
        return (calls.dense if function is attention else calls.paged)(*args, Options(**options))

    def own(self) -> Way:
        function, args, options = self.arguments()
        return lambda: function(*args, backend="hopper", validate=False, **options)

    def peer(self, folder: str) -> Way:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        import peers_load

        M = peers_load.flashmla()
        if not self.cache:
            kv, q, indices = self.rows[:, None], self.q[0], self.indices[0][:, None]
            return lambda: M.sparse_prefill(q, kv, indices)
        slots = (
            torch.gather(self.table, 1, (self.indices.clamp_min(0) // 64).flatten(1).long()).view_as(self.indices) * 64
        )
        slots = torch.where(self.indices < 0, -1, slots + self.indices % 64).int()
        cache = self.bytes.view(-1, 64, 1, 656).view(torch.float8_e4m3fn)
        *_, plan = M.sparse_decode(self.q, cache, slots)
        return lambda: M.sparse_decode(self.q, cache, slots, plan=plan)

    def wrong(self, out: torch.Tensor, lse: torch.Tensor | None, loose: bool) -> str:
        """What is wrong with out [B, H, Lq, 512] and lse, if anything is, on some of the queries."""
        worst = off = 0.0
        flat = [(b, l) for b in range(self.batch) for l in range(self.q_len)]
        for b, l in flat[:: max(1, len(flat) // CHECKED)]:
            at = self.indices[b, l][self.indices[b, l] >= 0].long()
            slots = at if not self.cache else self.table[b, at // 64].long() * 64 + at % 64
            k = self.rows[slots].double()
            if self.cache == "fp8_latent":
                k = stored_as("fp8_latent").dequantise(self.bytes[slots], None, torch.float64)
            s = self.q[b, l].double() @ k.T * SCALE
            want = torch.softmax(s, -1) @ k[:, :512]
            worst = max(worst, float((out[b, :, l].double() - want).norm() / want.norm()))
            if lse is not None:
                off = max(off, float((lse[b, :, l].double() - torch.logsumexp(s, -1)).abs().max()))
        limit = 1e-2 if loose else 4e-3
        return "" if worst < limit and (loose or off < 2e-5) else f"out off by {worst:.1e}, lse by {off:.1e}"


def warm(given: str | Case) -> str:
    """Compiles the kernels of a row or a case into Triton's cache, without a launch."""
    try:
        call = (
            Row(given, empty=True).checked() if isinstance(given, str) else make(given, "cuda").checked(return_lse=True)
        )
        if not served(call.problem):
            return f"{given}: not served"
        made = launcher_of(planner.choose(call.problem, "hopper").problem)
        arguments = made.arguments(call.tensors, Workspaces(call.out.device))
        for kernel in [made.decode] + [made.combining] * made.config.cut:
            all_given = arguments | kernel.constants
            kernel.function.warmup(grid=(1,), **{n: all_given[n] for n in kernel.function.arg_names}, **kernel.options)
    except Exception as error:
        return f"{given}: {type(error).__name__}: {str(error)[-300:]}"
    return ""


def check(cases: list[Case]) -> list[str]:
    wrong = []
    for case in cases:
        try:
            verdict = check_case(case, "hopper", "cuda")
            print(f"{verdict.error / max(verdict.bound, 1e-30):.2f} of the bound: {case}", flush=True)
        except (Mismatch, Unsupported, RuntimeError) as error:
            wrong.append(f"{case}: {str(error)[:300]}")
            print(wrong[-1], flush=True)
    return wrong


def time_row(name: str, peers: str, budget: float) -> dict[str, Any]:
    row = Row(name)
    ways: dict[str, Callable[[], Way]] = {OWN: row.own}
    if peers and row.cache != "bf16":
        ways[PEER] = lambda: row.peer(peers)
    runs: dict[str, Way] = {}
    wrong: dict[str, str] = {}
    for way, made in ways.items():
        try:
            call = made()
            kept: list[Any] = [call()]
            torch.cuda.synchronize()
            runs[way] = graphed([lambda: kept.append(call())])  # noqa: B023
            runs[way]()
            torch.cuda.synchronize()
            for got in (kept[0], kept[-1]):
                if way == OWN:
                    text = row.wrong(got.out, got.lse, loose=False)
                else:
                    text = row.wrong(
                        got[0].view(row.batch, row.q_len, row.heads, 512).transpose(1, 2), None, loose=True
                    )
                if text:
                    wrong[way] = text
            if way == OWN:
                for i in range(1000 if row.cache else 100):
                    again = call()
                    if not (torch.equal(again.out, kept[0].out) and torch.equal(again.lse, kept[0].lse)):
                        wrong[way] = f"repeat {i} differs"
                        break
        except Exception as error:
            wrong[way] = f"{type(error).__name__}: {str(error)[-300:]}"
    times = seconds(runs, 25, budget)
    flops = 2 * row.batch * row.q_len * row.chosen * row.heads * 1088
    return {
        "row": name, "wrong": wrong, "us": {way: round(t * 1e6, 1) for way, t in times.items()},
        "TFLOPS": {way: round(flops / t / 1e12) for way, t in times.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", default="")
    parser.add_argument("--jobs", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--budget", type=float, default=2.0)
    parser.add_argument("--part", choices=("16 bits", "fp8", ""), default="", help="only caches of this kind")
    parser.add_argument("--sanitize", action="store_true", help="only the small cases, in this process")
    parser.add_argument("--one", help="a row to run three times, for a profiler; with --peers by FlashMLA")
    args = parser.parse_args()
    if args.one:
        row = Row(args.one)
        call = row.peer(args.peers) if args.peers else row.own()
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        return
    start = time.perf_counter()
    cases = [c for c in conforming() if args.part in ("", "fp8" if "fp8" in c.k else "16 bits")]
    if args.sanitize:
        sys.exit(bool(check(cases)))
    names = [name for name in ROWS if args.part in ("", "fp8" if "fp8" in name else "16 bits")]
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for text in pool.map(warm, [*names, *cases]):
            if text:
                print("not compiled:", text, flush=True)
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    report: dict[str, Any] = {"wrong": check(cases), "cases": len(cases), "rows": []}
    for name in names:
        report["rows"].append(time_row(name, args.peers, args.budget))
        print(json.dumps(report["rows"][-1]), flush=True)
    for r in report["rows"]:
        print(
            r["row"].ljust(32),
            *(f"{way} {us} us {r['TFLOPS'][way]} TFLOPS," for way, us in r["us"].items()),
            r["wrong"] or "",
        )
    print(f"{len(cases)} cases, {len(report['wrong'])} wrong; {time.perf_counter() - start:.0f} s")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"sparse{args.part.replace(' ', '')}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
