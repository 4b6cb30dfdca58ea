"""Functions of the user on a CPU: forward and backward, beside FlexAttention, dense torch and our own options.

python benchmarks/cpu/score_mods.py --json benchmarks/records/cpu/score_mods.json

`--only` takes some of its parts; "flex" compiles 20 functions by Inductor, which takes minutes.
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise import attention, varlen_attention
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.measure import interleaved
from tilewise.tools.bench.report import write_json

H, D = 8, 64
Row = dict[str, Any]
Mods = dict[str, dict[str, Any]]


def ten_mods(length: int) -> Mods:
    """Functions as attention-gym has them."""
    slopes = tilewise.alibi_slopes(H)
    document = torch.arange(length) * 8 // length
    image = (torch.arange(length) // 100) % 2  # every other hundred tokens are an image
    return {
        "causal": {"mask_mod": lambda b, h, q, k: q >= k},
        "sliding window": {"mask_mod": lambda b, h, q, k: (q >= k) & (q - k <= 256)},
        "prefix LM": {"mask_mod": lambda b, h, q, k: (q >= k) | (k < 200)},
        "documents": {"mask_mod": lambda b, h, q, k: (document[q] == document[k]) & (q >= k)},
        "natten 2D": {"mask_mod": lambda b, h, q, k: ((q // 32 - k // 32).abs() <= 6) & ((q % 32 - k % 32).abs() <= 6)},
        "dilated window": {"mask_mod": lambda b, h, q, k: (q - k >= 0) & (q - k <= 256) & ((q - k) % 2 == 0)},
        "transfusion": {
            "mask_mod": lambda b, h, q, k: (q >= k) | ((image[q] == 1) & (image[k] == 1) & (q // 100 == k // 100))
        },
        "alibi": {"score_mod": lambda s, b, h, q, k: s + slopes[h] * (k - q)},
        "tanh softcap": {"score_mod": lambda s, b, h, q, k: 20 * torch.tanh(s / 20)},
        "relative": {"score_mod": lambda s, b, h, q, k: s + (q - k)},
    }


def inputs(length: int, dtype: torch.dtype, heads: int = H, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(1, heads, length, D, dtype=dtype).requires_grad_(grad) for _ in range(3)]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mods: dict[str, Any], seen: torch.Tensor | None) -> Any:
    """The same in torch, on all cells; `seen` is the mask_mod's result, made ahead."""
    s = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * D**-0.5
    if "score_mod" in mods:
        b, h = torch.zeros((), dtype=torch.int64), torch.arange(q.shape[1])[:, None, None]
        s = mods["score_mod"](s, b, h, torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2]))
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    return s.softmax(-1).to(v.dtype) @ v


def seen_by(mods: dict[str, Any], length: int) -> torch.Tensor | None:
    if "mask_mod" not in mods:
        return None
    zero = torch.zeros((), dtype=torch.int64)
    return mods["mask_mod"](zero, zero, torch.arange(length)[:, None], torch.arange(length))


def compare(name: str, calls: dict[str, Callable[[], Any]], goal: float, seconds: float) -> Row:
    """Times the first call beside the second: by how much it is faster."""
    found = interleaved(list(calls.values()), seconds)
    ms = {call: round(1e3 * timing.seconds, 4) for call, timing in zip(calls, found, strict=True)}
    ours, theirs = list(ms.values())[:2]
    row = {"work": name, "ms": ms, "ratio": round(theirs / ours, 3), "goal": goal}
    print(f"{name:44} {'  '.join(f'{n} {x:9.3f} ms' for n, x in ms.items())}  {row['ratio']:.2f}x (goal {goal}x)")
    return row


def mean_row(name: str, rows: list[Row], goal: float) -> Row:
    mean = math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows))
    print(f"{name}: {mean:.2f}x on geometric mean (goal {goal}x), least {min(row['ratio'] for row in rows):.2f}x")
    return {"work": name, "ratio": round(mean, 3), "least": min(row["ratio"] for row in rows), "goal": goal}


