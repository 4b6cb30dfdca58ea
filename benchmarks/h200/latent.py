"""Checks and times the Hopper latent decode kernel (576 columns, values in the keys) beside FlashMLA.

    PYTHONPATH=src python benchmarks/h200/latent.py --out results --peers DIR

Kernels are compiled in parallel, then each variant is checked against float64 in a process of its own with a time
limit, then those that are right are timed in turns (`timing.py`), all calls in CUDA graphs. `--peers` is a folder with
`peers_load.py`; without it FlashMLA is left out. `--only a,b` names variants.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from timing import graphed, seconds

from tilewise.backends.hopper.kernel import OPTIONS
from tilewise.backends.hopper.mla.combine import combine
from tilewise.backends.hopper.mla.entry import latent_decode
from tilewise.backends.hopper.mla.launch import Latent, spec_of

BF16 = torch.bfloat16
SCALE = 576**-0.5
MARK = "REPORT "
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "not ahead": {"ahead": False},
    "gate1": {"gate": 1},
    "gate0": {"gate": 0},
    "two P": {"p_buffers": 2},
    "two P gate1": {"p_buffers": 2, "gate": 1},
    "width 64": {"width": 64},
    "width 256": {"width": 256},
    "early wait": {"late_wait": False},
    "no touch": {"touch": False},
    "one wait": {"wait_values": False},
}
# name: batch, keys, heads, queries
ROWS = {
    "128 x 4k, 128 heads": (128, 4096, 128, 1),
    "64 x 8k, 128 heads": (64, 8192, 128, 1),
    "32 x 4k, 128 heads, 2 queries": (32, 4096, 128, 2),
    "1 x 64k, 128 heads": (1, 65536, 128, 1),
    "128 x 4k, 16 heads": (128, 4096, 16, 1),
    "16 x 32k, 16 heads": (16, 32768, 16, 1),
}
LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 130, 1000, 4097)


class Case:
    """Inputs of a call; slots past the lengths, and pages of nobody, hold NaN."""

    def __init__(
        self, lengths: list[int], heads: int, q_len: int, page: int = 64, paged: bool = True, spread: float = 1.0
    ) -> None:
        self.lengths, self.heads, self.q_len, self.page, self.paged = lengths, heads, q_len, page, paged
        batch, most = len(lengths), max(*lengths, 1)
        self.q = torch.randn(batch, q_len, heads, 576, device="cuda", dtype=BF16).transpose(1, 2)
        self.q *= spread
        self.n = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        columns = -(-most // page)
        if paged:
            order = torch.randperm(batch * columns + 3, device="cuda", dtype=torch.int32)
            self.table: torch.Tensor | None = order[: batch * columns].view(batch, columns).contiguous()
            self.cache = torch.full((batch * columns + 3, page, 576), float("nan"), device="cuda", dtype=BF16)
        else:
            self.table = None
            self.cache = torch.full((batch, most + 5, 576), float("nan"), device="cuda", dtype=BF16)
        self.keys = []
        for b, n in enumerate(lengths):
            keys = torch.randn(n, 576, device="cuda", dtype=BF16)
            keys[:, :64] += torch.linspace(0, 1, max(n, 1), device="cuda", dtype=BF16)[:n, None]  # maxima that rise
            self.keys.append(keys)
            if self.table is None:
                self.cache[b, :n] = keys
            elif n:
                full = torch.full((-(-n // page) * page, 576), float("nan"), device="cuda", dtype=BF16)
                full[:n] = keys
                self.cache[self.table[b, : -(-n // page)].long()] = full.view(-1, page, 576)
                self.table[b, -(-n // page) :] = -7  # never looked up

    def latent(self, **ways: Any) -> Latent:
        spec = spec_of(self.q, self.page, paged=self.paged, causal=True, lengths=True, lse=True, **ways)
        batch, heads, q_len = self.q.shape[:3]
        return Latent(spec, batch, heads, q_len, self.cache.shape[1])

    def call(self, latent: Latent, work: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full((*self.q.shape[:3], 512), float("nan"), device="cuda", dtype=BF16)
        lse = torch.full(self.q.shape[:3], float("nan"), device="cuda")
        latent(self.q, self.cache, out, lse, self.n, self.table, SCALE, work)
        return out, lse

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        outs, sums = [], []
        for b, n in enumerate(self.lengths):
            k = self.keys[b].double()
            s = self.q[b].double() @ k.T * SCALE  # [H, Lq, n]
            last = n - self.q_len + torch.arange(self.q_len, device="cuda")
            s.masked_fill_(torch.arange(n, device="cuda") > last[:, None], float("-inf"))
            lse = torch.logsumexp(s, -1) if n else torch.full(s.shape[:2], float("-inf"), device="cuda").double()
            p = torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None])
            outs.append(p @ k[:, :512])
            sums.append(lse)
        return torch.stack(outs), torch.stack(sums)


def judge(name: str, got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> str:
    """What is wrong, if anything is."""
    out, lse = got[0].double(), got[1].double()
    seen = ~want[1].isinf()
    if not torch.equal(lse.isinf(), ~seen) or lse.isnan().any():
        return f"{name}: lse is not finite where it should be, or the other way round"
    off = float((lse - want[1])[seen].abs().max()) if seen.any() else 0.0
    if off > 1e-4:
        return f"{name}: lse off by {off:.2e}"
    if out.isnan().any():
        return f"{name}: {int(out.isnan().any(-1).sum())} rows of {out[..., 0].numel()} have NaN"
    if (out[~seen] != 0).any():
        return f"{name}: rows without keys are not 0"
    worst = 0.0
    for b in range(len(out)):
        size = want[0][b].square().mean().sqrt()
        if size > 0:
            worst = max(worst, float((out[b] - want[0][b]).square().mean().sqrt() / size))
    return f"{name}: error {worst:.2e} of the output" if worst > 4e-3 else ""


def cases(full: bool) -> Any:
    """Small and awkward ones."""
    yield "batch of all lengths, 128 heads", Case(list(LENGTHS), 128, 1)
    yield "all lengths, 16 heads", Case(list(LENGTHS), 16, 1)
    yield "2 queries, 128 heads", Case(list(LENGTHS), 128, 2, spread=3.0)
    yield "4 queries, 16 heads", Case(list(LENGTHS), 16, 4, spread=3.0)
    if not full:
        return
    for batch, heads, q_len in itertools.product((1, 2, 5), (16, 64, 128), (1, 2, 3, 4)):
        lengths = [LENGTHS[(3 * batch + 5 * q_len + 7 * i + heads) % len(LENGTHS)] for i in range(batch)]
        yield f"lengths {lengths}, {heads} heads, {q_len} queries", Case(lengths, heads, q_len)
    for n in LENGTHS:
        yield f"1 x {n}", Case([n], 128, 1)
    yield "300 sequences", Case([(37 * i) % 700 for i in range(300)], 16, 1)
    yield "pages of 256", Case([1000, 4097, 3], 128, 1, page=256)
    yield "pages of 16", Case([1000, 4097, 3, 17], 128, 1, page=16)
    yield "contiguous", Case([1000, 4097, 3], 128, 2, paged=False)
    yield "96 heads", Case([1000, 300], 96, 2)
    yield "5 heads", Case([1000, 300], 5, 3)


def check(ways: dict[str, Any], full: bool) -> list[str]:
    torch.manual_seed(0)
    wrong = []
    for name, case in cases(full):
        latent = case.latent(**ways)
        work = latent.workspace("cuda")
        for x in work:
            x.fill_(float("nan"))
        text = judge(name, case.call(latent, work), case.oracle())
        if text:
            wrong.append(text)
            print(text, flush=True)
        if len(wrong) > 12:
            break
    case = Case([4097, 1000, 65, 2048, 3000], 128, 2)
    latent = case.latent(**ways)
    work = latent.workspace("cuda")
    first = case.call(latent, work)
    for i in range(50):
        again = case.call(latent, work)
        if not (torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])):
            wrong.append(f"repeat {i} differs")
            break
    return wrong


def warm(given: tuple[dict[str, Any], int, int, int, bool]) -> str:
    """Compiles one kernel into Triton's cache, without a launch."""
    ways, heads, q_len, page, paged = given
    try:
        case = Case([64], heads, q_len, page, paged)
        latent = case.latent(**ways)
        out, lse = (
            torch.empty(1, heads, q_len, 512, device="cuda", dtype=BF16),
            torch.empty(1, heads, q_len, device="cuda"),
        )
        work = latent.workspace("cuda")
        made = latent.arguments(case.q, case.cache, out, lse, case.n, case.table, SCALE, work)
        taken = {name: made[name] for name in latent_decode.arg_names}
        latent_decode.warmup(grid=(latent.programs,), **taken, **OPTIONS)
        for latent.rows in (1, 2, 4, 8) if not ways and heads == 128 and paged else ():
            combine.warmup(grid=(1,), **latent.combining(made), num_warps=4)
    except Exception as error:
        return f"{given}: {type(error).__name__}: {str(error)[:300]}"
    return ""


