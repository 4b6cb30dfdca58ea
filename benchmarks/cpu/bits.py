"""Compares two source trees of the CPU backend: the outputs of a fixed list of calls to the bit, then their speed.

    python benchmarks/cpu/bits.py --json bits.json                     # a digest for each call of this tree
    python benchmarks/cpu/bits.py --against ../before                  # and those of another tree: must be equal
    python benchmarks/cpu/bits.py --against ../before --speed 120      # and seconds of interleaved timing, as ratios

The list covers every path (prefill, decode, splits, pages, varlen, each storage format, shared prefixes, cache writes)
under every option, with 1 and 2 threads. Each call is made twice: a repeated call is launched another way. Digests
depend on the vector width of the CPU, so that they are compared in one run and never with another machine's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

KEYS = 150  # more than a tile
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 30},
    "two-sided window": {"window": (20, 3)},
    "chunk": {"chunk": 40},
    "offset": {"causal": True, "offset": 60},
    "row offsets": {"causal": True, "offset": "rows"},
    "alibi": {"alibi": "bh"},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.7},
    "negative scale": {"scale": -0.3},
    "sinks": {"sinks": True},
    "bool mask": {"mask": "bhqk"},
    "float mask": {"mask": "bhqk", "mask_kind": "f32"},
    "block mask": {"mask": "hqk", "pattern": "blocks"},
    "row mask": {"mask": "hqk", "pattern": "rows"},
}
SPEED: dict[str, dict[str, Any]] = {
    **{f"prefill {d} {n}": {"B": 1, "H": 8, "Lq": n, "D": 128, "dtype": d} for d in ("f32", "bf16", "f16")
       for n in (512, 2048)},
    **{f"decode {d} 4k": {"B": 2, "H": 32, "Hkv": 8, "Lq": 1, "Lk": 4096, "D": 128, "dtype": d}
       for d in ("f32", "f16", "bf16")},
    **{f"decode {d} 4k": {"B": 2, "H": 32, "Hkv": 8, "Lq": 1, "Lk": 4096, "D": 128, "k": f"{d}/64", "v": f"{d}/64"}
       for d in ("int8", "int4", "fp8_e4m3")},
    "pages f32 4k": {"form": "paged", "H": 32, "Hkv": 8, "Lq": 1, "D": 128, "lengths": (4096, 4000)},
    "pages int8 4k": {"form": "paged", "H": 32, "Hkv": 8, "Lq": 1, "D": 128, "lengths": (4096, 4000), "k": "int8/64",
                      "v": "int8/64"},
    "prefill D 64, causal 1024": {"B": 1, "H": 12, "Lq": 1024, "D": 64, "causal": True},
}  # fmt: skip


def case_module() -> Any:
    try:
        from tilewise.testing import case
    except ImportError:
        from tilewise.conformance import case  # type: ignore[no-redef]
    return case


def paths(Case: Any) -> dict[str, Any]:
    few = {"Hkv": 2, "Lq": 2, "Lk": KEYS}
    many = {"Hkv": 2, "Lq": 70, "Lk": KEYS}
    found = {f"decode {d}": Case(**few, D=64, dtype=d) for d in ("f32", "f16", "bf16")}
    found |= {f"prefill {d}": Case(**many, D=64, dtype=d) for d in ("f32", "f16", "bf16")}
    found |= {f"decode {d}": Case(**few, D=128, k=f"{d}/64", v=f"{d}/64") for d in ("int8", "int4", "fp8_e4m3")}
    return found | {
        "decode of few rows, bf16": Case(Hkv=1, Lq=4, Lk=KEYS, D=64, dtype="bf16"),
        "decode, widened": Case(**few, D=20),
        "decode int8, widened": Case(**few, D=72, k="int8/32", v="int8/32"),
        "decode in splits": Case(**few, D=64, split_size=64),
        "decode int8 in splits": Case(**few, D=128, k="int8/64", v="int8/64", split_size=64),
        "decode, no GQA": Case(H=3, Lq=1, Lk=KEYS, D=96),
        "prefill, wide": Case(**many, D=192, Dv=48),
        "prefill int8": Case(**many, D=128, k="int8/64", v="int4/64"),
        "pages": Case(form="paged", Hkv=2, Lq=2, D=64, lengths=(KEYS, 97)),
        "pages int8": Case(form="paged", Hkv=2, Lq=2, D=128, lengths=(KEYS, 97), k="int8/64", v="int8/64"),
        "packed pages": Case(form="paged", Hkv=2, D=64, q_lengths=(2, 40), lengths=(KEYS, 97)),
        "prefill of pages": Case(form="paged", Hkv=2, Lq=40, D=64, lengths=(KEYS, 97)),
        "varlen": Case(form="varlen", Hkv=2, D=64, q_lengths=(2, 40), lengths=(KEYS, 97)),
    }


def large(Case: Any) -> dict[str, Any]:
    """Calls that are given to two threads, split or not; values and scores at the ends of their range are in `ends`."""
    return {
        "large prefill": Case(B=1, H=4, Lq=400, D=64),
        "large causal prefill": Case(B=1, H=4, Lq=500, D=128, causal=True),
        "large bf16 prefill": Case(B=1, H=4, Lq=400, D=64, dtype="bf16", causal=True, window=100),
        "split decode": Case(B=1, H=8, Hkv=2, Lq=1, Lk=5000, D=128),
        "split decode f16": Case(B=1, H=8, Hkv=2, Lq=1, Lk=5000, D=128, dtype="f16"),
        "split decode int8": Case(B=1, H=8, Hkv=2, Lq=1, Lk=5000, D=128, k="int8/64", v="int8/64"),
        "split decode int4": Case(B=1, H=8, Hkv=2, Lq=1, Lk=5000, D=128, k="int4/128", v="int4/128"),
        "split pages": Case(form="paged", H=8, Hkv=4, Lq=1, D=128, lengths=(4000, 3001)),
        "long lengths": Case(B=3, H=8, Hkv=2, Lq=1, Lk=4000, D=64, lengths=(4000, 7, 2000)),
    }


def digest(*tensors: torch.Tensor) -> str:
    value = hashlib.sha256()
    for x in tensors:
        value.update(torch.empty(x.shape, dtype=x.dtype).copy_(x).view(torch.uint8).numpy().tobytes())
    return value.hexdigest()[:16]


def from_cases(name: str, case: Any) -> Iterator[tuple[str, str]]:
    inputs = case_module().make(case)
    options = {**inputs.options, "return_lse": True, "backend": "cpu"}
    for attempt in ("first", "again"):
        state = inputs.entry(*inputs.args, **options)
        yield f"{name}, {attempt}", digest(state.out, state.lse)


def from_ends() -> Iterator[tuple[str, str]]:
    """Logits past the bound of the max-free softmax, sums past float32's range, values that are not finite."""
    from tilewise import attention

    random = torch.Generator().manual_seed(5)
    for rows in (1, 100):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            q, k, v = (torch.randn(2, 4, n, 64, generator=random) for n in (rows, 300, 300))
            large_v = v * (1e38 if dtype is not torch.float16 else 6e4)
            odd = v.clone()
            odd[0, 1, 7, 3], odd[1, 2, 200, 5] = torch.inf, torch.nan
            bad_k = k.clone()
            bad_k[0, 0, 5, 5] = torch.inf
            for name, a, b, c in (("peaked", 40 * q, k, v), ("large", q, k, large_v), ("not finite", q, k, odd),
                                  ("infinite k", q, bad_k, v)):  # fmt: skip
                a, b, c = (x.to(dtype) for x in (a, b, c))
                for causal in (False, True):
                    state = attention(a, b, c, causal=causal, return_lse=True, backend="cpu")
                    yield f"{name}, {rows} rows, {dtype}, causal {causal}", digest(state.out, state.lse)


