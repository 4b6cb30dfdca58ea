"""What a rank of a ring does, with real kernels and without links: three ranks of a mesh in turn, on one device.

    python benchmarks/h200/ring.py --json benchmarks/records/h200/ring.json    # under 150 s
    python benchmarks/h200/ring.py --device cpu --tokens 64 --ranks 4          # the same without a GPU: checks alone

Messages are left out, and what they would bring are random rows; all else is what `tilewise.distributed` runs: rows cut
for sending, calls, merging, sums of gradients. "calls" are the same calls alone. "ideal" is one device's time for the
whole sequence, divided by the ranks. "queued" times are behind other work, so that the host is ahead, as in a model.

Kernels are compiled first, by processes of their own. Then come the checks: merged results and sums against plain
torch, and rings of four threads that hand each other copies against one call, forward and backward. Times are the last;
they are written after each row, so that what was measured is kept.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

import tilewise
from tilewise import AttentionState
from tilewise.dispatch import planner
from tilewise.distributed import exchange, function
from tilewise.distributed.attention import prepare
from tilewise.distributed.layout import Ranks, rows_of
from tilewise.distributed.pair_call import Call, rows
from tilewise.state import add_into
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import write_json

HEADS = (32, 8, 8)
D = 128
SCHEMES = ("zigzag", "gather")
CAUSAL = {"causal": True}
ALONE = Ranks(None, 0, 1)
BEHIND = 20_000_000  # clock cycles, 10 ms: what a model has queued before
PATIENCE = 60  # seconds that a thread waits for another


class Nothing:
    """In the place of `exchange.Messages`."""

    def __init__(self, *_: Any) -> None:
        pass

    def wait(self) -> None:
        pass


def without_links(most: int, device: str, dtype: torch.dtype) -> None:
    """What comes are rows of memory that holds random numbers."""
    pool = torch.randn(most, device=device, dtype=torch.float32).to(dtype)

    def resized(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        shape = [*x.shape[:dim], size, *x.shape[dim + 1 :]]
        return pool[: torch.Size(shape).numel()].view(shape)

    exchange.Messages, exchange.resized = Nothing, resized  # type: ignore[assignment, misc]


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


# Compiling


def compile_one(scheme: str, n: int, ranks: int, rank: int, device: str) -> None:
    """All kernels of a rank, once: they are in the cache on disk then."""
    without_links(HEADS[1] * n * ranks * D, device, dtype_of(device))
    for backward in (False, True):
        of_rank(scheme, n, ranks, rank, device, backward)[0]()


def compile_all(args: argparse.Namespace) -> None:
    jobs = [(s, n, args.ranks, r, args.device) for n in args.tokens for s in SCHEMES for r in sampled(args.ranks)]
    with ProcessPoolExecutor(min(len(jobs), 12), multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(compile_one, *job) for job in jobs]:
            done.result()


# Checks


def summed(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    found = torch.empty_like(parts[0], dtype=dtype)
    add_into(parts, found)
    return found


def check_merge(device: str) -> None:
    """The kernel against plain torch: lse, and out to a few ulps; sums to the bit in float32."""
    for dtype in (torch.bfloat16, torch.float32):
        parts = []
        for i in range(5):
            out = torch.randn(2, 8, 300 + i, D, device=device).to(dtype)[:, :, :300]
            lse = 5 * torch.randn(2, 8, 300 + i, device=device)[:, :, :300]
            lse[:, :, i::7] = -torch.inf
            out[:, :, i::7] = torch.nan
            parts.append(AttentionState(out, lse))
        finite = [out.nan_to_num() for out, _ in parts]
        for _ in range(2):  # the second time by address
            got, sums = tilewise.merge(parts), [summed(finite, wide) for wide in (dtype, torch.float32)]
        asked, planner.merge_into = planner.merge_into, lambda *_: False
        want, plain = tilewise.merge(parts), [summed(finite, wide) for wide in (dtype, torch.float32)]
        planner.merge_into = asked
        assert torch.allclose(got.lse, want.lse, atol=1e-5)
        assert torch.allclose(got.out.float(), want.out.float(), atol=8 * torch.finfo(dtype).eps, rtol=0)
        assert all(torch.equal(a, b) for a, b in zip(sums, plain, strict=True))


class Mail:
    """In the place of `exchange.Messages`, for ranks that are threads of one process."""

    boxes: ClassVar[defaultdict[tuple[int, int], queue.Queue[Any]]] = defaultdict(queue.Queue)

    def __init__(self, ranks: Ranks, sends: Any, receipts: Any) -> None:
        self.rank, self.receipts = ranks.rank, receipts
        for peer, tensors in sends:
            self.boxes[self.rank, peer].put([x.clone() for x in tensors])

    def wait(self) -> None:
        for peer, tensors in self.receipts:
            for x, came in zip(tensors, self.boxes[peer, self.rank].get(timeout=PATIENCE), strict=True):
                x.copy_(came)
        self.receipts = ()


def check_ring(device: str) -> None:
    """Four ranks against one call, forward and backward."""
    dtype, ranks, n = dtype_of(device), 4, 256
    whole = [torch.randn(1, h, n * ranks, D, device=device).to(dtype) for h in HEADS]
    dout = torch.randn_like(whole[0])
    state = tilewise.attention(*whole, return_lse=True, causal=True)
    grads = tilewise.attention_backward(*whole, *state, dout, causal=True)
    theirs, exchange.Messages = exchange.Messages, Mail  # type: ignore[assignment, misc]

    def rank_of(scheme: str, rank: int) -> None:
        at = rows_of(n * ranks, Ranks(None, rank, ranks), ALONE, scheme).to(device)
        q, k, v, incoming = (x.index_select(2, at) for x in (*whole, dout))
        call, _, _ = prepare(q, k, v, Ranks(None, rank, ranks), ALONE, scheme, None, (None, None), CAUSAL)
        out, lse, _ = function.forward(call, q, k, v, {})
        found = function.backward(call, (q, k, v, out, lse, incoming, None), {}, ("q", "k", "v"))
        wanted = {"out": state.out, "lse": state.lse, "q": grads.dq, "k": grads.dk, "v": grads.dv}
        for name, got in ({"out": out, "lse": lse} | found).items():
            want = wanted[name].index_select(2, at).float()
            error, bound = (got.float() - want).abs().max() / want.abs().max(), 8 * torch.finfo(dtype).eps
            assert error <= bound, f"{scheme}, rank {rank}, {name}: {error:.3g} of the largest, bound {bound:.3g}"

    with ThreadPoolExecutor(ranks) as threads:
        for scheme in SCHEMES:
            for done in [threads.submit(rank_of, scheme, rank) for rank in range(ranks)]:
                done.result()
    exchange.Messages = theirs  # type: ignore[misc]


# Times


def timed(run: Callable[[], Any], device: str, times: int, behind: int = 0) -> float:
    """The median in milliseconds; 0 without a GPU. With `behind` clock cycles of other work the host is ahead."""
    run()
    if device == "cpu":
        return 0.0
    found = []
    for _ in range(times):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(behind)
        a.record()
        run()
        b.record()
        b.synchronize()
        found.append(a.elapsed_time(b))
    return sorted(found)[len(found) // 2]


def sampled(ranks: int) -> list[int]:
    return sorted({0, ranks // 2, ranks - 1})


def of_rank(
    scheme: str, n: int, ranks: int, rank: int, device: str, backward: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What a rank does, and its calls alone."""
    q, k, v = (torch.randn(1, h, n, D, device=device, dtype=dtype_of(device)) for h in HEADS)
    call, _, _ = prepare(q, k, v, Ranks(None, rank, ranks), ALONE, scheme, None, (None, None), CAUSAL)
    out, lse, _ = function.forward(call, q, k, v, {})
    given = (q, k, v, out, lse, torch.randn_like(q), None)
    run = partial(function.forward, call, q, k, v, {})
    if backward:
        run = partial(function.backward, call, given, {}, ("q", "k", "v"))
    return run, partial(calls, call, given, backward)


