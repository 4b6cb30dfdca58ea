"""Times variants of latent decode in turns with FlashMLA: what a change gains, and what a part of the kernel costs.

    PYTHONPATH=src python benchmarks/h200/latent_variants.py --out results --peers DIR
    PYTHONPATH=src ncu -k regex:latent_decode -c 1 -s 1 --set full python benchmarks/h200/latent_variants.py \\
        --one "128 x 4k, 128 heads" --variant now

A variant is the kernel's own text with some lines changed, and fields of its `Spec`. Those that leave out a part on
purpose give wrong results; all others are checked before they are timed. `--one` runs a row three times, for a
profiler.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from latent_cases import SCALE, Result, cut_off, judge
from latent_rows import PEER, ROWS, Row
from timing import Way, graphed, seconds

from tilewise.backends.gpu.target import target_of
from tilewise.backends.hopper import mla
from tilewise.core.options import Options
from tilewise.core.plan import Plan
from tilewise.validation import calls

FOLDER = Path(tempfile.gettempdir()) / "latent_variants"
FEW = ("128 x 4k, 16 heads", "16 x 32k, 16 heads")
MANY = tuple(name for name in ROWS if name not in FEW)
ROWS |= {"66 x 1k, 128 heads": (66, 1024, 128, 1), "66 x 4k, 128 heads": (66, 4096, 128, 1)}
FITS = tuple(name for name in ROWS if name.startswith("66"))


@dataclass(frozen=True)
class Variant:
    changes: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    ways: dict[str, Any] = field(default_factory=dict)
    right: bool = True
    rows: tuple[str, ...] = (*MANY, *FEW)


NO_GATE = [("    mbarrier.wait(sh.scored[0], u & 1)  # exponentials", "    # exponentials")]
NOT_COMBINED = [("self.combining.compile_and_launch((c.combiners, 1), given)", "None")]
ONE_FLAG = [
    ("gl.max(higher.to(gl.int32).reshape([4, 16]), 1)", "gl.full([4], gl.max(higher.to(gl.int32), 0), gl.int32, FLAGS)")
]
RESCALED = {
    "consumer": [("    if changed != 0:\n        o = rescaled", "    if True:\n        o = rescaled")],
    "softmax": [("constexpr(8.0)", "constexpr(0.0)")],
}
NOT_COPIED = [
    ("    mbarrier.expect(full, 64 * WIDTH * 2)\n    copy(", "    mbarrier.arrive(full, count=1)\n    nothing("),
    ("    mbarrier.expect(full, 64 * 64 * 2)\n    copy(", "    mbarrier.arrive(full, count=1)\n    nothing("),
    ("@gluon.jit\ndef fill_piece(", "@gluon.jit\ndef nothing(a, desc, tile, full, pages, row, column, "
     "WIDTH: gl.constexpr):\n    pass\n\n\n@gluon.jit\ndef fill_piece("),
]  # fmt: skip
VARIANTS = {
    "now": Variant(rows=(*MANY, *FEW, *FITS)),
    "64 rows": Variant(ways={"rows": 64}, rows=FEW),
    "no gate": Variant({"consumer": NO_GATE}),
    "one flag": Variant({"consumer": ONE_FLAG}, rows=MANY),
    "128 columns": Variant(ways={"width": 128}, rows=MANY),
    "256 columns": Variant(ways={"width": 256}, rows=FEW),
    "prefetched": Variant(ways={"prefetch": True}, rows=FEW),
    "combined after": Variant(ways={"inside": False}, rows=FEW),
    "not combined": Variant({"launch": NOT_COMBINED}, {"inside": False}, rows=FEW[:1]),  # where no sequence is cut
    "always rescaled": Variant(RESCALED, rows=MANY),
    "no prefetch": Variant(ways={"prefetch": False}, rows=MANY),
    "no copies": Variant({"producer": NOT_COPIED}, right=False),
    "no exponentials": Variant({"softmax": [("p = gl.exp2(gl.fma(", "p = (gl.fma(")]}, right=False, rows=MANY),
}


def launcher_of(name: str, variant: Variant | None = None) -> Any:
    """The launch module of a variant."""
    variant, folder = variant or VARIANTS[name], FOLDER / re.sub(r"\W", "_", name)
    folder.mkdir(parents=True, exist_ok=True)
    for file in Path(mla.__file__).parent.glob("*.py"):
        text = file.read_text()
        for old, new in variant.changes.get(file.stem, ()):
            if old not in text:
                raise ValueError(f"{file.name} has no {old!r}")
            text = text.replace(old, new)
        there = folder / file.name
        if not there.exists() or there.read_text() != text:
            (folder / f"{file.name}.{os.getpid()}").write_text(text)
            os.replace(folder / f"{file.name}.{os.getpid()}", there)
    package = f"tilewise.backends.hopper.mla_{folder.name}"
    if package not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            package, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[package] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return importlib.import_module(f"{package}.launch")


def bound(name: str, row: Row, cache: torch.Tensor, table: torch.Tensor) -> tuple[Any, Any]:
    """A variant's launcher for a row, and its call."""
    pages = cache[:, :, None]
    given = (row.q.transpose(1, 2), pages, pages[..., :512], table, row.lengths)
    call = calls.paged(*given, Options(causal=True, scale=SCALE, return_lse=True))
    made = launcher_of(name).Launcher(Plan(call.problem, "hopper", "", (64, 128)), target_of(call.problem.device))
    made.spec = replace(made.spec, **VARIANTS[name].ways)
    return made, call


