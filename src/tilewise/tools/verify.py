"""`tilewise verify`: runs the conformance suite on any device and backend.

It has the cases and properties that every backend is tested with, of gradients too if the backend has them. On a GPU
also tensors of over 2**31 elements, a thousand repeats, CUDA graphs and workspaces full of NaN. It runs in several
processes, since on a GPU most of the time is spent compiling kernels.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from .. import __version__
from ..api import attention
from ..core.atomic_write import check_target, write_or_rescue
from ..dispatch import planner
from ..errors import Unsupported
from ..state import AttentionState
from ..testing.case import Case, make
from ..testing.cases import CASES, GRADIENTS
from ..testing.check import Mismatch, check_case
from ..testing.gradient_properties import GRADIENT_PROPERTIES
from ..testing.gradients import check_gradients
from ..testing.properties import PROPERTIES, SOME, fill_free_memory, same
from . import apple, verify_gradients

Check = Callable[[str | None, str], None]
GPU_CHECKS: dict[str, Check] = {}
INTERRUPTED = 130  # a shell's exit status after Ctrl-C
QUICK = 4  # a quick run takes every 4th case


@dataclass
class Result:
    """One check: `status` is "ok", "failed" or "unsupported"."""

    name: str
    status: str
    seconds: float
    detail: str = ""


def verify(
    device: str,
    backend: str | None,
    quick: bool = False,
    jobs: int = 0,
    to: Path | None = None,
    mac: bool | None = None,
) -> int:
    """Runs everything, prints what failed and a summary; 0 if nothing did, else 1.

    Ctrl-C ends the checks, not the report: the status is then 130.

    `mac`: with the report of an Apple GPU; by default if the device is one.
    """
    check_target("--json", to)
    if backend is not None:  # refused here, not as 1,000 failed checks
        call = make(Case(B=1, H=1, Lq=8, D=64, dtype="f16"), device).checked()
        planner.choose(call.problem, backend, 1)
    mac = device == "mps" if mac is None else mac
    names = [*_names(device, quick, mac and apple.has_mlx()), *_gradient_names(device, backend, quick)]
    jobs = min(len(names), jobs or (min(16, os.cpu_count() or 1) if device == "cuda" else 1))
    start = time.perf_counter()
    results: list[Result] = []
    try:
        for result in _all(names, device, backend, jobs):
            results.append(result)
            if result.status == "failed":
                print(f"FAILED {result.name}: {result.detail}", flush=True)
            if sys.stderr.isatty() or len(results) % 50 == 0:
                end = "\r" if sys.stderr.isatty() else "\n"
                print(f"{len(results)} of {len(names)} checks", end=end, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"Interrupted. {len(results)} of {len(names)} checks done.", file=sys.stderr)
    complete = len(results) == len(names)
    count = {status: sum(r.status == status for r in results) for status in ("ok", "failed", "unsupported")}
    seconds = time.perf_counter() - start
    machine = apple.facts() if mac else {}
    what = machine.get("chip") or (
        torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    )
    named = backend or f"the best of {', '.join(planner.BACKENDS)}"
    print(
        f"{what}, {named}: {count['ok']} checks passed, {count['failed']} failed, {count['unsupported']} not supported,"
        f" in {seconds:.0f} s"
    )
    timed = []
    if mac and complete:
        timed = [*apple.times(device, backend), *(apple.mlx_times() if apple.has_mlx() else ())]
        failed = [f"{r.name}: {r.detail}" for r in results if r.status == "failed"]
        print("\n".join(apple.lines(machine, count, failed, seconds, timed)))
    if to is not None:
        report = {
            "tilewise": __version__,
            "torch": torch.__version__,
            "device": what,
            "backend": named,
            "quick": quick,
            "complete": complete,
            "seconds": round(seconds, 1),
            **count,
            **({"machine": machine, "times": [asdict(row) for row in timed]} if mac else {}),
            "checks": [asdict(r) for r in sorted(results, key=lambda r: r.name)],
        }
        write_or_rescue(to, json.dumps(report, indent=1) + "\n")
    return INTERRUPTED if not complete else 1 if count["failed"] else 0


def _names(device: str, quick: bool, with_mlx: bool = False) -> Iterator[str]:
    yield from (f"gpu:{name}" for name in (GPU_CHECKS if device == "cuda" and not quick else ()))
    yield from (f"property:{name}" for name in PROPERTIES)
    numbers = range(0, len(CASES), QUICK if quick else 1)
    yield from (f"case:{i}" for i in numbers)
    yield from (f"mlx:{i}" for i in numbers if with_mlx and apple.for_mlx(CASES[i]))


def _gradient_names(device: str, backend: str | None, quick: bool) -> Iterator[str]:
    """The gradient checks, if the device has float64 and the backend a backward pass."""
    if device == "mps" or (backend is not None and not hasattr(planner.load(backend), "supports_backward")):
        return
    if device == "cuda" and not quick:
        yield from (f"gradients_gpu:{name}" for name in verify_gradients.GPU_CHECKS)
    yield from (f"gradients_property:{name}" for name in GRADIENT_PROPERTIES)
    yield from (f"gradients:{i}" for i in range(0, len(GRADIENTS), QUICK if quick else 1))


def _all(names: list[str], device: str, backend: str | None, jobs: int) -> Iterator[Result]:
    if jobs == 1:
        yield from (_check(name, device, backend) for name in names)
        return
    # CUDA does not survive a fork.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        futures = [pool.submit(_check, name, device, backend) for name in names]
        for future in as_completed(futures):
            yield future.result()


def _one_thread() -> None:
    torch.set_num_threads(1)


def _check(name: str, device: str, backend: str | None) -> Result:
    kind, _, which = name.partition(":")
    start = time.perf_counter()
    status, detail = "ok", ""
    case = (GRADIENTS if kind == "gradients" else CASES)[int(which)] if kind in ("case", "mlx", "gradients") else None
    shown = name if case is None else f"{kind}:{case}"
    try:
        if case is not None:
            if device == "mps" and "fp8" in case.k + case.v:
                raise Unsupported("metal", "torch has no float8 on mps", "use int8")
            if kind == "gradients":
                verdict = check_gradients(case, backend, device)
            else:
                verdict = check_case(case, backend, device) if kind == "case" else apple.check_mlx(case)
            detail = f"error {verdict.error:.3g} of {verdict.bound:.3g}"
        else:
            CHECKS[kind][which](backend, device)
    except Unsupported as error:
        status, detail = "unsupported", str(error)
    except Exception as error:  # a crash is a failed check, not the end of the report
        status, detail = "failed", f"{type(error).__name__}: {error}"[:2000]
    return Result(shown, status, round(time.perf_counter() - start, 3), detail)


def _gpu(check: Check) -> Check:
    GPU_CHECKS[check.__name__] = check
    return check


@_gpu
def large_tensors(backend: str | None, device: str) -> None:
    """K and V of over 2**31 elements: the last head's result is that of the last head alone."""
    heads, rows, width = 136, 131072, 128
    kv = torch.empty(2, 1, rows, heads, width, dtype=torch.bfloat16, device=device)
    if kv[0].numel() <= 2**31:
        raise AssertionError("not large enough")
    for part in kv.unbind(0):
        for block in part.split(8192, dim=1):
            block.normal_()
    k, v = kv.transpose(2, 3)
    for Lq in (1, 40):
        q = torch.randn(1, heads, Lq, width, dtype=torch.bfloat16, device=device)
        whole = attention(q, k, v, causal=True, return_lse=True, backend=backend)
        for head in (0, heads - 1):
            one = slice(head, head + 1)
            alone = attention(
                q[:, one], k[:, one].contiguous(), v[:, one].contiguous(), causal=True, return_lse=True, backend="torch"
            )
            for a, b, bound in ((whole.out, alone.out, 0.02), (whole.lse, alone.lse, 0.001)):
                error = float((a[:, one].float() - b.float()).abs().max())
                if not error <= bound:
                    raise Mismatch(f"Lq {Lq}, head {head}: off by {error}")


