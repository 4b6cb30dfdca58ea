"""The Triton backward pass on a GPU: its kernels with several tiles, and whole passes beside SDPA.

    python benchmarks/h200/backward_triton.py --json backward_triton.json [--tiles] [--peers] [--only softcap]
    python benchmarks/h200/backward_triton.py --json checks.json --checks

Kernels are compiled by many processes first, which also check float32 calls of one query. Then this one times: each
kernel beside the same one with other tiles, whose gradients are compared with those of the first. A row is printed and
written as soon as it is timed. `--checks` runs the backward half of the conformance suite instead.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from timing import kernels_alone, seconds

import tilewise
from tilewise.backends.gpu.target import target_of
from tilewise.backends.triton.bwd import config as bwd_config
from tilewise.backends.triton.bwd.launch import Backward
from tilewise.backends.triton.bwd.spec import Tile
from tilewise.core.options import Options
from tilewise.testing.case import Inputs
from tilewise.testing.cases import GRADIENTS
from tilewise.testing.gradients import check_gradients
from tilewise.validation.backward import backward

TOKENS = 16384
WORKERS = 15
PATIENCE = 60.0  # seconds after which a worker that compiles begins nothing new
LIMIT = 150.0  # and after which nothing new is timed
REPEATS = 25
CUDA = torch.device("cuda", 0)
KERNELS = {"keys": "key_gradients", "queries": "query_gradients", "mask": "mask_gradients"}
CHECKED = (
    "L97-D64", "D72", "D128", "D256", "D512", "D576", "Dv", "bf16", "f16", "Hkv", "window", "chunk", "softcap", "alibi",
    "sinks", "offset", "lengths", "varlen", "mask_kindf32", "mask_kindbf16", "tile(", "strides", "scale", "everything",
)  # fmt: skip
ONE_QUERY = ("B2-H4-Hkv1-L1-Lk300-D128", "B1-H8-Hkv2-L1-Lk1000-D128", "B1-H4-Hkv4-L1-Lk1000-D256")
Tiles = dict[str, list[tuple[int, ...]]]  # of each side: (BQ, BK, warps, stages); one more: dK and dV by a launch each


@dataclass
class Row:
    """A backward pass of 16k tokens, the share of its cells that is visible, and tiles to try."""

    D: int
    L: int
    options: dict[str, Any]
    share: float = 1.0
    H: int = 0
    Hkv: int = 0
    mask: tuple[int, ...] = ()
    mask_dtype: torch.dtype = torch.bfloat16
    Dv: int = 0
    dtype: torch.dtype = torch.bfloat16
    more: str = ""  # ALiBi; many: window, softcap and sinks beside it; biases; bool mask
    tiles: Tiles = field(default_factory=dict)


CAUSAL = {"causal": True, "q_offset": 0}
BIAS: Tiles = {
    "keys": [(64, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2), (32, 128, 8, 2)],
    "queries": [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 2)],
    "mask": [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 8, 2), (64, 32, 4, 3)],
}
WIDE: Tiles = {
    "keys": [(32, 64, 8, 1), (16, 64, 8, 2), (32, 32, 8, 2)],
    "queries": [(64, 32, 8, 1), (64, 16, 8, 2), (32, 32, 4, 2)],
}
SOFTCAP: Tiles = {
    "keys": [(32, 128, 8, 3), (16, 128, 8, 3), (64, 128, 8, 2, 1)],
    "queries": [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)],
}
D256: Tiles = {
    "keys": [(32, 128, 8, 2, 1), (64, 64, 8, 2, 1), (64, 128, 8, 1, 1)],
    "queries": [(128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2)],
}
D64: Tiles = {
    "keys": [(64, 128, 8, 2), (32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2), (32, 128, 8, 2)],
    "queries": [(128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 2), (64, 32, 4, 3)],
}
D128: Tiles = {
    "keys": [(32, 128, 8, 3), (32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2), (32, 128, 8, 2)],
    "queries": D64["queries"],
}
BIASED256: Tiles = {
    "keys": [(32, 128, 8, 2, 1), (32, 64, 8, 2, 1), (32, 64, 4, 2, 1), (64, 64, 8, 2, 1)],
    "queries": [(128, 32, 8, 2), (64, 32, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2)],
}
WIDEST: Tiles = {
    "keys": [(32, 64, 8, 1), (16, 64, 8, 1), (32, 32, 8, 1), (16, 32, 8, 1), (32, 32, 4, 1)],
    "queries": [(64, 32, 8, 1), (64, 16, 8, 1), (32, 32, 8, 1), (32, 16, 8, 1), (32, 32, 4, 1)],
}
FLOAT32: Tiles = {
    "keys": [(32, 32, 4, 1), (16, 32, 4, 1), (32, 32, 8, 1), (32, 64, 8, 1), (64, 32, 8, 1)],
    "queries": [(32, 32, 4, 1), (32, 16, 4, 1), (32, 32, 8, 1), (64, 32, 8, 1)],
}
PLANE = (2048, 2048)
ROWS = {
    "bias dense D64 2k": Row(
        64, 2048, {}, 1.0, 16, mask=(8, 16, *PLANE), tiles={side: BIAS[side] for side in ("keys", "queries")}
    ),
    "bias [1,1,q,k] D64 2k": Row(64, 2048, {}, 1.0, 16, mask=(1, 1, *PLANE), tiles=BIAS),
    "D512 4k full": Row(512, 4096, {}, tiles=WIDE),
    "D512 4k causal": Row(512, 4096, CAUSAL, 0.5),
    "D512 16k full": Row(512, 16384, {}),
    "D512 16k causal": Row(512, 16384, CAUSAL, 0.5),
    "bias [1,h,q,k] D64 2k": Row(64, 2048, {}, 1.0, 16, mask=(1, 16, *PLANE)),
    "softcap D128 4k causal": Row(128, 4096, CAUSAL | {"softcap": 30.0}, 0.5, tiles=SOFTCAP),
    "D256 4k full": Row(256, 4096, {}, tiles=D256),
    "D256 4k causal": Row(256, 4096, CAUSAL, 0.5),
    "D128 4k full": Row(128, 4096, {}),
    "D128 4k causal": Row(128, 4096, CAUSAL, 0.5),
    "D64 4k full": Row(64, 4096, {}),
    "D64 4k causal": Row(64, 4096, CAUSAL, 0.5),
    "tiles: D64 4k, many options": Row(64, 4096, CAUSAL, 0.22, more="many", tiles=D64),
    "tiles: D64 4k, strides": Row(64, 4096, {"causal": True, "k_stride": 2}, 0.22, more="many", tiles=D64),
    "tiles: D64 4k, biases": Row(64, 4096, CAUSAL, 0.5, more="biases", tiles=D64),
    "tiles: D64 4k, ALiBi": Row(64, 4096, CAUSAL, 0.5, more="ALiBi", tiles=D64),
    "tiles: D64 4k, bool mask": Row(64, 4096, {}, 0.5, more="bool mask", tiles=D64),
    "tiles: D128 4k, many options": Row(128, 4096, CAUSAL, 0.22, more="many", tiles=D128),
    "tiles: D128 4k, biases": Row(128, 4096, CAUSAL, 0.5, more="biases", tiles=D128),
    "tiles: D128 4k, ALiBi": Row(128, 4096, CAUSAL, 0.5, more="ALiBi", tiles=D128),
    "tiles: D128 4k, bool mask": Row(128, 4096, {}, 0.5, more="bool mask", tiles=D128),
    "tiles: D256 4k, biases": Row(256, 4096, CAUSAL, 0.5, more="biases", tiles=BIASED256),
    "tiles: D256 4k, ALiBi": Row(256, 4096, CAUSAL, 0.5, more="ALiBi", tiles=BIASED256),
    "tiles: D576/512 4k, many options": Row(576, 4096, CAUSAL, 0.22, Dv=512, more="many", tiles=WIDEST),
    "tiles: float32 D64 4k": Row(64, 4096, CAUSAL, 0.5, 16, dtype=torch.float32, tiles=FLOAT32),
}


def made_of(row: Row) -> Any:
    """Tensors of a row, its backward call and dout. `out` and `lse` are made up: time does not depend on them."""
    H = row.H or max(4, 2048 // row.D)
    shape = (TOKENS // row.L, row.L)
    torch.manual_seed(0)
    sizes = ((H, row.D), (row.Hkv or H, row.D), (row.Hkv or H, row.Dv or row.D))
    args = tuple(torch.randn(*shape, *size, device=CUDA, dtype=row.dtype) for size in sizes)
    options = row.options | {"layout": "blhd"}
    if row.more in ("ALiBi", "many"):
        options["alibi_slopes"] = tilewise.alibi_slopes(H).to(CUDA)
    if row.more == "many":
        options |= {"window": row.L // 4, "softcap": 30.0, "sinks": torch.randn(H, device=CUDA)}
    if row.more == "biases":
        options |= {name: torch.randn(shape[0], H, row.L, device=CUDA) for name in ("q_bias", "k_bias")}
    if row.more == "bool mask":
        options["mask"] = torch.ones(row.L, row.L, dtype=torch.bool, device=CUDA).tril()
    if row.mask:
        options["mask"] = torch.randn(row.mask, device=CUDA, dtype=row.mask_dtype)
    inputs = Inputs(tilewise.attention, args, options)
    made = inputs.checked(return_lse=True)
    made.out.normal_(0, 0.1)
    dout = torch.randn_like(made.out)
    lse = torch.full((*shape, H), math.log(row.L) + 0.5 + bool(row.mask) * 0.5, device=CUDA)
    grads = ("q", "k", "v", *("mask",) * bool(row.mask), *("q_bias", "k_bias") * (row.more == "biases"))
    return args, backward(made, Options(layout="blhd"), lse, dout, None, grads), dout


def pass_of(made: Any, side: str = "", tile: tuple[int, ...] = ()) -> Backward:
    """The launches of a backward pass; one side with a tile of its own."""
    p = made.problem
    c = bwd_config.config(p, target_of(CUDA))
    if tile:
        c = replace(c, **{side: Tile(*tile[:4])}, apart=p.head_dim > 256 or len(tile) > 4)
    return Backward(p, c, target_of(CUDA))


def whole_pass(made: Any) -> Callable[[], None]:
    run = pass_of(made)
    return lambda: run(made.tensors)


def kernel_runner(made: Any, side: str, tile: tuple[int, ...]) -> tuple[Callable[[], None], int]:
    """Launches the kernels of one side alone; and how many bytes they spill for each thread."""
    found = [x for x in kernels_alone(pass_of(made, side, tile), made.tensors) if x.name == KERNELS[side]]

    def run() -> None:
        for kernel in found:
            kernel.run()

    return run, max(kernel.compiled.n_spills for kernel in found)


def flops(made: Any, share: float) -> float:
    p = made.problem
    return 5 * p.batch * p.q_len * p.kv_len * share * p.heads * (p.head_dim + p.value_dim)


def sdpa(args: Any, dout: Any, made: Any) -> Callable[[], Any] | None:
    """SDPA's backward of the same call, where it has one."""
    p, f = made.problem, made.tensors.forward
    if p.softcap or p.group > 1:
        return None
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in args)
    inputs = [q, k, v]
    mask = None
    if f.mask is not None:
        own = f.mask[tuple(slice(None if step else 1) for step in f.mask.stride())]  # broadcast dims are 1 again
        mask = own.detach().clone().requires_grad_(own.is_floating_point())
        inputs += [mask] * mask.requires_grad
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=p.rules.causal)
    return lambda: torch.autograd.grad(out, inputs, dout.transpose(1, 2), retain_graph=True)


