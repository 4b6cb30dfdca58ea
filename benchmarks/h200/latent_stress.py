"""Launches the latent kernels very often and compares all results bit by bit; and with warps that are late.

    PYTHONPATH=src python benchmarks/h200/latent_stress.py --out results
    PYTHONPATH=src compute-sanitizer --tool racecheck --kernel-name kns=latent_decode \\
        python benchmarks/h200/latent_stress.py --tool "now"

Small calls of each kernel: few query rows, many heads, key indices in 16 bits and in float8. `naps` is the kernel's own
text in which warps sleep for a while of their own, by chance, before they arrive at a barrier or store to shared
memory, after they have waited, and around reductions: an order that only mostly holds would break. `equal registers`
gives all warps as many as they are launched with; `combined after` leaves fragments to a launch of its own. Each is
launched alone, and then while other processes keep the GPU busy, so that programs are interrupted. `--tool` runs one
variant twice, for a checker.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from latent import compile_alone
from latent_cases import Case, Result, judge
from latent_variants import FOLDER, Variant, launcher_of

from tilewise.backends.gpu.target import target_of
from tilewise.backends.hopper import mla
from tilewise.dispatch import planner
from tilewise.testing.case import make
from tilewise.testing.cases import LATENT_ROWS
from tilewise.validation import calls

LENGTHS = [0, 1, 65, 130, 300]
EACH = 50  # launches of a graph
NAPS = '''"""Warps that are late."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TEXT = gl.constexpr(
    "{ .reg .u32 c, w, t; .reg .pred p; mov.u32 c, %clock; mov.u32 w, %warpid; mad.lo.u32 t, w, 0x9E3779B1, c; "
    "mad.lo.u32 t, t, 0x85EBCA6B, $1; shr.u32 t, t, 20; setp.lt.u32 p, t, 1024; @p nanosleep.u32 t; mov.u32 $0, 0; }"
)


@gluon.jit
def nap():
    """One time in four, of up to a microsecond."""
    gl.inline_asm_elementwise(TEXT, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)
