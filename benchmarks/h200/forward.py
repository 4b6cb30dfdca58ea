"""Times forms of the forward kernel beside each other, FlashAttention 4 and cuDNN, in one run and interleaved.

    python benchmarks/h200/forward.py --peers FOLDER --forms --json forward.json

`--peers` is a folder with a module `peers_load` that gives the other libraries' kernels. `--forms` adds kernels with
maxima in all tiles where the planner's have none. Processes of their own compile each form of each kind of work first
and check it on awkward sizes: against the oracle, with logits that grow and that shrink from tile to tile, with NaN in
values that some rows do not see, and for the same bits again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hopper_checks import launcher_of
from timing import ceilings, seconds
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.backends.hopper.fwd import config
from tilewise.core.options import Options
from tilewise.core.tensors import sequences
from tilewise.reference import attend, visible_cells
from tilewise.validation import calls

BF16 = torch.bfloat16
max_free = config.max_free
PACKED = (0, 5, 700, 1300, 64, 129, 999, 1500, 1100)  # tokens of the sequences of a check


@dataclass(frozen=True)
class Work:
    D: int
    H: int
    Hkv: int
    L: int
    rule: str
    Dv: int = 0

    @property
    def kind(self) -> str:
        """Works of a kind run the same kernel."""
        short = self.D == 64 and self.rule == "causal" and self.L <= config.SHORT_CAUSAL
        return f"D{self.D} {self.rule}{' short' * short}"

    def __str__(self) -> str:
        return f"{self.kind.removesuffix(' short')} {self.H}/{self.Hkv} {self.L // 1024}k"


WORKS = [
    Work(64, 32, 32, 16384, "full"), Work(64, 32, 32, 16384, "causal"), Work(64, 32, 32, 4096, "full"),
    Work(64, 32, 32, 1024, "causal"), Work(64, 32, 8, 2048, "causal"), Work(128, 16, 16, 16384, "full"),
    Work(128, 16, 16, 16384, "causal"), Work(128, 16, 16, 4096, "causal"), Work(128, 16, 16, 1024, "causal"),
    Work(128, 32, 8, 4096, "causal"), Work(192, 16, 16, 16384, "causal", 128), Work(256, 8, 8, 4096, "full"),
    Work(256, 8, 8, 16384, "full"), Work(256, 8, 8, 16384, "causal"), Work(256, 8, 8, 1024, "causal"),
    Work(64, 32, 32, 4096, "packed"), Work(128, 16, 16, 4096, "packed"), Work(64, 32, 32, 16384, "window"),
    Work(128, 16, 16, 16384, "window"), Work(64, 32, 32, 4096, "softcap"), Work(128, 16, 16, 4096, "softcap"),
    Work(256, 8, 8, 4096, "softcap"), Work(128, 16, 16, 4096, "lengths"), Work(128, 16, 16, 4096, "ALiBi"),
    Work(128, 16, 16, 4096, "bool mask"), Work(128, 16, 16, 4096, "float mask"),
    Work(128, 16, 16, 4096, "far"),
]  # fmt: skip


def rule_options(rule: str, B: int, H: int, Lq: int, Lk: int) -> dict[str, Any]:
    """The options of a rule; a mask is a window's, with rows that see nothing; "far": logits that grow by hundreds."""
    if rule in ("full", "far", "packed"):
        return {"causal": rule == "packed"}
    if rule == "lengths":
        lengths = (torch.linspace(1, 0, B) * Lk).int().cuda()
        return {"causal": True, "kv_lengths": lengths, "sinks": torch.linspace(-3, 3, H, device="cuda")}
    if rule.endswith("mask"):
        i, j = torch.arange(Lq, device="cuda")[:, None] + Lk - Lq, torch.arange(Lk, device="cuda")
        seen = (j <= i) & (i - j < 1024) & (i % 97 != 5)
        return {"mask": seen if rule == "bool mask" else torch.where(seen, (j % 7) / 7.0, -torch.inf).to(BF16)}
    if rule == "ALiBi":
        return {"causal": True, "alibi_slopes": 2.0 ** torch.linspace(-8, -1, H, device="cuda")}
    return {"causal": True} | {"window": {"window": 1024}, "softcap": {"softcap": 50.0}}.get(rule, {})