def flex(args: Any, dout: Any, made: Any) -> Callable[[], Any] | None:
    """The same of torch's flex_attention, with a softcap."""
    if not made.problem.softcap:
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in args)
    L, cap = q.shape[2], made.problem.softcap
    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, L, L, device="cuda")
    out = torch.compile(flex_attention)(
        q, k, v, score_mod=lambda s, b, h, i, j: cap * torch.tanh(s / cap), block_mask=block
    )
    return lambda: torch.autograd.grad(out, [q, k, v], dout.transpose(1, 2), retain_graph=True)


def compiled_flex(row: Row) -> Callable[[], Any]:
    args, call, dout = made_of(row)
    run = flex(args, dout, call)
    assert run is not None
    return run


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def tried(what: str, make: Callable[..., Any], *given: Any) -> Any:
    """What `make` gives; None, and a line printed, where it fails."""
    try:
        made = make(*given)
        torch.cuda.synchronize()
        return made
    except Exception as error:
        print(f"{what}: {said(error)}", flush=True)
        return None


def chosen_cases() -> list[Any]:
    """For each word the two shortest names of cases that hold it, and all float32 cases of one query."""
    names = sorted((c for c in GRADIENTS if "Lk5000" not in str(c)), key=lambda c: len(str(c)))
    chosen = [c for word in CHECKED for c in [x for x in names if word in str(x)][:2]]
    chosen += [c for c in names if c.Lq == 1 and c.dtype == "f32" and not c.q_lengths]
    return list(dict.fromkeys(chosen))


