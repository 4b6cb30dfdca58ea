"""The Triton backward pass on a GPU: checked, then timed beside SDPA and, for a softcap, torch's flex_attention.

    python benchmarks/h200/backward_triton.py --json backward_triton.json [--tiles]

Every kernel is compiled and every case checked (the backward half of the conformance suite) in processes of their own
first; then all is timed in this one. `--tiles` also times dK/dV and dQ alone with other tiles.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timing import seconds

import tilewise
from tilewise.backends.gpu.target import target_of
from tilewise.backends.triton.bwd import config as bwd_config
from tilewise.backends.triton.bwd.launch import Backward
from tilewise.backends.triton.bwd.spec import Tile
from tilewise.core.options import Options
from tilewise.core.plan import Plan
from tilewise.testing.cases import GRADIENTS
from tilewise.testing.gradients import check_gradients

TOKENS = 16384
WORKERS = 15
PATIENCE = 60.0  # seconds after which a worker begins nothing new
LIMIT = 150.0  # and after which nothing new is timed
CUDA = torch.device("cuda", 0)
CHECKED = (
    "L97-D64", "D72", "D128", "D256", "D512", "D576", "Dv", "bf16", "f16", "Hkv", "window", "chunk", "softcap", "alibi",
    "sinks", "offset", "lengths", "varlen", "mask_kindf32", "mask_kindbf16", "tile(", "strides", "scale", "everything",
)  # fmt: skip
# D: (BQ, BK, warps, stages) of dK and dV (with 1 more: in a launch each), and of dQ
TILES: dict[int, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    64: ([(64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (64, 128, 4, 2), (128, 128, 8, 2),
          (64, 128, 8, 3)],
         [(128, 64, 8, 2), (64, 64, 4, 2), (128, 128, 8, 2), (128, 64, 4, 2), (64, 128, 4, 2), (128, 64, 8, 3)]),
    128: ([(64, 128, 8, 2), (32, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 3), (32, 128, 8, 3), (128, 64, 4, 1)],
          [(128, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 128, 4, 2), (128, 128, 8, 1)]),
    256: ([(64, 64, 8, 1), (64, 64, 8, 2), (32, 64, 8, 2), (32, 64, 4, 2), (64, 128, 8, 1, 1),
           (32, 128, 8, 2, 1), (64, 64, 4, 2, 1), (64, 64, 4, 1, 1)],
          [(64, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2), (128, 64, 8, 1), (64, 64, 4, 1)]),
    512: ([(32, 64, 8, 1), (16, 64, 8, 2), (16, 64, 4, 1), (32, 32, 4, 1)],
          [(64, 32, 8, 1), (64, 16, 8, 2), (64, 32, 4, 1), (32, 32, 4, 1)]),
}  # fmt: skip


def call(D: int, L: int, H: int = 0, Hkv: int = 0, grads: tuple[str, ...] = ("q", "k", "v"), **options: Any) -> Any:
    """A backward pass of 16k tokens: its problem and tensors. Forward by the default backend."""
    H = H or max(4, 2048 // D)
    lengths = options.pop("lengths", None)
    shape = (1, TOKENS) if lengths else (TOKENS // L, L)
    q, k, v = (torch.randn(*shape, n, D, device=CUDA, dtype=torch.bfloat16) for n in (H, Hkv or H, Hkv or H))
    if lengths:
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(CUDA)
        args, entry = (q[0], k[0], v[0], cu, cu), tilewise.varlen_attention
        options |= {"max_q": max(lengths), "max_k": max(lengths)}
    else:
        args, entry = (q, k, v), tilewise.attention
        options["layout"] = "blhd"
    from tilewise.testing.case import Inputs
    from tilewise.validation.backward import backward

    inputs = Inputs(entry, args, options)
    made = inputs.checked(return_lse=True)
    state = inputs.call(None, return_lse=True)
    made.out.copy_(state.out)
    dout = torch.randn_like(made.out)
    layout = Options(layout=options.get("layout", "bhld"))
    return args, backward(made, layout, state.lse, dout, None, grads), dout


def runner(made: Any, change: Any = None, only: str = "") -> Callable[[], None]:
    """Launches a backward pass; with `change` of its config, or only its kernels of a name."""
    p, t = made.problem, made.tensors
    c = bwd_config.config(p, target_of(CUDA))
    backward = Backward(Plan(p, "triton", "", (64, 64)), change(c) if change else c, target_of(CUDA))
    if not only:
        return lambda: backward(t)
    memory = backward.memory(t)
    memory["DELTA"].zero_()
    launches = [x for x in backward.launches(t, memory, {}) if x[0].function.__name__ == only]
    ready = [kernel.first(grid, given) for kernel, grid, given in launches]
    given = {n: x for _, _, arguments in launches for n, x in arguments.items() if isinstance(x, torch.Tensor)}

    def run() -> None:
        for launch in ready:
            launch([given[name].data_ptr() for name in launch.pointers])

    return run


def candidates() -> list[tuple[int, bool, str, tuple[int, ...]]]:
    return [
        (D, causal, side, tile)
        for D, sides in TILES.items()
        for side, tiles in zip(("keys", "queries"), sides, strict=True)
        for tile in tiles
        for causal in (False, True)
    ]


def candidate(D: int, causal: bool, side: str, tile: tuple[int, ...]) -> Callable[[], None]:
    _, made, _ = call(D, 4096, causal=causal, q_offset=0)
    name = "key_gradients" if side == "keys" else "query_gradients"
    apart = D > 256 or len(tile) > 4
    return runner(made, lambda c: replace(c, **{side: Tile(*tile[:4])}, apart=apart), name)


def works() -> dict[str, tuple[Callable[[], Any], float]]:
    """Calls by name, and the share of cells that is visible."""
    found: dict[str, tuple[Callable[[], Any], float]] = {}
    for D in (64, 128, 256, 512):
        for L in (1024, 4096):
            for causal in (False, True):
                word = "causal" if causal else "full"
                found[f"D{D} {L // 1024}k {word}"] = (
                    lambda D=D, L=L, causal=causal: call(D, L, causal=causal, q_offset=0), 0.5 if causal else 1.0
                )  # fmt: skip
    found["D128 16k window 1024"] = (lambda: call(128, 16384, causal=True, window=1024), 1024 / 16384)
    packed = [4096, 64, 512, 2048, 128, 1024, 4096, 256, 64, 2048, 1024, 512, 512]
    packed.append(TOKENS - sum(packed)) if sum(packed) < TOKENS else None
    share = sum(n * n for n in packed) / TOKENS**2 / 2
    found["D128 packed causal"] = (lambda: call(128, 16384, causal=True, lengths=packed), share)
    found["D128 4k causal GQA 4"] = (lambda: call(128, 4096, 32, 8, causal=True, q_offset=0), 0.5)
    found["D128 4k causal softcap"] = (lambda: call(128, 4096, causal=True, q_offset=0, softcap=30.0), 0.5)
    mask = lambda *shape: torch.randn(shape, device=CUDA, dtype=torch.bfloat16)  # noqa: E731
    every = ("q", "k", "v", "mask")
    found["D64 2k bias [1,1,q,k]"] = (lambda: call(64, 2048, 16, mask=mask(1, 1, 2048, 2048), grads=every), 1.0)
    found["D64 2k bias dense"] = (lambda: call(64, 2048, 16, mask=mask(8, 16, 2048, 2048), grads=every), 1.0)
    return found


def flops(made: Any, share: float) -> float:
    p = made.problem
    cells = TOKENS**2 if p.packed_q else p.batch * p.q_len * p.kv_len
    return 5 * cells * share * p.heads * (p.head_dim + p.value_dim)


def sdpa(args: Any, dout: Any, made: Any) -> Callable[[], Any] | None:
    """SDPA's backward of the same call, where it has one."""
    p, f = made.problem, made.tensors.forward
    if p.packed_q or p.softcap or p.rules.window != (None, None) or p.group > 1:
        return None
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in args)
    inputs = [q, k, v]
    mask = None
    if f.mask is not None:
        mask = f.mask.detach().clone().requires_grad_()
        inputs.append(mask)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=p.rules.causal)
    return lambda: torch.autograd.grad(out, inputs, dout.transpose(1, 2), retain_graph=True)