def call_of(work: Work, lengths: tuple[int, ...] = (), Lq: int = 0, grows: float = 0.0) -> Any:
    """A call with a poisoned output; for a check with `Lq` rows and logits that grow or shrink, by the keys' places."""
    g = torch.Generator("cuda").manual_seed(work.D)
    packed, B = work.rule == "packed", 3 if Lq else 16384 // work.L
    rows = sum(lengths) + 3 if packed else Lq or work.L
    keys = rows if packed else work.L
    q, k, v = (
        torch.randn(1 if packed else B, n, h, d, device="cuda", generator=g)
        for n, h, d in ((rows, work.H, work.D), (keys, work.Hkv, work.D), (keys, work.Hkv, work.Dv or work.D))
    )
    grows = 60.0 if work.rule == "far" else grows
    if grows:
        step = torch.linspace(0, 1, keys, device="cuda")
        if packed:
            step = torch.cat([torch.linspace(0, 1, n, device="cuda") for n in (*lengths, 3)])
        k *= (grows * (1 - step) if grows > 0 else -grows * step)[:, None, None] + 0.3
    q, k, v = (x.to(BF16) for x in (q, k, v))
    given = rule_options(work.rule, B, work.H, Lq or work.L, work.L)
    if packed:
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
        out = torch.full_like(q[0], float("nan"))
        return calls.varlen(
            q[0], k[0], v[0], cu, cu, Options(max_q=4096, max_k=4096, out=out, return_lse=True, **given)
        )
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype, device="cuda")
    return calls.dense(q, k, v, Options(layout="blhd", out=out, return_lse=True, **given))


def way(form: str, call: Any) -> Any:
    """A call of the kernel as the planner has it, or with maxima in all tiles."""
    config.max_free = max_free if form == "tilewise" else lambda problem: False
    return launcher_of(call)