'''
BEFORE = re.compile(r"^ +(mbarrier\.arrive\(|[\w.\[\]()* ,-]+\.store\(|top = gl\.max|l = gl\.sum)")
AFTER = re.compile(r"^ +(mbarrier\.wait\(|sh\.wait\(|self\.wait\(|top = gl\.max|l = gl\.sum)")


def with_naps(text: str) -> str:
    """A file of the kernel with `nap()` wherever a late warp could matter."""
    made = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        whole = line.count("(") == line.count(")")
        made += [f"{indent}nap()"] * bool(whole and BEFORE.match(line)) + [line]
        made += [f"{indent}nap()"] * bool(whole and AFTER.match(line))
    return "\n".join(made).replace("\nfrom triton", "\nfrom .naps import nap\nfrom triton", 1) + "\n"


def variants() -> dict[str, Variant]:
    folder = Path(mla.__file__).parent
    changes = {}
    for name in ("narrow", "consumer", "softmax", "epilogue", "inside", "pipeline", "producer", "gather"):
        text = (folder / f"{name}.py").read_text()
        changes[name] = [(text, with_naps(text))]
    after = {"inside": False}
    made = {"now": Variant(), "naps": Variant(changes), "combined after": Variant(ways=after)}
    return made | {"equal registers": Variant(ways=after | {"consumer_regs": 168, "producer_regs": 168})}


def inputs(name: str) -> tuple[Any, Callable[[], Result] | None]:
    """A call as a backend sees it, and what gives its result in float64."""
    torch.manual_seed(0)
    if name.startswith("indices"):
        dtype = "fp8_latent/128" if "float8" in name else "bf16"
        case = next(c for c in LATENT_ROWS if c.indices == "60")
        return make(replace(case, k=dtype, v=dtype), "cuda").checked(return_lse=True), None
    case = Case(LENGTHS, int(name.split()[0]), 1)
    return case.checked(), case.oracle


NAMES = ("16 heads", "5 heads", "128 heads", "indices, bf16", "indices, float8")


def bound(name: str, variant: str, call: calls.Call) -> Any:
    of = variants()[variant]
    folder = FOLDER / re.sub(r"\W", "_", f"stress {variant}")
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"naps.{os.getpid()}"
    own.write_text(NAPS)
    os.replace(own, folder / "naps.py")
    launch = launcher_of(f"stress {variant}", of)
    made = launch.Launcher(planner.choose(call.problem, "hopper"), target_of(call.problem.device))
    made.spec = replace(made.spec, **of.ways)
    return made


def warm(given: tuple[str, str]) -> str:
    """Compiles a variant's kernels into Triton's cache."""
    try:
        call, _ = inputs(given[0])
        made = bound(*given, call)
        arguments = made.arguments(call.tensors, made.workspace(call.out.device))
        for kernel in (made.decode, made.combining):
            compile_alone(kernel, arguments)
    except Exception as error:
        return f"{given}: {type(error).__name__}: {str(error)[-300:]}"
    return ""


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def launches(name: str, variant: str, count: int, want: list[torch.Tensor]) -> dict[str, Any]:
    """`count` launches: how many numbers differ from `want`, or from the first launch where there is none yet."""
    call, oracle = inputs(name)
    made, t = bound(name, variant, call), call.tensors
    wrong = ""
    made(t)
    torch.cuda.synchronize()
    if not want:
        want += [t.out.clone(), t.lse.clone()]
        wrong = judge(name, (t.out, t.lse), oracle()) if oracle is not None else ""
    bad = torch.zeros((), dtype=torch.int64, device="cuda")

    def once() -> None:
        t.out.fill_(7.0)
        t.lse.fill_(7.0)
        made(t)
        for x, y in zip((t.out, t.lse), want, strict=True):
            bad.add_(torch.ne(bits(x), bits(y)).sum())

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(EACH):
            once()
    start = time.perf_counter()
    for i in range(count // EACH):
        graph.replay()
        if i % 20 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    seconds = round(time.perf_counter() - start, 2)
    return {"call": name, "kernel": variant, "launches": count, "differ": int(bad), "wrong": wrong, "seconds": seconds}


def busy(seconds: float) -> None:
    """Keeps the GPU busy."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    print("busy", flush=True)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            x @ x
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--tool", help="a variant to run twice, for a checker")
    parser.add_argument("--name", default=NAMES[0])
    parser.add_argument("--compile", action="store_true", help="and no more")
    parser.add_argument("--compiled", action="store_true", help="all has been compiled before")
    parser.add_argument("--busy", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.busy:
        busy(args.busy)
        return
    if args.tool:
        call, oracle = inputs(args.name)
        made = bound(args.name, args.tool, call)
        for _ in range(2):
            made(call.tensors)
            torch.cuda.synchronize()
        text = judge(args.name, (call.tensors.out, call.tensors.lse), oracle()) if oracle is not None else ""
        print(f"{args.tool}: {text or args.name + ': right'}", flush=True)
        return
    start = time.perf_counter()
    work = [(name, variant) for variant in ("now", "naps") for name in NAMES]
    work += [(NAMES[0], variant) for variant in ("equal registers", "combined after")]
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for text in pool.map(warm, [] if args.compiled else work):
            if text:
                print("not compiled:", text, flush=True)
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    if args.compile:
        return
    rows: list[dict[str, Any]] = []
    wanted: dict[tuple[str, bool], list[torch.Tensor]] = {}
    for others in (0, 3):
        command = [sys.executable, __file__, "--busy", "60"]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(others)]
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        for name, variant in work:
            count = args.count // (4 if variant == "naps" else 1) // (5 if others else 1)
            try:
                row = launches(name, variant, count, wanted.setdefault((name, variant in ("now", "naps")), []))
            except Exception as error:
                row = {"call": name, "kernel": variant, "differ": -1, "wrong": f"{type(error).__name__}: {error}"[:300]}
            rows.append({"other processes": others, **row})
            print(json.dumps(rows[-1]), flush=True)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "latent_stress.json").write_text(json.dumps(rows, indent=1) + "\n")
        for process in started:
            process.kill()
            process.wait()
    print(f"{sum(r['differ'] != 0 or bool(r['wrong']) for r in rows)} of {len(rows)} wrong", end=", ")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