def jobs_of(given: argparse.Namespace) -> list[tuple[str, Callable[[], Any]]]:
    """What workers do: checks, or all that is to be compiled."""
    if given.checks:
        return [(f"check {c}", lambda c=c: check_gradients(c, "triton", "cuda")) for c in chosen_cases()]
    found: list[tuple[str, Callable[[], Any]]] = [
        (f"check {c}", lambda c=c: print(f"{c}: {check_gradients(c, 'triton', 'cuda')}")) for c in GRADIENTS
        if str(c) in ONE_QUERY
    ]  # fmt: skip
    for name, row in ROWS.items():
        if given.only in name:
            found.append((name, lambda row=row: whole_pass(made_of(row)[1])()))
            if given.peers and "softcap" in row.options:
                found.append((f"{name} flex", lambda row=row: compiled_flex(row)()))
            for side, tiles in row.tiles.items() if given.tiles else ():
                for tile in tiles:
                    made = lambda row=row, side=side, tile=tile: kernel_runner(made_of(row)[1], side, tile)  # noqa: E731
                    found.append((f"{name} {side} {tile}", made))
    return found


def work_of(given: argparse.Namespace) -> None:
    """A worker's share. Prints a line for each failure."""
    start = time.perf_counter()
    jobs = jobs_of(given)[given.worker :: WORKERS]
    done = 0
    for name, job in jobs:
        if time.perf_counter() - start > PATIENCE and not given.checks:
            break
        tried(name, job)
        torch.cuda.empty_cache()
        done += 1
    if done < len(jobs):
        print(f"worker {given.worker}: {done} of {len(jobs)} done", flush=True)


