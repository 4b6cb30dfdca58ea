"""Prefill in float8 on a Hopper GPU: is it 1.3 times as fast as in bfloat16, and how far off is it?

    PYTHONPATH=src python benchmarks/h200/fp8_prefill.py --json fp8_prefill.json [--peers DIR]

First every variant of `backends/hopper/fp8` is checked: against float64 on some rows, no more than twice as far off as
plain torch with weights rounded to float8; the same bits in 100 repeats. Then errors are stated, of normal inputs and
of inputs with an outlier column, against float64 over the numbers before they were quantised (what a caller loses) and
after (what the kernel loses). Then all variants take turns with our own bf16 and, with --peers, FlashAttention-3's
float8, in CUDA graphs; the transposition of V is part of each call. The bar: 1.3x of bf16 at 16k, full and causal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from timing import Way, ceilings, graphed, seconds

from tilewise import attention
from tilewise.backends.gpu.target import target_of
from tilewise.backends.hopper.fp8.launch import Fp8, config_of

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
TOKENS, BAR = 16384, 1.3
# name: shape of the launch, and whether P V is added up in float32 outside of the tensor cores
VARIANTS: dict[str, tuple[dict[str, int], bool]] = {
    "fp8": ({}, True),
    "fp8, 2 stages": ({"stages": 2}, True),
    "fp8, 4 stages": ({"stages": 4}, True),
    "fp8, 64 keys": ({"BN": 64, "stages": 4}, True),
    "fp8, 3 warpgroups": ({"consumers": 3}, True),
    "fp8, summed by tensor cores": ({}, False),
}
# name: head dim, heads, KV heads, queries and keys, causal
WORKS = {
    f"D{D} {H}/{Hkv} {L // 1024}k{', causal' * causal}": (D, H, Hkv, L, causal)
    for D, H, Hkv, L in ((128, 16, 16, 16384), (128, 16, 16, 4096), (128, 32, 8, 16384), (128, 16, 16, 1024),
                         (64, 32, 32, 16384), (128, 4, 4, 65536))
    for causal in (False, True)
}  # fmt: skip


def variants_of(name: str) -> list[str]:
    """Three warpgroups have registers for head dims of 64."""
    return [variant for variant in VARIANTS if "warpgroups" not in variant or WORKS[name][0] == 64]


class Inputs:
    """q, k and v with their float8 numbers and scales: of each row of q, of each head of k and v."""

    def __init__(self, name: str, outlier: float = 1.0, empty: bool = False) -> None:
        self.D, H, Hkv, L, self.causal = WORKS[name]
        B = max(1, TOKENS // L)
        self.flops = 4.0 * B * H * L * L * self.D / (2 if self.causal else 1)
        torch.manual_seed(0)
        fill = torch.empty if empty else torch.randn
        self.plain = [fill(B, h, L, self.D, device="cuda", dtype=BF16) for h in (H, Hkv, Hkv)]
        for x in self.plain[:2]:
            x[..., 7] *= outlier  # a channel that is large in q and k, as rotary models have
        self.scale = self.D**-0.5
        q, k, v = self.plain
        self.scales = [q.float().abs().amax(-1), *(x.float().abs().amax((-2, -1)) for x in (k, v))]
        self.scales = [(s / 448).clamp_min(1e-30) for s in self.scales]
        self.narrow = [(x.float() / wide(s)).to(FP8) for x, s in zip(self.plain, self.scales, strict=True)]

    def made(self, variant: str) -> Fp8:
        shape, promote = VARIANTS[variant]
        q, k, _ = self.narrow
        return Fp8(q, k, self.causal, self.scale, config_of(**shape), promote, target_of(q.device))

    def way(self, variant: str) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        kernel, (q, k, v) = self.made(variant), self.narrow

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            out = torch.empty(q.shape, dtype=BF16, device=q.device)
            lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
            kernel(q, k, v, self.scales, out, lse)
            return out, lse

        return run

    def own(self) -> Way:
        return lambda: attention(*self.plain, causal=self.causal, return_lse=True)

    def peer(self, folder: str) -> Way:
        """FlashAttention-3 with scales of 1: its time does not depend on them."""
        sys.path.insert(0, folder)
        import peers_load

        fa3 = peers_load.fa3v()
        B, _, L, _ = self.narrow[0].shape
        packed = [x.transpose(1, 2).flatten(0, 1).contiguous() for x in self.narrow]
        cu = torch.arange(B + 1, device="cuda", dtype=torch.int32) * L
        return lambda: fa3.varlen(*packed, cu, cu, L, L, self.causal, self.scale)

    def rows(self, narrow: bool, b: int, h: int, at: torch.Tensor, dtype: torch.dtype, fp8: bool) -> Any:
        """out and lse of rows `at` of a head, in `dtype`, of the numbers before or after they were quantised."""
        given = self.narrow if narrow else self.plain
        group = given[0].shape[1] // given[1].shape[1]
        q, k, v = (x[b, i].to(dtype) for x, i in zip(given, (h, h // group, h // group), strict=True))
        q = q[at]
        if narrow:
            q, k, v = (
                q * self.scales[0][b, h, at, None].to(dtype), k * self.scales[1][b, h // group].to(dtype),
                v * self.scales[2][b, h // group].to(dtype),
            )  # fmt: skip
        s = q @ k.mT * self.scale
        if self.causal:
            s = s.masked_fill(torch.arange(k.shape[0], device=s.device) > at[:, None], -torch.inf)
        p = torch.exp(s - s.amax(-1, keepdim=True))
        total = p.sum(-1, keepdim=True)
        p = (256 * p).to(FP8).to(dtype) / 256 if fp8 else p
        return p @ v / total, torch.logsumexp(s, -1)

    def compared(self, out: torch.Tensor, lse: torch.Tensor, narrow: bool) -> dict[str, float]:
        """Errors on some rows: relative (root of mean squares), the largest, and as a share of its bound."""
        B, H, L, _ = out.shape
        at = torch.linspace(0, L - 1, 48, device="cuda").long()
        error = total = 0.0
        largest = bound = off = off_bound = 0.0
        for b, h in ((0, 0), (B - 1, H - 1), (0, H // 2)):
            want, sums = self.rows(narrow, b, h, at, torch.float64, False)
            rough, rough_sums = self.rows(narrow, b, h, at, torch.float32, True)
            difference = out[b, h, at].double() - want
            error, total = error + float(difference.square().sum()), total + float(want.square().sum())
            largest = max(largest, float(difference.abs().max()))
            bound = max(bound, float((rough.to(BF16).double() - want).abs().max()))
            off = max(off, float((lse[b, h, at].double() - sums).abs().max()))
            off_bound = max(off_bound, float((rough_sums.double() - sums).abs().max()))
        # Scores come from sums of 13 bits, which torch's do not; lse is stated, not judged.
        return {
            "relative": (error / total) ** 0.5,
            "largest": largest,
            "of bound": largest / (2 * bound + 2**-8),
            "lse": off,
        }


def wide(s: torch.Tensor) -> torch.Tensor:
    return s.reshape(*s.shape, *(1,) * (4 - s.ndim))


def warm(job: tuple[str, str]) -> str:
    """Compiles a variant in a process of its own."""
    name, variant = job
    try:
        Inputs(name, empty=True).way(variant)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{name}, {variant}: {type(error).__name__}: {str(error)[-300:]}"
    return ""


def errors_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, outlier in (("normal", 1.0), ("outlier", 30.0)):
        inputs = Inputs(name, outlier)
        for way in ("fp8", "fp8, summed by tensor cores", "bf16"):
            out, lse = inputs.own()() if way == "bf16" else inputs.way(way)()
            stated = {"of the caller's numbers": inputs.compared(out, lse, False)}
            if way != "bf16":
                stated["of the quantised"] = inputs.compared(out, lse, True)
            found[f"{kind}, {way}"] = {
                what: {n: float(f"{x:.3g}") for n, x in each.items()} for what, each in stated.items()
            }
    return found


def time_work(name: str, peers: str, budget: float) -> dict[str, Any]:
    inputs = Inputs(name)
    runs: dict[str, Way] = {"bf16": graphed([inputs.own()])}
    wrong: dict[str, str] = {}
    for variant in variants_of(name):
        try:
            way = inputs.way(variant)
            out, lse = way()
            judged = inputs.compared(out, lse, True)
            if not judged["of bound"] <= 1 and VARIANTS[variant][1]:
                wrong[variant] = f"{judged['of bound']:.2f} of the bound"
            for i in range(100):
                again = way()
                if not (torch.equal(again[0], out) and torch.equal(again[1], lse)):
                    wrong[variant] = f"repeat {i} differs"
                    break
            kept: list[Any] = []
            runs[variant] = graphed([lambda: kept.append(way())])  # noqa: B023
            runs[variant]()
            torch.cuda.synchronize()
            if not torch.equal(kept[-1][0], out):
                wrong[variant] = "other bits in a graph"
        except Exception as error:
            wrong[variant] = f"{type(error).__name__}: {str(error)[-300:]}"
    if peers:
        try:
            runs["FA3 fp8"] = graphed([inputs.peer(peers)])
        except Exception as error:
            wrong["FA3 fp8"] = f"{type(error).__name__}: {str(error)[-300:]}"
    taken = seconds(runs, 20, budget)
    best = max(
        (v for v in VARIANTS if v in taken and v not in wrong), key=lambda v: taken["bf16"] / taken[v], default=""
    )
    return {
        "work": name, "wrong": wrong, "us": {way: round(1e6 * t, 1) for way, t in taken.items()},
        "TFLOPS": {way: round(inputs.flops / t / 1e12) for way, t in taken.items()},
        "of bf16": {way: round(taken["bf16"] / t, 3) for way, t in taken.items()}, "best": best,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", default="")
    parser.add_argument("--budget", type=float, default=2.0)
    parser.add_argument("--jobs", type=int, default=12)
    args = parser.parse_args()
    # Kernels are compiled for head dims, causality and variants, not for sizes.
    small = ["D128 16/16 1k", "D128 16/16 1k, causal", "D64 32/32 16k", "D64 32/32 16k, causal"]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for text in pool.map(warm, [(name, variant) for name in small for variant in variants_of(name)]):
            if text:
                print("not compiled:", text, flush=True)
    errors = {name: errors_of(name) for name in ("D128 16/16 4k", "D128 16/16 16k", "D128 4/4 64k")}
    for name, each in errors.items():
        for way, stated in each.items():
            print(name.ljust(18), way.ljust(40), stated, flush=True)
    rows = []
    for name in WORKS:
        rows.append(time_work(name, args.peers, args.budget))
        r = rows[-1]
        print(r["work"].ljust(24), *(f"{way} {n} ({r['of bf16'][way]}x)," for way, n in r["TFLOPS"].items()),
              r["wrong"] or "", flush=True)  # fmt: skip
    judged = [r["of bf16"].get(r["best"], 0.0) for r in rows if r["work"].startswith("D128 16/16 16k")]
    print("bar of", BAR, "reached" if judged and min(judged) >= BAR else "MISSED", judged)
    if args.json:
        report = {"device": torch.cuda.get_device_name(), "ceilings": ceilings(), "errors": errors, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