def flex(seconds: float) -> Iterator[Row]:
    """Forward, L 2048, beside FlexAttention compiled by Inductor."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 256
    length, rows = 2048, []
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = inputs(length, dtype)
        for name, mods in ten_mods(length).items():
            torch._dynamo.reset()
            compiled = torch.compile(flex_attention, dynamic=False)
            block = (
                create_block_mask(mods["mask_mod"], None, None, length, length, "cpu") if "mask_mod" in mods else None
            )
            score = mods.get("score_mod")
            calls = {
                "ours": lambda mods=mods, q=q, k=k, v=v: attention(q, k, v, **mods),
                "FlexAttention": lambda block=block, score=score, c=compiled, q=q, k=k, v=v: c(q, k, v, score, block),
            }
            seen = seen_by(mods, length)
            exact = dense(q.double(), k.double(), v.double(), mods, seen)
            found = {n: float((call().double() - exact).abs().max()) for n, call in calls.items()}
            theirs = max(found["FlexAttention"], float((dense(q, k, v, mods, seen).double() - exact).abs().max()))
            assert found["ours"] <= 2 * theirs, f"{name}: off by {found['ours']}, torch by {theirs}"
            rows.append(compare(f"forward, {name}, {dtype}", calls, 1.2, seconds))
    yield from rows
    yield mean_row("forward, ten mods, beside FlexAttention", rows, 2.0)


def backward(seconds: float) -> Iterator[Row]:
    """Forward and backward, L 1024, beside dense torch with autograd."""
    length, rows = 1024, []
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = inputs(length, dtype, grad=True)
        dout = torch.randn(1, H, length, D).to(dtype)
        for name, mods in ten_mods(length).items():
            seen = seen_by(mods, length)

            def both(out: torch.Tensor, dout: Any = dout, of: Any = (q, k, v)) -> Any:
                return torch.autograd.grad(out, of, dout)

            calls = {
                "ours": lambda mods=mods, q=q, k=k, v=v, both=both: both(attention(q, k, v, **mods)),
                "dense": lambda mods=mods, q=q, k=k, v=v, both=both, seen=seen: both(dense(q, k, v, mods, seen)),
            }
            for x, y in zip(*(call() for call in calls.values()), strict=True):
                error = float((x - y).abs().max() / y.abs().max())
                assert error < (1e-4 if dtype == torch.float32 else 5e-2), f"{name}: off by {error}"
            rows.append(compare(f"forward + backward, {name}, {dtype}", calls, 0.0, seconds))
    yield from rows
    yield mean_row("forward + backward, ten mods, beside dense torch", rows, 3.0)


def table(seconds: float) -> Iterator[Row]:
    """T5's table by distance and Swin's by two of them, with their gradients, beside a dense additive mask."""
    length, heads = 1024, 12
    q, k, v = inputs(length, torch.float32, heads, grad=True)
    dout = torch.randn_like(q)
    distance = torch.arange(length)[:, None] - torch.arange(length)

    def buckets(d: torch.Tensor) -> torch.Tensor:
        n = (-d).clamp_min(0) if isinstance(d, torch.Tensor) else torch.clamp(-d, min=0)
        large = 16 + (torch.log(n.float() / 16 + 1e-6) / math.log(128 / 16) * 16).int()
        return torch.where(n < 16, n, torch.clamp(large, max=31))

    by_distance = torch.randn(heads, 2 * length, requires_grad=True)
    by_bucket = torch.randn(32, heads, requires_grad=True)
    cases = {
        "T5 table by q - k": (
            by_distance,
            lambda s, b, h, q, k: s + by_distance[h, q - k + length],
            lambda: by_distance[:, distance + length],
        ),
        "T5 buckets": (
            by_bucket,
            lambda s, b, h, q, k: s + by_bucket[buckets(q - k), h],
            lambda: by_bucket[buckets(distance)].permute(2, 0, 1),
        ),
    }
    for name, (x, mod, mask) in cases.items():
        of = (q, k, v, x)
        calls = {
            "ours": lambda mod=mod, of=of: torch.autograd.grad(attention(q, k, v, score_mod=mod), of, dout),
            "additive mask": lambda mask=mask, of=of: torch.autograd.grad(attention(q, k, v, mask=mask()), of, dout),
        }
        for a, b in zip(*(call() for call in calls.values()), strict=True):
            assert float((a - b).abs().max() / b.abs().max()) < 1e-4, name
        yield compare(f"{name} with its gradient, L {length}, H {heads}", calls, 1.0, seconds)


def memory(seconds: float) -> Iterator[Row]:
    """What forward and backward of a table by distance need beside their inputs, in processes of their own."""
    code = """