@_gpu
def thousand_repeats(backend: str | None, device: str) -> None:
    cases = (
        Case(B=4, H=8, Hkv=2, Lq=500, Lk=700, D=128, dtype="bf16", causal=True, window=300),
        Case(B=4, H=8, Hkv=2, Lq=1, Lk=3000, D=128, dtype="bf16"),
    )
    for case in cases:
        inputs = make(case, device)
        first = inputs.call(backend, return_lse=True)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(1000):
            again = inputs.call(backend, return_lse=True)
            wrong += (again.out != first.out).sum() + (again.lse != first.lse).sum()
        if int(wrong):
            raise Mismatch(f"{case}: {int(wrong)} elements differed in 1000 repeats")


@_gpu
def graphs_replay(backend: str | None, device: str) -> None:
    """A captured call gives the bits of an eager one, also after inputs and lengths have changed."""
    for case in SOME:
        inputs = make(case, device)
        changes = {}
        if case.form == "varlen":
            changes = {"max_q": max(case.q_lengths), "max_k": max(case.lengths)}
        eager = inputs.call(backend, return_lse=True, **changes)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            inputs.call(backend, return_lse=True, **changes)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = inputs.call(backend, return_lse=True, **changes)
        graph.replay()
        same(f"{case} replayed", eager, captured)
        inputs.args[0].mul_(-0.5)
        graph.replay()
        same(f"{case} with another q", inputs.call(backend, return_lse=True, **changes), captured)


@_gpu
def new_threads(backend: str | None, device: str) -> None:
    """A call from a thread that has not used the GPU before gives the bits of one from the main thread."""
    for case in SOME:
        inputs = make(case, device)
        first = inputs.call(backend, return_lse=True)
        with ThreadPoolExecutor(1) as pool:
            same(f"{case} from a new thread", first, pool.submit(inputs.call, backend, return_lse=True).result())


@_gpu
def poisoned_memory(backend: str | None, device: str) -> None:
    """NaN in new memory, of outputs and workspaces, has no effect."""
    for case in SOME:
        inputs = make(case, device)
        results = []
        for fill in (0.0, float("nan")):
            fill_free_memory(device, fill)
            result = inputs.call(backend, return_lse=True)
            results.append(AttentionState(result.out.clone(), result.lse.clone()))
        same(f"{case} in memory full of NaN", *results)


CHECKS: dict[str, dict[str, Check]] = {
    "property": PROPERTIES,
    "gpu": GPU_CHECKS,
    "gradients_property": GRADIENT_PROPERTIES,
    "gradients_gpu": verify_gradients.GPU_CHECKS,
}