def from_caches() -> Iterator[tuple[str, str]]:
    """Cache writes, then attention with and without shared prefixes."""
    from tilewise import PagedKVCache

    for dtype in ("f32", "f16", "bf16", "int8", "int4", "fp8_e4m3"):
        random = torch.Generator().manual_seed(7)
        cache = PagedKVCache(400, 16, kv_heads=2, head_dim=64, dtype=dtype, device="cpu")
        first = cache.create()
        cache.append([first], *torch.randn(2, 1, 2, 600, 64, generator=random))
        ids = [first, *(cache.fork(first) for _ in range(3))]
        cache.append(ids, *torch.randn(2, 4, 2, 33, 64, generator=random))
        for rows in (1, 3):
            q = torch.randn(4, 8, rows, 64, generator=random)
            for cascade in (False, True):
                for attempt in ("first", "again"):
                    state = cache.attend(ids, q, cascade=cascade, return_lse=True)
                    yield f"cache {dtype}, {rows} rows, cascade {cascade}, {attempt}", digest(state.out, state.lse)


def digests() -> dict[str, str]:
    Case = case_module().Case
    found: dict[str, str] = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        calls = [from_cases(name, case) for name, case in large(Case).items()]
        calls += [from_ends(), from_caches()]
        for path, case in paths(Case).items():
            calls += [from_cases(f"{path}, {name}", replace(case, **option)) for name, option in OPTIONS.items()]
        for call in calls:
            found |= {f"{name}, threads {threads}": value for name, value in call}
    return found


