"""Times backward kernels beside cuDNN, FlashAttention 3 and 4, in one run and interleaved.

    python benchmarks/h200/backward.py --peers FOLDER --json backward.json

Every variant is compiled and checked against float64 first, in a process of its own: one that hangs or fails is left
out. `--peers` is a folder with a module `peers_load` that gives the other libraries' kernels; cuDNN comes with torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from timing import ceilings, seconds

BF16 = torch.bfloat16
CELLS = [(64, 32, 32), (128, 16, 16), (128, 32, 8)]
LENGTHS = (1024, 4096, 16384)
CHECKED = [  # B, H, Hkv, Lq, Lk, q_offset
    (2, 4, 2, 256, 256, 0), (1, 2, 2, 1000, 1000, 0), (1, 2, 1, 300, 500, 200), (1, 3, 3, 700, 333, -367),
    (2, 8, 8, 1024, 1024, 0),
]  # fmt: skip


def variants() -> dict[str, dict[str, Any]]:
    """Keyword arguments of `BackwardSpec`, by name; those for D=64 and D=128."""
    found: dict[str, dict[str, Any]] = {}
    for det in (True, False):
        word = "det" if det else "free"
        found[f"d128 {word}"] = {"D": 128, "BM": 64, "deterministic": det}
        found[f"d64 {word}"] = {"D": 64, "BM": 128, "deterministic": det}
    return found


SHARES = (1.0, 0.5, 2.0)  # of the planes that the heuristic would interleave


def spec(name: str, causal: bool, tail: bool = False) -> Any:
    from tilewise.backends.hopper.bwd.spec import BackwardSpec

    return BackwardSpec(dtype="bf16", causal=causal, masked=causal or tail, **variants()[name])


def reference(q: Any, k: Any, v: Any, dout: Any, scale: float, causal: bool, offset: int, dtype: Any) -> Any:
    """out, lse, dq, dk, dv by torch's autograd in `dtype`."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = (q @ k.repeat_interleave(group, 1).transpose(-1, -2)) * scale
    if causal:
        i = torch.arange(q.shape[2], device=q.device)[:, None] + offset
        s = s.masked_fill(torch.arange(k.shape[2], device=q.device)[None, :] > i, -torch.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse[..., None]).nan_to_num(0.0) if causal else torch.exp(s - lse[..., None])
    out = p @ v.repeat_interleave(group, 1)
    out.backward(dout.to(dtype))
    return out.detach(), lse.detach(), q.grad, k.grad, v.grad


def check(name: str) -> str:
    """Compiles and checks a variant; the worst error against torch's own in bfloat16."""
    from tilewise.backends.hopper.bwd import launch

    worst, repeats = 0.0, 0
    D = variants()[name]["D"]
    for causal in (False, True):
        for B, H, Hkv, Lq, Lk, offset in CHECKED:
            if not causal:
                offset = 0
            torch.manual_seed(Lq)
            make = lambda h, n: (2 * torch.randn(B, n, h, D, device="cuda")).to(BF16).transpose(1, 2)  # noqa: E731, B023
            q, k, v, dout = make(H, Lq), make(Hkv, Lk), make(Hkv, Lk), make(H, Lq)
            scale = D**-0.5
            with torch.enable_grad():
                want = reference(q, k, v, dout, scale, causal, offset, torch.float64)
                plain = reference(q, k, v, dout, scale, causal, offset, BF16)
            out, lse = want[0].to(BF16), want[1].float()
            s = spec(name, causal, bool(Lk % 128))
            got = launch.run(q, k, v, out, lse, dout, scale, offset, s)
            torch.cuda.synchronize()
            for what, g, w, t in zip(("dq", "dk", "dv"), got, want[2:], plain[2:], strict=True):
                if not torch.isfinite(g).all():
                    return f"{what} not finite: causal {causal} {B, H, Hkv, Lq, Lk}"
                t = t.nan_to_num(0.0)
                ours, theirs = ((x.double() - w).pow(2).mean().sqrt().item() for x in (g, t))
                ratio = ours / (theirs + 2**-9 * w.pow(2).mean().sqrt().item() + 1e-30)
                if ratio > 1.5:
                    return f"{what} off by {ratio:.3g}: causal {causal} {B, H, Hkv, Lq, Lk}"
                worst = max(worst, ratio)
            if s.deterministic:
                for _ in range(5):
                    again = launch.run(q, k, v, out, lse, dout, scale, offset, s)
                    if not all(torch.equal(x, y) for x, y in zip(got, again, strict=True)):
                        return f"bits differ: causal {causal} {B, H, Hkv, Lq, Lk}"
                    repeats += 1
    return f"ok {worst:.2f}, {repeats} repeats"