def flex(args: Any, dout: Any, made: Any) -> Callable[[], Any] | None:
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


def chosen_cases() -> list[Any]:
    """For each word the two shortest names of cases that hold it."""
    names = sorted((c for c in GRADIENTS if "Lk5000" not in str(c)), key=lambda c: len(str(c)))
    return list(dict.fromkeys(c for word in CHECKED for c in [x for x in names if word in str(x)][:2]))


def work_of(index: int, tiles: bool) -> None:
    """A worker's share: compiles, then checks. Prints a line for each failure."""
    start = time.perf_counter()
    jobs: list[tuple[str, Callable[[], Any]]] = []
    for name, (make, _) in works().items():
        jobs.append((name, lambda make=make: runner(make()[1])()))
    if tiles:
        jobs += [(f"tile {x}", lambda x=x: candidate(*x)()) for x in candidates()]
    jobs += [(f"check {c}", lambda c=c: check_gradients(c, "triton", "cuda")) for c in chosen_cases()]
    done = 0
    for name, job in jobs[index::WORKERS]:
        if time.perf_counter() - start > PATIENCE:
            break
        try:
            job()
            torch.cuda.synchronize()
        except Exception as error:
            print(
                f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}", flush=True
            )
        done += 1
    print(f"DONE {done} of {len(jobs[index::WORKERS])}", flush=True)


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def tried(what: str, make: Callable[..., Any], *given: Any) -> Any:
    """What `make` gives; None, and a line printed, where it fails."""
    try:
        return make(*given)
    except Exception as error:
        print(f"{what}: {said(error)}", flush=True)
        return None