def timed(call: Callable[[], Any], seconds: float) -> float:
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def serve() -> None:
    """What runs in each tree: a line in, a line of JSON out."""
    Case, make = case_module().Case, case_module().make
    calls: dict[str, Callable[[], Any]] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        what, name, seconds = json.loads(line)
        if what == "bits":
            answer: Any = digests()
        else:
            if name not in calls:
                inputs = make(Case(**SPEED[name]))
                calls[name] = lambda inputs=inputs: inputs.call("cpu")
                timed(calls[name], 0.0)
            answer = timed(calls[name], seconds)
        print(json.dumps(answer), flush=True)


class Tree:
    """A process that imports tilewise from one source tree."""

    def __init__(self, root: Path) -> None:
        env = os.environ | {"PYTHONPATH": str(root.resolve() / "src")}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.answer()

    def send(self, what: str, name: str = "", seconds: float = 0.0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, name, seconds]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", type=Path, help="the root of another source tree")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--speed", type=float, default=0.0, help="seconds of interleaved timing")
    parser.add_argument("--no-bits", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return 0
    here = Path(__file__).resolve().parents[2]
    trees = [Tree(root) for root in (here, *([args.against] if args.against else []))]
    record: dict[str, Any] = {}
    wrong: list[str] = []
    if not args.no_bits:
        for tree in trees:  # both at once: two cores
            tree.send("bits")
        found = [tree.answer() for tree in trees]
        record["digests"] = found[0]
        print(f"{len(found[0])} outputs of this tree")
        if args.against:
            wrong = [name for name in found[0] if found[0][name] != found[1].get(name)]
            record["differ"] = wrong
            print(f"{len(wrong)} differ from {args.against}", *wrong[:20], sep="\n  ")
    if args.speed and args.against:
        record["ratios"] = {}
        rounds = 6
        each = args.speed / len(SPEED) / len(trees) / rounds
        for name in SPEED:
            medians: list[list[float]] = [[], []]
            for i in range(rounds):
                for n in ((0, 1), (1, 0))[i % 2]:
                    trees[n].send("time", name, each)
                    medians[n].append(trees[n].answer())
            ratio = min(medians[1]) / min(medians[0])
            record["ratios"][name] = round(ratio, 3)
            print(f"{name:28} {1e3 * min(medians[0]):8.3f} ms   {ratio:.3f}x of the other's speed")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