def exact_of(call: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The oracle's output and lse; and which rows [B, H, rows] see the ninth key from the end."""
    t = call.tensors
    out, lse = torch.zeros_like(t.out, dtype=torch.float64), torch.full_like(t.lse, -torch.inf, dtype=torch.float64)
    seen = torch.zeros_like(lse, dtype=torch.bool)
    for seq in sequences(call.problem, t):
        rows = (seq.row, slice(None), slice(seq.q_start, seq.q_start + seq.q_len))
        exact = attend(seq)
        out[rows], lse[rows] = exact.out, exact.lse
        key = t.k.shape[2] - 9 - seq.kv_start
        if 0 <= key < seq.kv_len:
            seen[rows] = visible_cells(seq)[..., key]
    return out, lse, seen


# Logits that follow some of 0, and what values are multiplied by: sums of exp(88) overflow in float32 and outputs do
# not; or weights of exp(52) do not, and their products with values do.
OVERFLOWS = {"brink": (88, 1e-3), "large": (52, 1e20)}


GROWS = {"jumps": 60.0, "grows": 6.0, "shrinks": -6.0, "flat": 0.0}


def to_overflow(t: Any, logit: float, values: float) -> None:
    t.q.zero_()
    t.k.zero_()
    t.v.mul_(values)
    t.q[..., 0] = 16
    t.k[:, :, : t.k.shape[2] * 7 // 8, 0] = logit * t.q.shape[-1] ** 0.5 / 16


def check(work: Work, form: str) -> dict[str, Any]:
    """Relative errors on awkward sizes of the same kernel, and what else is wrong."""
    found: dict[str, Any] = {}
    work = replace(work, H=20, Hkv=5, L=1024 if "short" in work.kind else 4480)
    for name, grows in (*dict.fromkeys(OVERFLOWS, 0.0).items(), *GROWS.items()):
        call = call_of(work, PACKED, 600, grows)
        if name in OVERFLOWS:
            to_overflow(call.tensors, *OVERFLOWS[name])
        t, run = call.tensors, way(form, call)
        run()
        out, lse = t.out.clone(), t.lse.clone()
        exact, exact_lse, seen = exact_of(call)
        found[name] = round(float((out.double() - exact).norm() / exact.norm()), 5)
        blind = exact_lse == -torch.inf
        off = ((lse.double() - exact_lse)[~blind].abs().max() / exact_lse[~blind].abs().max()).item()
        if not off < 1e-5 or not torch.equal(blind, lse == -torch.inf) or bool((out[blind] != 0).any()):
            found[f"{name}, lse"] = f"off by {off:.2g}, or rows that see nothing"
        for _ in range(20):
            run()
            if not (torch.equal(t.out, out) and torch.equal(t.lse, lse)):
                found["repeats"] = "other bits"
    if work.rule not in ("full", "far"):
        t.v[:, :, -9] = float("nan")
        run()
        differ = (t.out != out).any(-1)
        if bool((differ & ~seen).any()) or not bool(t.out[seen].isnan().all()):
            found["hidden NaN"] = f"{int((differ & ~seen).sum())} rows have other bits"
    return found


def checked(work: Work, form: str) -> tuple[str, dict[str, Any]]:
    start = time.perf_counter()
    try:
        found = check(work, form)
    except Exception as problem:
        found = {"failed": f"{type(problem).__name__}: {str(problem)[:300]}"}
    print(f"{work.kind}, {form}: {found} ({time.perf_counter() - start:.0f} s)", flush=True)
    return f"{work.kind}, {form}", found


def checks_of(args: Any) -> dict[str, dict[str, Any]]:
    """Each form of each kind of work, as far as they are compiled in time."""
    found: dict[str, dict[str, Any]] = {}
    pool = ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn"))
    todo = {(work.kind, form): (work, form) for work in WORKS for form in forms_of(args, work)}
    jobs = [pool.submit(checked, *each) for each in todo.values()]
    try:
        for job in as_completed(jobs, timeout=args.limit):
            name, found[name] = job.result()
    except TimeoutError:
        print(f"after {args.limit} s {len(jobs) - len(found)} forms are not compiled and left out", flush=True)
    for process in list(pool._processes.values()):  # one may hang in a kernel that waits for ever
        process.kill()
    return found


def forms_of(args: Any, work: Work) -> tuple[str, ...]:
    both = args.forms and work.D < 256 and "mask" not in work.rule
    return ("tilewise", "maxima") if both else ("tilewise",)


def right(found: dict[str, Any]) -> bool:
    """Whether a form may be timed."""
    return "flat" in found and all(isinstance(x, float) and x < 4e-3 for x in found.values())


def timed(args: Any, checks: dict[str, dict[str, Any]], work: Work) -> dict[str, Any]:
    lengths = tuple(torch.linspace(64, 4096, 16).round().int().tolist())
    call = call_of(work, lengths)
    t = call.tensors
    ways = {form: way(form, call) for form in forms_of(args, work) if right(checks.get(f"{work.kind}, {form}", {}))}
    causal = work.rule == "causal"
    if work.rule in ("full", "causal") and work.D in (64, 128, 256):
        seq_major = [x.transpose(1, 2) for x in (t.q, t.k, t.v)]

        def cudnn() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    t.q, t.k, t.v, is_causal=causal, enable_gqa=True
                )

        ways["cudnn"] = cudnn
        if args.peers and work.Hkv == work.H:
            import peers_load

            fa4 = peers_load.fa4()
            ways["fa4"] = lambda: fa4.fa4_fwd(*seq_major, causal)
    for run in ways.values():
        run()
    times = seconds(ways, args.rounds, args.budget) if ways else {}
    row: dict[str, Any] = {"work": str(work), "us": {name: round(s * 1e6, 1) for name, s in times.items()}}
    if work.rule in ("full", "causal"):
        cells = work.L * (work.L + 1) / 2 if causal else work.L**2
        flops = 2 * (work.D + (work.Dv or work.D)) * (16384 // work.L) * work.H * cells
        row["TFLOPS"] = {name: round(flops / s / 1e12, 1) for name, s in times.items()}
    print(time.strftime("%X"), str(work).ljust(24), row.get("TFLOPS", row["us"]), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", help="folder of peers_load.py")
    parser.add_argument("--forms", action="store_true", help="kernels with maxima in all tiles, too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=1.5, help="seconds a work")
    parser.add_argument("--limit", type=float, default=45, help="seconds for compiling and checking")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--only", default="", help="works whose names hold this")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    WORKS[:] = [work for work in WORKS if args.only in str(work)]
    if args.peers:
        sys.path.insert(0, args.peers)
    checks = checks_of(args)
    report: dict[str, Any] = {"device": "H200", "torch": torch.__version__, "checks": checks, "ceilings": ceilings()}
    report["rows"] = []
    for work in WORKS:
        report["rows"].append(timed(args, checks, work))
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