import resource, sys, torch
from tilewise import attention
torch.set_num_threads(2)
def both(n):
    q, k, v = (torch.randn(1, 12, n, 64, requires_grad=True) for _ in range(3))
    x = torch.randn(12, 2 * n, requires_grad=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = attention(q, k, v, score_mod=lambda s, b, h, q, k: s + x[h, q - k + n])
    torch.autograd.grad(out, (q, k, v, x), torch.ones_like(out))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
both(128)
print(both(int(sys.argv[1])))
"""
    for length in (1024, 2048, 4096):
        done = subprocess.run([sys.executable, "-c", code, str(length)], capture_output=True, text=True, check=True)
        mb, cells = float(done.stdout), 12 * length * length * 4 / 2**20
        print(f"table by distance, L {length}, H 12: {mb:.0f} MB; one float for each cell: {cells:.0f} MB")
        yield {"work": f"memory of a table by distance, L {length}, H 12", "mb": mb, "cells_mb": cells}


def options(seconds: float) -> Iterator[Row]:
    """Our own options written as functions."""
    length = 2048
    slopes, bias = tilewise.alibi_slopes(H), torch.randn(1, H, length)
    own = bias[0]
    cases = {
        "softcap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), {"softcap": 20.0}),
        "ALiBi": (lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), {"alibi_slopes": slopes}),
        "k_bias": (lambda s, b, h, q, k: s + own[h, k], {"k_bias": bias}),
    }
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = inputs(length, dtype)
        for name, (mod, option) in cases.items():
            calls = {
                "score_mod": lambda mod=mod, q=q, k=k, v=v: attention(q, k, v, score_mod=mod),
                "option": lambda option=option, q=q, k=k, v=v: attention(q, k, v, **option),
            }
            yield compare(f"{name} as a score_mod, {dtype}", calls, 0.95, seconds)
    q, k, v = inputs(length, torch.float32, grad=True)
    dout = torch.randn_like(q)
    for name, (mod, option) in cases.items():
        calls = {
            "score_mod": lambda mod=mod: torch.autograd.grad(attention(q, k, v, score_mod=mod), (q, k, v), dout),
            "option": lambda option=option: torch.autograd.grad(attention(q, k, v, **option), (q, k, v), dout),
        }
        yield compare(f"{name} as a score_mod, forward + backward", calls, 0.95, seconds)


def documents(seconds: float) -> Iterator[Row]:
    """32 documents in 8k, beside `varlen_attention`."""
    length, count = 8192, 32
    cuts = torch.randperm(length // 64 - 1)[: count - 1].sort().values.add(1) * 64
    cu = torch.cat([torch.tensor([0]), cuts, torch.tensor([length])]).int()
    document = torch.repeat_interleave(torch.arange(count), cu.diff())
    longest = int(cu.diff().max())
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = inputs(length, dtype)
        packed = [x[0].transpose(0, 1) for x in (q, k, v)]
        for causal in (False, True):

            def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
                return document[i] == document[j]

            calls = {
                "mask_mod": lambda q=q, k=k, v=v, c=causal, mod=mod: attention(q, k, v, mask_mod=mod, causal=c),
                "varlen": lambda p=packed, c=causal: varlen_attention(
                    *p, cu, cu, max_q=longest, max_k=longest, causal=c
                ),
            }
            error = float((calls["mask_mod"]()[0].transpose(0, 1) - calls["varlen"]()).abs().max())
            assert error < 3e-2, error
            yield compare(f"32 documents in 8k, {'causal, ' * causal}{dtype}", calls, 0.9, seconds)


def tiles(seconds: float) -> Iterator[Row]:
    """Tile classes of 128k x 128k, in a process of its own for its peak of memory."""
    code = """
import resource, time, torch
from tilewise import TileMap
n = 131072
document = torch.arange(n) * 32 // n
mods = {"documents": lambda b, h, q, k: (document[q] == document[k]) & (q >= k), "causal": lambda b, h, q, k: q >= k}
for mod in mods.values():
    TileMap.from_mod(mod, 512, 512)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name, mod in mods.items():
    start = time.perf_counter()
    TileMap.from_mod(mod, n, n)
    print(name, time.perf_counter() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    for line in done.stdout.splitlines():
        name, took, mb = line.split()
        print(f"tile classes of 128k x 128k, {name}: {float(took):.3f} s, {float(mb):.0f} MB (goal 0.3 s, 64 MB)")
        yield {"work": f"tile classes of 128k x 128k, {name}", "seconds": float(took), "mb": float(mb), "goal": 0.3}


def first(seconds: float) -> Iterator[Row]:
    """The first call with a function that nobody has used, forward and with gradients; kernels of the kind known."""
    q, k, v = inputs(512, torch.float32, grad=True)
    x = torch.randn(H, 1024, requires_grad=True)
    for again in (True, False):
        number = secrets.randbits(20) / 2**20
        start = time.perf_counter()
        mod = lambda s, b, h, q, k, n=number: 30 * torch.tanh(s / (30 + n)) + x[h, q - k + 512]  # noqa: E731
        out = attention(q, k, v, score_mod=mod)
        middle = time.perf_counter()
        torch.autograd.grad(out.sum(), (q, k, v, x))
        end = time.perf_counter()
        if not again:  # the first one has imported what all need
            print(f"first call: {middle - start:.3f} s, its backward {end - middle:.3f} s (goal 1.5 s)")
            yield {"work": "first call", "seconds": middle - start, "backward": end - middle, "goal": 1.5}


def again(seconds: float) -> Iterator[Row]:
    """A repeated call with a lambda made anew, beside one without a function."""
    q, k, v = (torch.randn(1, 1, 16, D) for _ in range(3))
    slopes = torch.rand(1)

    def made() -> Any:
        return lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()

    calls = {"score_mod": lambda: attention(q, k, v, score_mod=made()), "plain": lambda: attention(q, k, v)}
    row = compare("a repeated call with a lambda made anew", calls, 0.0, seconds)
    more = 1e3 * (row["ms"]["score_mod"] - row["ms"]["plain"])
    print(f"{more:.1f} us more (goal 15)")
    yield row | {"more_us": round(more, 2), "goal": "15 us"}


def decode(seconds: float) -> Iterator[Row]:
    """Decode of 1 x 8k with a score_mod, beside decode without."""
    slopes = tilewise.alibi_slopes(32)
    mods = {
        "ALiBi": lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(),
        "tanh softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    }
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(1, n, m, 128, dtype=dtype) for n, m in ((32, 1), (8, 8192), (8, 8192)))
        for name, mod in mods.items():
            calls = {
                "score_mod": lambda mod=mod, q=q, k=k, v=v: attention(q, k, v, score_mod=mod),
                "plain": lambda q=q, k=k, v=v: attention(q, k, v),
            }
            yield compare(f"decode of 1 x 8k, {name}, {dtype}", calls, 0.9, seconds)


# Memory first: the peak of a process that has made dense scores says nothing.
PARTS = {f.__name__: f for f in (memory, tiles, backward, table, options, documents, first, again, decode, flex)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each comparison")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    found = {part: list(PARTS[part](given.seconds)) for part in given.only}
    if given.json:
        write_json(given.json, {**describe("python benchmarks/cpu/score_mods.py"), "parts": found})


if __name__ == "__main__":
    main()