def repeats(made: Any) -> str:
    """Whether a hundred repeats give the same bits."""
    run, t = runner(made), made.tensors
    run()
    first = {name: x.clone() for name, x in t.gradients().items()}
    for _ in range(100):
        for x in t.gradients().values():
            x.fill_(float("nan"))
        run()
        if not all(torch.equal(x, first[name]) for name, x in t.gradients().items()):
            return "DIFFERENT BITS"
    return "same bits"


def time_tiles(failed: set[str], record: dict[str, Any]) -> list[str]:
    lines = []
    for D in TILES:
        for side in ("keys", "queries"):
            for causal in (False, True):
                name = f"D{D} {side} {'causal' if causal else 'full'}"
                runs: dict[str, Any] = {}
                for x in candidates():
                    if x[:3] == (D, causal, side) and f"tile {x}" not in failed:
                        runs[str(x[3])] = tried(f"tile {x}", candidate, *x)
                runs = {tile: run for tile, run in runs.items() if run}
                times = seconds(runs, 4, 1.0) if runs else {}
                record[name] = times
                best = " ".join(f"{tile}:{t * 1e3:.3f}" for tile, t in sorted(times.items(), key=lambda x: x[1]))
                lines.append(f"{name} ms: {best}")
                runs.clear()
                torch.cuda.empty_cache()
    return lines


def time_work(name: str, make: Callable[[], Any], share: float, record: dict[str, Any]) -> str:
    made = tried(name, make)
    if made is None:
        return f"{name}: failed"
    args, backward, dout = made
    runs = {"triton": tried(name, runner, backward)}
    for peer, function in (("sdpa", sdpa), ("flex", flex)):
        runs[peer] = tried(f"{name} {peer}", function, args, dout, backward)
    bits = tried(f"{name} bits", repeats, backward) if "4k" in name or "bias" in name else ""
    runs = {way: run for way, run in runs.items() if run}
    times = seconds(runs, 6, 1.0) if runs else {}
    rates = {way: flops(backward, share) / s / 1e12 for way, s in times.items()}
    record[name] = {"seconds": times, "tflops": rates, "bits": bits}
    torch.cuda.empty_cache()
    return f"{name}: " + " | ".join(f"{way} {times[way] * 1e3:.3f}ms {r:.0f}" for way, r in rates.items()) + f" {bits}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tiles", action="store_true", help="time other tiles too")
    parser.add_argument("--worker", type=int, default=-1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker >= 0:
        work_of(given.worker, given.tiles)
        return
    begin = time.perf_counter()
    command = [sys.executable, "-W", "ignore", __file__, "--json", str(given.json)] + ["--tiles"] * given.tiles
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen([*command, "--worker", str(n)], env=env, **pipes) for n in range(WORKERS)]
    checks: list[str] = []
    for worker in workers:
        out, err = worker.communicate(timeout=400)
        checks += out.splitlines() or [f"worker died: {err[-300:]}"]
    print("\n".join(checks))
    print(f"compiled and checked in {time.perf_counter() - begin:.0f} s", flush=True)
    record: dict[str, Any] = {"checks": checks, "tiles": {}, "works": {}}
    lines = time_tiles({line.split(": ")[0] for line in checks}, record["tiles"]) if given.tiles else []
    for name, (make, share) in works().items():
        if time.perf_counter() - begin > LIMIT:
            lines.append("out of time")
            break
        lines.append(time_work(name, make, share, record["works"]))
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(record, indent=1))
    print("\n".join(lines))
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