def checks(names: list[str], jobs: int, most: float) -> dict[str, str]:
    def one(name: str) -> str:
        command = [sys.executable, __file__, "--check", name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=most)
        except subprocess.TimeoutExpired:
            return "hangs"
        lines = done.stdout.strip().splitlines()
        return lines[-1] if done.returncode == 0 and lines else done.stderr.strip()[-600:]

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def peers(folder: str | None, q: Any, k: Any, v: Any, dout: Any, causal: bool) -> dict[str, Callable[[], Any]]:
    """Backward of other libraries; [B, L, H, D]."""
    found: dict[str, Callable[[], Any]] = {}
    if folder:
        sys.path.insert(0, folder)
        import peers_load

        for name in ("fa3x", "fa4"):
            try:
                lib = getattr(peers_load, name)()
                forward, backward = (lib.fwd, lib.bwd) if name == "fa3x" else (lib.fa4_fwd, lib.fa4_bwd)
                out, lse = forward(q, k, v, causal)
                found[name[:3]] = lambda b=backward, o=out, x=lse: b(q, k, v, o, dout, x, causal)
                if name == "fa3x":
                    found["fa3 det"] = lambda b=backward, o=out, x=lse: b(
                        q, k, v, o, dout, x, causal, deterministic=True
                    )
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:120]}")
    heads = [x.transpose(1, 2) for x in (q, k, v, dout)]
    try:
        r = torch.ops.aten._scaled_dot_product_cudnn_attention(
            heads[0], *(x.repeat_interleave(q.shape[2] // k.shape[2], 1) for x in heads[1:3]), None, True, 0.0, causal
        )
        if q.shape[2] == k.shape[2]:
            found["cudnn"] = lambda: torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                heads[3], *heads[:3], r[0], r[1], r[6], r[7], None, r[2], r[3], r[4], r[5], 0.0, causal
            )
    except Exception as error:
        print(f"  cudnn: {type(error).__name__}: {str(error)[:120]}")
    return found


def cell(args: Any, names: list[str], found: dict[str, str], D: int, H: int, Hkv: int, L: int, causal: bool) -> Any:
    """One row of the table: all ways interleaved."""
    import tilewise
    from tilewise.backends.hopper.bwd import launch

    B, scale = 16384 // L, D**-0.5
    q, k, v, dout = (torch.randn(B, L, h, D, device="cuda", dtype=BF16) for h in (H, Hkv, Hkv, H))
    ways = peers(args.peers, q, k, v, dout, causal)
    state = tilewise.attention(q, k, v, causal=causal, layout="blhd", return_lse=True, backend="hopper")
    lse, dout = state.lse.transpose(1, 2), dout.transpose(1, 2)
    heads = [x.transpose(1, 2) for x in (q, k, v, state.out)]
    for name in names:
        if found[name].startswith("ok") and variants()[name]["D"] == D:
            s1 = spec(name, causal)
            for share in SHARES if args.sections else SHARES[:1]:
                planes = max(1, min(B * Hkv, round(launch.planes_at_once(heads[0], heads[1], s1) * share)))
                word = f"{name} x{share:g}={planes}" if args.sections else name
                ways[word] = lambda s=s1, n=planes: launch.run(*heads, lse, dout, scale, 0, s, n)
    s0 = spec(next(n for n in names if variants()[n]["D"] == D), causal)
    spaces = launch.workspaces(heads[0], s0)
    ways["pre"] = lambda: launch.before(heads[3], dout, lse, scale, spaces, s0)
    ways["post"] = lambda: launch.after(spaces, torch.empty_like(heads[0]), scale, s0)
    runs = {}
    for name, way in ways.items():
        try:
            way()
            torch.cuda.synchronize()
            runs[name] = way
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}")
    times = seconds(runs, args.rounds, args.budget)
    flops = 10 * D * B * H * (L * (L + 1) / 2 if causal else L * L)
    small = {n: round(times.pop(n) * 1e6, 1) for n in ("pre", "post") if n in times}
    rates = {n: round(flops / t / 1e12, 1) for n, t in times.items()}
    best = max([r for n, r in rates.items() if n in ("fa3", "fa4", "cudnn")], default=math.nan)
    row = {"work": f"D{D} {H}/{Hkv} {L // 1024}k {'causal' if causal else 'full'}", "TFLOPS": rates}
    row |= {"best peer": best, "us": small | {"best": round(min(times.values()) * 1e6, 1)}}
    row["of the best"] = {n: round(r / best, 3) for n, r in rates.items() if n.startswith("d")}
    print(row["work"].ljust(22), *(f"{n} {r:.0f}," for n, r in rates.items()), row["of the best"], flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", help="check one variant and exit")
    parser.add_argument("--peers", help="folder of peers_load.py")
    parser.add_argument("--only", default="", help="variants whose name holds this")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds a cell")
    parser.add_argument("--sections", action="store_true", help="other numbers of interleaved planes too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.check:
        print(check(args.check))
        return
    start = time.perf_counter()
    names = [name for name in variants() if args.only in name]
    found = checks(names, min(8, os.cpu_count() or 1), 150)
    for name, word in found.items():
        print(name.ljust(28), word, flush=True)
    print(f"checked after {time.perf_counter() - start:.0f} s", flush=True)
    report: dict[str, Any] = {"device": "H200", "torch": torch.__version__, "checks": found, "rows": []}
    report["ceilings"] = ceilings()
    print(report["ceilings"])
    for D, H, Hkv in CELLS:
        for L in map(int, args.lengths.split(",")):
            for causal in (False, True):
                report["rows"].append(cell(args, names, found, D, H, Hkv, L, causal))
                if args.json:
                    args.json.write_text(json.dumps(report, indent=1) + "\n")
    report["clocks"] = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"],
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    for word in ("det", "free"):
        shares = [x for row in report["rows"] for n, x in row["of the best"].items() if n.endswith(word)]
        if shares:
            mean = math.exp(sum(map(math.log, shares)) / len(shares))
            print(f"{word}: {mean:.3f} of the best peer on average, lowest {min(shares):.3f}, {len(shares)} cells")
    print(report["clocks"], f"{time.perf_counter() - start:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