def time_row(name: str, variants: list[str], peers: str, budget: float) -> dict[str, Any]:
    batch, keys, heads, q_len = ROWS[name]
    torch.manual_seed(1)
    pages = batch * keys // 64
    copies = max(1, -(-300_000_000 // (pages * 64 * 1152)))
    caches = [torch.randn(pages, 64, 576, device="cuda", dtype=BF16) for _ in range(copies)]
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, -1)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, q_len, heads, 576, device="cuda", dtype=BF16)
    runs: dict[str, Any] = {}
    outs: dict[str, torch.Tensor] = {}
    for variant in variants:
        rows = q.transpose(1, 2)
        latent = Latent(
            spec_of(rows, 64, paged=True, causal=True, lengths=True, lse=True, **VARIANTS[variant]),
            batch, heads, q_len, pages * 64,
        )  # fmt: skip
        work = latent.workspace("cuda")
        out = torch.empty(batch, heads, q_len, 512, device="cuda", dtype=BF16)
        lse = torch.empty(batch, heads, q_len, device="cuda")

        def calls(latent: Any = latent, out: Any = out, lse: Any = lse, work: Any = work) -> list[Any]:
            return [
                lambda cache=cache: latent(q.transpose(1, 2), cache, out, lse, lengths, table, SCALE, work)
                for cache in caches
            ]

        runs[variant] = graphed(calls())
        runs[variant]()
        torch.cuda.synchronize()
        outs[variant] = out.clone()
        if variant == variants[0]:
            apart = copy(latent)
            apart.combines = False
            runs["not combined"] = graphed(calls(apart))
    if peers:
        try:
            sys.path.insert(0, peers)
            import peers_load

            M = peers_load.flashmla()
            views = [cache.view(pages, 64, 1, 576) for cache in caches]
            *_, plan = M.dense_decode(q, views[0], table, lengths)
            there = M.dense_decode(q, views[-1], table, lengths, plan=plan)[0].transpose(1, 2)
            runs["FlashMLA"] = graphed([lambda v=v: M.dense_decode(q, v, table, lengths, plan=plan) for v in views])
            for variant, out in outs.items():
                off = float((out.float() - there.float()).abs().max())
                if not off < 2e-2:
                    print(f"{name} / {variant}: differs from FlashMLA by {off:.3g}", flush=True)
        except Exception as error:
            print(f"FlashMLA: {type(error).__name__}: {str(error)[:200]}", flush=True)
    times = {way: t / copies for way, t in seconds(runs, 40, budget).items()}
    flops = 2 * batch * keys * heads * q_len * 1088
    size = batch * keys * 1152
    return {
        "row": name, "copies": copies,
        "us": {way: round(t * 1e6, 1) for way, t in times.items()},
        "TFLOPS": {way: round(flops / t / 1e12, 1) for way, t in times.items()},
        "TB/s": {way: round(size / t / 1e12, 2) for way, t in times.items()},
    }  # fmt: skip