def ways_of(name: str, row: Row, hot: bool = False) -> list[Way]:
    table = row.table % 48 if hot else row.table  # pages that stay in L2

    def way(cache: torch.Tensor) -> Way:
        made, call = bound(name, row, cache, table)

        def run() -> Result:
            made(call.tensors)
            return call.tensors.out, call.tensors.lse

        return run

    return [way(cache) for cache in row.caches]


class Empty(Row):
    """A row without numbers, for compiling."""

    def __init__(self, name: str) -> None:
        self.batch, self.keys, self.heads, self.q_len = ROWS[name]
        pages = self.batch * self.keys // 64
        self.caches = [torch.empty(pages, 64, 576, device="cuda", dtype=torch.bfloat16)]
        self.table = torch.empty(self.batch, self.keys // 64, device="cuda", dtype=torch.int32)
        self.lengths = torch.empty(self.batch, device="cuda", dtype=torch.int32)
        self.q = torch.empty(self.batch, self.q_len, self.heads, 576, device="cuda", dtype=torch.bfloat16)


def warm(given: tuple[str, str]) -> str:
    """Compiles a variant's kernels for a row into Triton's cache."""
    name, row = given
    try:
        made, call = bound(name, (e := Empty(row)), e.caches[0], e.table)
        arguments = made.arguments(call.tensors, made.workspace(call.out.device))
        for kernel in (made.decode, made.combining):
            all_given = arguments | kernel.constants
            taken = {key: all_given[key] for key in kernel.function.arg_names}
            kernel.function.warmup(grid=(1,), **taken, **kernel.options)
    except Exception as error:
        return f"{given}: {type(error).__name__}: {str(error)[-300:]}"
    return ""


def time_row(name: str, names: list[str], peers: str, budget: float, hot: bool) -> dict[str, Any]:
    row = Row(name, peers)
    runs: dict[str, Way] = {}
    wrong: dict[str, str] = {}
    listed = [v for v in names if name in VARIANTS[v].rows]
    in_l2_too = [f"{v}, from L2" for v in ("now", PEER)] if hot and name in MANY else []
    for way in [*listed, PEER, *in_l2_too]:
        if way == PEER and not peers:
            continue
        variant, in_l2 = way.removesuffix(", from L2"), way in in_l2_too
        table = row.table
        if in_l2:
            row.table = table % 48
        try:
            made = row.peer() if variant == PEER else ways_of(variant, row)
            for call in made:
                got = tuple(x.clone() if x is not None else x for x in call())
            torch.cuda.synchronize()
            text = "" if in_l2 or (variant in VARIANTS and not VARIANTS[variant].right) else judge(way, got, row.want)
            if text:
                wrong[way] = text
            if way == "now":
                for i in range(1000):
                    again = made[-1]()
                    if not all(torch.equal(x, y) for x, y in zip(again, got, strict=True)):
                        wrong[way] = f"repeat {i} differs"
                        break
            runs[way] = graphed(made)
        except Exception as error:
            wrong[way] = f"{type(error).__name__}: {str(error)[-200:]}"
        row.table = table
    times = {way: t / row.copies for way, t in seconds(runs, 40, budget).items()}
    flops, size = 2 * row.batch * row.keys * row.heads * row.q_len * 1088, row.batch * row.keys * 1152
    return {
        "row": name, "wrong": wrong, "us": {way: round(t * 1e6, 1) for way, t in times.items()},
        "TFLOPS": {way: round(flops / t / 1e12) for way, t in times.items()},
        "TB/s": {way: round(size / t / 1e12, 2) for way, t in times.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", default="")
    parser.add_argument("--jobs", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--budget", type=float, default=2.0)
    parser.add_argument("--hot", action="store_true", help="also keys that stay in L2, and rows to fit lines to")
    parser.add_argument("--only", default=";".join(VARIANTS), help="variants, by semicolons")
    parser.add_argument("--rows", default="", help="rows that begin so, by semicolons")
    parser.add_argument("--one", help="a row to run three times")
    parser.add_argument("--variant", default="now")
    args = parser.parse_args()
    if args.one:
        row = Row(args.one, args.peers)
        for call in (row.peer() if args.variant == PEER else ways_of(args.variant, row))[:1] * 3:
            call()
        torch.cuda.synchronize()
        return
    start = time.perf_counter()
    # Rows of a kind have the same main kernel; that which combines differs by row, and not by variant.
    kinds = MANY[0], MANY[2], FEW[0]
    names = args.only.split(";")
    work = [(name, row) for name in names for row in kinds if row in VARIANTS[name].rows]
    work += [("now", row) for row in VARIANTS["now"].rows if row not in kinds]
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for text in pool.map(warm, work):
            if text:
                print("not compiled:", text, flush=True)
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    rows = []
    for name in (MANY[2], MANY[0], MANY[1], *FEW, MANY[3], *(FITS if args.hot else ())):
        if not name.startswith(tuple(args.rows.split(";"))):
            continue
        rows.append(time_row(name, names, args.peers, args.budget, args.hot))
        print(json.dumps(rows[-1]), flush=True)
    for r in rows:
        print(r["row"])
        for way, us in r["us"].items():
            rates = f"{r['TFLOPS'][way]:5} TFLOPS {r['TB/s'][way]:5} TB/s"
            print(f"  {way:26} {us:8.1f} us {rates}  {r['wrong'].get(way, '')}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "latent_variants.json").write_text(json.dumps(rows, indent=1) + "\n")
    print("lost last bits of a score:", *(f"{cut_off(heads):.2f} with {heads} heads," for heads in (16, 128)))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