def measure(scheme: str, n: int, ranks: int, device: str, times: int, backward: bool) -> dict[str, Any]:
    whole, alone, queued, alone_queued = [], [], [], []
    for rank in sampled(ranks):
        run, only = of_rank(scheme, n, ranks, rank, device, backward)
        whole.append(timed(run, device, times))
        alone.append(timed(only, device, times))
        queued.append(timed(run, device, times, BEHIND))
        alone_queued.append(timed(only, device, times, BEHIND))
    total = [torch.randn(1, h, n * ranks, D, device=device, dtype=dtype_of(device)) for h in HEADS]
    state = tilewise.attention(*total, causal=True, return_lse=True)
    if backward:
        grads = torch.randn_like(total[0])
        ideal = timed(lambda: tilewise.attention_backward(*total, *state, grads, causal=True), device, 3)
    else:
        ideal = timed(lambda: tilewise.attention(*total, causal=True), device, 3)
    return {
        "scheme": scheme, "tokens a rank": n, "ranks": ranks, "backward": backward, "ms": max(whole),
        "calls ms": max(alone), "ideal ms": ideal / ranks, "queued ms": max(queued),
        "queued calls ms": max(alone_queued),
    }  # fmt: skip


def calls(call: Call, given: tuple[Any, ...], backward: bool) -> None:
    """The calls of a rank alone, over buffers of the right sizes."""
    q, k, v, out, lse, dout, _ = given
    group = HEADS[0] // HEADS[1]
    for kv, round, units in function.work_of(call, q, k):
        heads = (kv[0] * group, kv[1] * group)
        count = sum(size for _, _, size in round.order)
        buffer = [exchange.resized(x.narrow(1, kv[0], kv[1] - kv[0]), 2, count) for x in (k, v)]
        for unit in units:
            q_rows, k_rows = rows(unit)
            keys = [call.cut(x, k_rows) for x in buffer]
            cut = [call.cut(x, q_rows, heads) for x in (q, out, lse, dout)]
            if backward:
                call.backward(unit, (cut[0], *keys, *cut[1:], None), ("q", "k", "v"), {})
            else:
                call.forward(unit, cut[0], keys, {})