def listen(args: list[str], names: list[str], limit: float) -> tuple[list[tuple[str, str]], str]:
    """This file in another process, which reports on `names` one by one: its reports, and what it said otherwise.

    If `limit` seconds pass without a report, a kernel hangs: the process is ended, and the next name has failed.
    """
    process = subprocess.Popen(
        [sys.executable, "-u", __file__, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()

    def read(stream: Any = process.stdout) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    found: list[tuple[str, str]] = []
    rest: list[str] = []
    end = time.perf_counter() + limit
    while True:
        try:
            line = lines.get(timeout=max(0.1, end - time.perf_counter()))
        except queue.Empty:
            rest.append(f"nothing for {limit:.0f} s")
            break
        if line is None:
            break
        if line.startswith(MARK):
            found.append((names[len(found)], line[len(MARK) :].strip()))
            end = time.perf_counter() + limit
        else:
            rest.append(line.rstrip())
    process.kill()
    process.wait()
    return found, "\n".join(rest)[-2000:]


def in_turn(flag: str, names: list[str], limit: float, *more: str) -> dict[str, str]:
    """Reports on all names; after one that hangs or ends its process, the others go on in a new one."""
    reports: dict[str, str] = {}
    while left := [name for name in names if name not in reports]:
        found, rest = listen([flag, ";".join(left), *more], left, limit)
        reports |= dict(found)
        if rest:
            print(rest, flush=True)
        if len(found) < len(left):
            reports[left[len(found)]] = "failed: " + rest[-300:]
    return reports


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--budget", type=float, default=3.0, help="seconds for each row")
    parser.add_argument("--check", default="")
    parser.add_argument("--time", default="")
    args = parser.parse_args()
    if args.check:
        for name in args.check.split(";"):
            wrong = check(VARIANTS[name], name == "base")
            print(MARK + (f"{len(wrong)} wrong: {wrong[0]}" if wrong else "right"), flush=True)
        return
    if args.time:
        for name in args.time.split(";"):
            print(MARK + json.dumps(time_row(name, args.only.split(";"), args.peers, args.budget)), flush=True)
        return
    start = time.perf_counter()
    names = args.only.split(",") if args.only else list(VARIANTS)
    kernels = [(VARIANTS[name], heads, 1, 64, True) for name in names for heads in (128, 16)]
    if "base" in names:
        kernels += [({}, 128, 1, 16, True), ({}, 128, 2, 64, False), ({}, 5, 3, 64, True)]
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for text in pool.map(warm, kernels):
            if text:
                print("not compiled:", text, flush=True)
    report: dict[str, Any] = {"torch": torch.__version__, "compiled_s": round(time.perf_counter() - start, 1)}
    print(f"compiled after {report['compiled_s']} s", flush=True)
    report["checks"] = in_turn("--check", names, 40)
    for name, text in report["checks"].items():
        print(f"{name}: {text}", flush=True)
    good = [
        name for name, text in report["checks"].items() if not text.startswith("failed")
    ]  # wrong ones are timed too
    print(f"checked after {time.perf_counter() - start:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    if good:
        more = [
            "--only",
            ";".join(good),
            "--budget",
            str(args.budget),
            *(["--peers", args.peers] if args.peers else []),
        ]
        for name, text in in_turn("--time", list(ROWS), 40, *more).items():
            if text.startswith("{"):
                rows.append(json.loads(text))
            else:
                print(f"{name}: {text}", flush=True)
    report["rows"] = rows
    clocks = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
    report["clocks"] = subprocess.run(
        ["nvidia-smi", clocks, "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    report["seconds"] = round(time.perf_counter() - start)
    print(report["clocks"], report["seconds"], "s")
    for r in rows:
        unit = "TB/s" if "16 heads" in r["row"] else "TFLOPS"
        print(r["row"].ljust(30), *(f"{way} {r['us'][way]}us {rate}," for way, rate in r[unit].items()))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "latent.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