def compile_and_check(given: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:]]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen([*command, "--worker", str(n)], env=env, **pipes) for n in range(WORKERS)]
    lines: list[str] = []
    for worker in workers:
        out, err = worker.communicate(timeout=400)
        lines += out.splitlines()
        if worker.returncode:
            lines.append(f"worker died: {err[-300:]}")
    return lines


def repeats(made: Any) -> str:
    """Whether repeats give the same bits."""
    run, t = whole_pass(made), made.tensors
    run()
    first = {name: x.clone() for name, x in t.gradients().items()}
    for _ in range(REPEATS):
        for x in t.gradients().values():
            x.fill_(float("nan"))
        run()
        if not all(torch.equal(x, first[name]) for name, x in t.gradients().items()):
            return "DIFFERENT BITS"
    return "same bits"


def time_side(made: Any, name: str, side: str, tiles: list[tuple[int, ...]], record: dict[str, Any]) -> str:
    """One kernel with several tiles; the first are checked against."""
    runs: dict[str, Any] = {}
    notes: dict[str, str] = {}
    gradients = {n: x for n, x in made.tensors.gradients().items() if n in {"keys": "kv", "queries": "q"}.get(side, n)}
    if side == "mask":
        gradients = {"mask": made.tensors.dmask}
    want: dict[str, Any] = {}
    for tile in tiles:
        for x in gradients.values():
            x.fill_(float("nan"))
        found = tried(f"{name} {side} {tile}", kernel_runner, made, side, tile)
        if found is None:
            continue
        run, spills = found
        got = {n: x.float().clone() for n, x in gradients.items()}
        want = want or got
        off = max(float((got[n] - x).norm() / x.norm()) for n, x in want.items())
        key = ",".join(map(str, tile))
        notes[key] = f"s{spills}" * (spills > 0) + f" WRONG {off:.2g}" * (not off < 0.01)
        runs[key] = run
    times = seconds(runs, 5, 0.5) if runs else {}
    record[f"{name} {side}"] = times
    parts = [f"{tile}:{t * 1e3:.3f}{notes[tile]}" for tile, t in sorted(times.items(), key=lambda x: x[1])]
    return f"  {side} ms: " + " ".join(parts)