def show(found: list[dict[str, Any]]) -> None:
    print("scheme   tokens  pass       ms   calls   beside them  queued   calls   beside them   of ideal")
    for x in found:
        shares = [1 - x[f"{how}calls ms"] / x[f"{how}ms"] if x[f"{how}ms"] else 0.0 for how in ("", "queued ")]
        ideal = x["ideal ms"] / x["queued ms"] if x["queued ms"] else 0.0
        print(
            f"{x['scheme']:<8} {x['tokens a rank']:>6}  {'backward' if x['backward'] else 'forward':<8}{x['ms']:>6.2f}"
            f"{x['calls ms']:>8.2f}{shares[0]:>12.1%}{x['queued ms']:>10.2f}{x['queued calls ms']:>8.2f}"
            f"{shares[1]:>12.1%}{ideal:>12.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--budget", type=float, default=140.0, help="seconds after which no row is begun")
    args = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(0)
    if args.device != "cpu":
        compile_all(args)
        print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    check_merge(args.device)
    check_ring(args.device)
    print(f"checked after {time.perf_counter() - start:.0f} s", flush=True)
    without_links(HEADS[1] * max(args.tokens) * args.ranks * D, args.device, dtype_of(args.device))
    about = describe("python benchmarks/h200/ring.py --json benchmarks/records/h200/ring.json")
    if args.device != "cpu":
        about["gpu"] = torch.cuda.get_device_name()
    found: list[dict[str, Any]] = []
    for n in sorted(args.tokens, reverse=True):
        for scheme in SCHEMES:
            for backward in (False, True):
                if time.perf_counter() - start > args.budget:
                    print(f"left out for want of time: {scheme}, {n} tokens, backward {backward}")
                    continue
                found.append(measure(scheme, n, args.ranks, args.device, args.times, backward))
                if args.json:
                    write_json(args.json, about | {"rows": found})
    show(found)


if __name__ == "__main__":
    main()
