"""Launches the latent kernels very often from several processes at once, and compares all results bit by bit.

    PYTHONPATH=src python benchmarks/h200/latent_stress.py --out results
    PYTHONPATH=src compute-sanitizer --tool racecheck --kernel-name kns=latent_decode \\
        python benchmarks/h200/latent_stress.py --tool "now"

Each process queues a thousand launches before it waits, so that the GPU goes from one to another in the middle of
programs. One that does not come to an end hangs, and is ended. Of results that differ it says which heads and which
keys. `naps` is the kernel's own text in which warps sleep for a while of their own, by chance, before they arrive at a
barrier or store to shared memory, after they have waited, and around reductions. Other variants take changes back.
`--tool` runs one variant twice, for a checker.
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

from tilewise.backends.gpu.launch_program import Workspaces
from tilewise.backends.gpu.target import target_of
from tilewise.backends.hopper import mla
from tilewise.dispatch import planner
from tilewise.testing.case import make
from tilewise.testing.cases import LATENT_ROWS
from tilewise.validation import calls

LENGTHS = [0, 1, 65, 130, 300]
EACH = 20  # launches of a graph
QUEUED = 50  # graphs
LIMIT = 40.0  # seconds more than its own until a process counts as hung
NAPS = '''"""Warps that are late."""

from tilewise.backends.gpu.gluon import gl, gluon

TEXT = gl.constexpr(
    "{ .reg .u32 c, w, t; .reg .pred p; mov.u32 c, %clock; mov.u32 w, %warpid; mad.lo.u32 t, w, 0x9E3779B1, c; "
    "mad.lo.u32 t, t, 0x85EBCA6B, $1; shr.u32 t, t, 20; setp.lt.u32 p, t, 1024; @p nanosleep.u32 t; mov.u32 $0, 0; }"
)


@gluon.jit
def nap():
    """One time in four, of up to a microsecond."""
    gl.inline_asm_elementwise(TEXT, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)
'''
BEFORE = re.compile(r"^ +(mbarrier\.arrive\(|[\w.\[\]()* ,-]+\.store\(|top = over_warps|l = over_warps|found = lines)")
AFTER = re.compile(r"^ +(mbarrier\.wait\(|sh\.wait\(|self\.wait\(|top = over_warps|l = over_warps)")


def with_naps(text: str) -> str:
    """A file of the kernel with `nap()` wherever a late warp could matter."""
    made = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        whole = line.count("(") == line.count(")")
        made += [f"{indent}nap()"] * bool(whole and BEFORE.match(line)) + [line]
        made += [f"{indent}nap()"] * bool(whole and AFTER.match(line))
    return "\n".join(made).replace("\nfrom triton", "\nfrom .naps import nap\nfrom triton", 1) + "\n"


DEAD = [
    ("apart(2 if a.S.narrow else 4)", "apart(4)"),
    ("apart(0 if a.S.narrow or a.S.fp8 else 1)", "apart(1)"),
    ("apart(0 if a.S.narrow else 2)", "apart(2)"),
]
REDUCED = [
    ("over_warps(sh, gl.max(s.reshape([4, 16, a.S.rows]), 1), False, C)", "gl.max(s, 0)"),
    ("over_warps(sh, gl.sum(l.reshape([4, 16, a.S.rows]), 1), True, C)", "gl.sum(l, 0)"),
]


def variants() -> dict[str, Variant]:
    folder = Path(mla.__file__).parent
    changes = {}
    for name in ("narrow", "consumer", "softmax", "epilogue", "inside", "pipeline", "producer", "gather"):
        text = (folder / f"{name}.py").read_text()
        changes[name] = [(text, with_naps(text))]
    after = {"inside": False}
    return {
        "now": Variant(), "naps": Variant(changes), "combined after": Variant(ways=after),
        "dead barriers": Variant({"pipeline": DEAD}, after),
        "the compiler's reductions": Variant({"narrow": REDUCED}, after),
        "both": Variant({"pipeline": DEAD, "narrow": REDUCED}, after),
        "64 rows": Variant(ways=after | {"rows": 64}),
    }  # fmt: skip


def inputs(name: str) -> tuple[Any, Case | None]:
    """A call as a backend sees it, and its case if there is one."""
    torch.manual_seed(0)
    if name.startswith("indices"):
        dtype = "fp8_latent/128" if "float8" in name else "bf16"
        case = next(c for c in LATENT_ROWS if c.indices == "60")
        return make(replace(case, k=dtype, v=dtype), "cuda").checked(return_lse=True), None
    lengths = [384] * 132 if name.endswith("132 x 384") else LENGTHS
    made = Case(lengths, int(name.split()[0]), 1)
    return made.checked(), made


# Processes that run at the same time: the kernel and its call.
TOGETHER = (
    ("now", "16 heads"), ("now", "16 heads, 132 x 384"), ("64 rows", "16 heads, 132 x 384"),
    ("now", "128 heads, 132 x 384"), ("now", "indices, float8"), ("triton", "16 heads, 132 x 384"),
    ("naps", "16 heads"),
)  # fmt: skip


def bound(name: str, variant: str, call: calls.Call) -> Any:
    of = variants()[variant]
    folder = FOLDER / re.sub(r"\W", "_", f"stress {variant}")
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"naps.{os.getpid()}"
    own.write_text(NAPS)
    os.replace(own, folder / "naps.py")
    launch = launcher_of(f"stress {variant}", of)
    made = launch.Launcher(planner.choose(call.problem, "hopper").problem, target_of(call.problem.device))
    made.spec = replace(made.spec, **of.ways)
    return made


def warm(given: tuple[str, str]) -> str:
    """Compiles a variant's kernels into Triton's cache."""
    try:
        call, _ = inputs(given[0])
        made = bound(*given, call)
        arguments = made.arguments(call.tensors, Workspaces(call.out.device))
        for kernel in (made.decode, made.combining):
            compile_alone(kernel, arguments)
    except Exception as error:
        return f"{given}: {type(error).__name__}: {str(error)[-300:]}"
    return ""


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def launches(name: str, variant: str, seconds: float) -> dict[str, Any]:
    """Launches for so many seconds: how many differ from the first."""
    call, case = inputs(name)
    t = call.tensors
    made = None if variant in OTHERS else bound(name, variant, call)

    def run() -> Any:
        if made is None:
            return OTHERS[variant](call, case)
        made(t)
        return t.out, t.lse

    want = [x.clone() for x in run()]
    torch.cuda.synchronize()
    wrong = judge(name, (want[0], want[1]), case.oracle()) if case is not None else ""
    rows = torch.zeros(want[0].shape[:-1], dtype=torch.int32, device="cuda")  # how often each row was another
    count = torch.zeros((), dtype=torch.int64, device="cuda")
    kept = [x.clone() for x in want]

    def once() -> None:
        got = run()
        other = torch.ne(bits(got[0]), bits(want[0])).any(-1)
        other = other | torch.ne(bits(got[1]), bits(want[1]))
        rows.add_(other)
        found = other.any()
        count.add_(found)
        for x, y in zip(kept, got, strict=True):
            x.copy_(torch.where(found, y, x))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(EACH):
            once()
    print("ready", flush=True)
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(QUEUED):
            graph.replay()
        done += QUEUED * EACH
        torch.cuda.synchronize()
    row: dict[str, Any] = {"call": name, "kernel": variant, "launches": done, "differ": int(count), "wrong": wrong}
    if int(count):
        by_head = rows.flatten(2).sum((0, 2))
        row["heads"] = {h: int(n) for h, n in enumerate(by_head.tolist()) if n}
        if case is not None and made is not None and max(case.lengths) <= 400:
            row["last"] = weights_of(case, want, kept)
    return row


def weights_of(case: Case, want: list[torch.Tensor], got: list[torch.Tensor]) -> list[dict[str, Any]]:
    """Of rows that differ: which keys have another weight, and how many times the right one."""
    found = []
    differ = torch.ne(bits(want[0]), bits(got[0])).any(-1) | torch.ne(want[1], got[1])
    for b, h, l in differ.nonzero().tolist()[:6]:
        keys = case.keys[b].double()
        s = keys @ case.q[b, h, l].double() * 576**-0.5
        w = torch.softmax(s, 0)
        ratio = torch.exp(got[1][b, h, l].double() - torch.logsumexp(s, 0))  # of the sums of weights
        change = got[0][b, h, l].double() * ratio - w @ keys[:, :512]
        delta = torch.linalg.lstsq(keys[:, :512].T, change[:, None]).solution[:, 0]
        top = (delta.abs() / w).topk(min(12, len(w))).indices.tolist()
        found.append({
            "b": b, "h": h, "lse off": float(got[1][b, h, l] - want[1][b, h, l]),
            "keys": {k: round(float(1 + delta[k] / w[k]), 3) for k in sorted(top)},
            "most": int(s.argmax()), "changed by over 10%": int(((delta / w).abs() > 0.1).sum()),
        })  # fmt: skip
    return found


def by_triton(call: calls.Call, case: Case) -> Result:
    function, args, options = case.arguments()
    state = function(*args, backend="triton", **options)
    return state.out, state.lse


OTHERS: dict[str, Callable[[Any, Any], Any]] = {"triton": by_triton}


def beside_each_other(kinds: tuple[tuple[str, str], ...], seconds: float) -> list[dict[str, Any]]:
    """A process for each, all at once."""
    command = [sys.executable, __file__, "--seconds", str(seconds), "--one"]
    started = [subprocess.Popen([*command, *kind], stdout=subprocess.PIPE, text=True) for kind in kinds]
    end = time.perf_counter() + seconds + LIMIT
    rows: list[dict[str, Any]] = []
    for (variant, name), process in zip(kinds, started, strict=True):
        try:
            said, _ = process.communicate(timeout=max(1.0, end - time.perf_counter()))
            rows.append(json.loads(said.strip().splitlines()[-1]))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            rows.append({"call": name, "kernel": variant, "hung": True})
        except (ValueError, IndexError):
            rows.append({"call": name, "kernel": variant, "wrong": f"ended with {process.returncode}"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument(
        "--before", action="store_true", help="also the kernel as it was before its barriers were fixed"
    )
    parser.add_argument("--tool", help="a variant to run twice, for a checker")
    parser.add_argument("--name", default="16 heads")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(launches(args.one[1], args.one[0], args.seconds)), flush=True)
        return
    if args.tool:
        call, case = inputs(args.name)
        made = bound(args.name, args.tool, call)
        for _ in range(2):
            made(call.tensors)
            torch.cuda.synchronize()
        text = judge(args.name, (call.tensors.out, call.tensors.lse), case.oracle()) if case is not None else ""
        print(f"{args.tool}: {text or args.name + ': right'}", flush=True)
        return
    kinds = TOGETHER + (("both", "16 heads"), ("both", "16 heads, 132 x 384")) * args.before
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for text in pool.map(warm, [(name, variant) for variant, name in kinds if variant not in OTHERS]):
            if text:
                print("not compiled:", text, flush=True)
    rows = beside_each_other(kinds, args.seconds)
    for r in rows:
        print(json.dumps(r))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "latent_stress.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