def time_row(name: str, row: Row, given: argparse.Namespace, record: dict[str, Any]) -> None:
    """Times and prints one row."""
    made = tried(name, made_of, row)
    if made is None:
        return
    args, call, dout = made
    runs: dict[str, Any] = {"triton": whole_pass(call)}
    for peer, function in (("sdpa", sdpa), ("flex", flex)) if given.peers else ():
        runs[peer] = tried(f"{name} {peer}", function, args, dout, call)
    runs = {way: f for way, f in runs.items() if f and tried(f"{name} {way}", lambda f=f: f() or 1)}
    bits = tried(f"{name} bits", repeats, call) if row.mask or row.tiles else ""
    times = seconds(runs, 5, 0.6) if runs else {}
    rates = {way: flops(call, row.share) / s / 1e12 for way, s in times.items()}
    record["rows"][name] = {"seconds": times, "tflops": rates, "bits": bits}
    shown = [f"{way} {times[way] * 1e3:.3f}ms {rate:.0f}" for way, rate in rates.items()]
    print(f"{name}: {' | '.join(shown)} {bits}", flush=True)
    best = 0.0
    for side, tiles in row.tiles.items() if given.tiles else ():
        print(time_side(call, name, side, tiles, record["tiles"]), flush=True)
        best += min(record["tiles"][f"{name} {side}"].values(), default=math.inf)
    if best:
        print(f"  best tiles, without delta: {flops(call, row.share) / best / 1e12:.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tiles", action="store_true", help="time kernels with other tiles too")
    parser.add_argument("--peers", action="store_true", help="time SDPA and flex_attention too")
    parser.add_argument("--checks", action="store_true", help="conformance cases, and no times")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--worker", type=int, default=-1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker >= 0:
        work_of(given)
        return
    begin = time.perf_counter()
    given.json.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"torch": torch.__version__, "checks": compile_and_check(given), "tiles": {}, "rows": {}}
    print("\n".join(record["checks"]))
    print(f"{len(jobs_of(given))} jobs in {time.perf_counter() - begin:.0f} s", flush=True)
    for name, row in {} if given.checks else {n: r for n, r in ROWS.items() if given.only in n}.items():
        if time.perf_counter() - begin > LIMIT:
            print(f"{name}: out of time")
            continue
        time_row(name, row, given, record)
        given.json.write_text(json.dumps(record, indent=1))
        torch.cuda.empty_cache()
    given.json.write_text(json.dumps(record, indent=1))
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
