"""What a rank of a ring does, with real kernels and without links: three ranks of a mesh in turn, on one device.

    python benchmarks/h200/ring.py --json ring.json

Messages are left out, and what they would bring are random rows; all else is what `tilewise.distributed` runs: rows cut
for sending, calls, merging, sums of gradients. "calls" are the same calls alone. "ideal" is one device's time for the
whole sequence, divided by the ranks. Results of the merge kernel are compared with plain torch first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise import AttentionState
from tilewise.dispatch import planner
from tilewise.distributed import exchange, function
from tilewise.distributed.attention import prepare
from tilewise.distributed.layout import Ranks
from tilewise.distributed.rows import Call, rows

HEADS = (32, 8, 8)
D = 128


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


def timed(run: Callable[[], Any], device: str, times: int) -> float:
    """The median in milliseconds."""
    run()
    if device == "cpu":
        return 0.0
    found = []
    for _ in range(times):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        run()
        b.record()
        b.synchronize()
        found.append(a.elapsed_time(b))
    return sorted(found)[len(found) // 2]


def check_merge(device: str) -> None:
    """The kernel against plain torch: lse, and out to a few ulps."""
    for dtype in (torch.bfloat16, torch.float32):
        parts = []
        for i in range(5):
            out = torch.randn(2, 8, 300 + i, D, device=device).to(dtype)[:, :, :300]
            lse = 5 * torch.randn(2, 8, 300 + i, device=device)[:, :, :300]
            lse[:, :, i::7] = -torch.inf
            out[:, :, i::7] = torch.nan
            parts.append(AttentionState(out, lse))
        got, ask = tilewise.merge(parts), planner.merge_states
        planner.merge_states = lambda states: None
        want = tilewise.merge(parts)
        planner.merge_states = ask
        assert torch.allclose(got.lse, want.lse, atol=1e-5)
        assert torch.allclose(got.out.float(), want.out.float(), atol=8 * torch.finfo(dtype).eps, rtol=0)


def measure(scheme: str, n: int, ranks: int, device: str, times: int, backward: bool) -> dict[str, Any]:
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    q, k, v = (torch.randn(1, h, n, D, device=device, dtype=dtype) for h in HEADS)
    dout = torch.randn_like(q)
    whole, alone = [], []
    for rank in (0, ranks // 2, ranks - 1):
        ring, inner = Ranks(None, rank, ranks), Ranks(None, 0, 1)
        call, _, _ = prepare(q, k, v, ring, inner, scheme, None, (None, None), {"causal": True})
        out, lse, _ = function.forward(call, q, k, v, {})
        given = (q, k, v, out, lse, dout, None)
        run = partial(function.forward, call, q, k, v, {})
        if backward:
            run = partial(function.backward, call, given, {}, ("q", "k", "v"))
        whole.append(timed(run, device, times))
        alone.append(timed(partial(calls, call, given, backward), device, times))
    total = [torch.randn(1, h, n * ranks, D, device=device, dtype=dtype) for h in HEADS]
    state = tilewise.attention(*total, causal=True, return_lse=True)
    if backward:
        grads = torch.randn_like(total[0])
        ideal = timed(lambda: tilewise.attention_backward(*total, *state, grads, causal=True), device, 3)
    else:
        ideal = timed(lambda: tilewise.attention(*total, causal=True), device, 3)
    return {
        "scheme": scheme, "tokens a rank": n, "ranks": ranks, "backward": backward, "ms": max(whole),
        "calls ms": max(alone), "ideal ms": ideal / ranks,
    }  # fmt: skip


def calls(call: Call, given: tuple[Any, ...], backward: bool) -> None:
    """The calls of a rank alone, over buffers of the right sizes."""
    q, k, v, out, lse, dout, _ = given
    group = HEADS[0] // HEADS[1]
    for kv in function.head_groups(call, HEADS[1]):
        heads = (kv[0] * group, kv[1] * group)
        for round, units in call.rounds:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--times", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    check_merge(args.device)
    dtype = torch.bfloat16 if args.device != "cpu" else torch.float32
    without_links(HEADS[1] * max(args.tokens) * args.ranks * D, args.device, dtype)
    found = []
    for n in args.tokens:
        for scheme in ("zigzag", "gather"):
            for backward in (False, True):
                found.append(measure(scheme, n, args.ranks, args.device, args.times, backward))
    print("scheme   tokens  pass       ms   calls   beside them   of ideal")
    for x in found:
        share = 1 - x["calls ms"] / x["ms"] if x["ms"] else 0.0
        ideal = x["ideal ms"] / x["ms"] if x["ms"] else 0.0
        print(
            f"{x['scheme']:<8} {x['tokens a rank']:>6}  {'backward' if x['backward'] else 'forward':<8}{x['ms']:>6.2f}"
            f"{x['calls ms']:>8.2f}{share:>12.1%}{ideal:>12.1%}"
        )
    if args.json:
        name = torch.cuda.get_device_name() if args.device != "cpu" else "cpu"
        args.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
