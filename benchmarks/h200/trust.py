"""Fixed calls that once gave wrong results, against a float64 oracle: extreme windows, offsets, sinks, softcaps, sizes.

    python benchmarks/h200/trust.py --out results            # on a GPU: `triton` and `hopper`
    TRITON_INTERPRET=1 python benchmarks/h200/trust.py --device cpu --backends triton --out results

Outputs are poisoned. A call passes where every element is within 2 times (with softcap 3 times) the error of plain
torch arithmetic in the same dtypes, plus one ulp of its row, and where rows that are exactly 0, inf or -inf are so.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import tilewise

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MOST = 2**31 - 1


@dataclass(frozen=True)
class Call:
    """One call; `options` are those of the entry point. `heavy` calls are left out of the interpreter's run."""

    name: str
    Lq: int = 40
    Lk: int = 24
    D: int = 32
    H: int = 2
    Hkv: int = 1
    dtype: torch.dtype = F16
    paged: bool = False
    sinks: tuple[float, ...] = ()
    offsets: tuple[int, ...] = ()  # of each batch row, in a tensor that is not checked
    options: dict[str, Any] = field(default_factory=dict)
    heavy: bool = False
    peak: float = 3.0  # standard deviation of the scores
    only: str = ""  # the backend that it is for

    def dtype_on(self, backend: str) -> torch.dtype:
        return BF16 if backend == "hopper" and self.dtype == F16 else self.dtype


def windows() -> list[Call]:
    """Sides, chunks and offsets near the ends of int32 and past them; more queries than keys, so that rows stand before
    the first key.
    """
    sides = [MOST, 2**31, 2**40, sys.maxsize, (1, MOST - 1), (1, MOST), (MOST, MOST), (0, sys.maxsize), (MOST - 1, 0)]
    found = [Call(f"window {w}", options={"window": w}) for w in sides]
    found += [Call(f"causal, window {w}", options={"window": w, "causal": True}) for w in (MOST, sys.maxsize)]
    found += [Call(f"chunk {n}", options={"chunk": n}) for n in (MOST, 2**31, sys.maxsize)]
    for offsets in ((-(2**31), MOST - 64), (-(2**31) + 7, 2**30), (-(2**30), 2**29)):
        for name, rules in (
            ("window (3, 5)", {"window": (3, 5)}), ("causal", {"causal": True}), ("chunk 16", {"chunk": 16}),
            ("a wide window", {"window": (2**29 - 2, 2**29 - 2)}),
        ):  # fmt: skip
            found.append(Call(f"offsets {offsets}, {name}", offsets=offsets, options=rules))
    for offset in (24 - 2**29, 2**29 - 40):
        found.append(Call(f"offset {offset}", options={"q_offset": offset, "window": (2**29 - 20, 2**29 - 20)}))
    found.append(Call("pages, window", paged=True, Lq=3, Lk=50, options={"window": (2, MOST), "causal": False}))
    return found


def sinks() -> list[Call]:
    """Infinite sinks, on rows that see nothing (more queries than keys, causal) and on rows that see keys."""
    ends = (-math.inf, math.inf, 0.5, -math.inf)
    found = []
    for name, changes in (
        ("prefill", {"options": {"causal": True}}),
        ("decode", {"Lq": 1, "Lk": 300}),
        ("split", {"Lq": 1, "Lk": 300, "options": {"split_size": 64}}),
        ("split, nothing seen", {"Lq": 1, "Lk": 300, "options": {"split_size": 64, "q_offset": -5, "causal": True}}),
        ("pages", {"Lq": 2, "Lk": 100, "paged": True, "options": {"causal": True}}),
        ("pages, split", {"Lq": 1, "Lk": 300, "paged": True, "options": {"split_size": 64}}),
    ):
        found.append(Call(f"sinks, {name}", H=4, sinks=ends, **changes))  # type: ignore[arg-type]
    return found


def caps() -> list[Call]:
    """Softcaps far above the scores change nothing; small ones cap."""
    found = []
    for cap in (5.0, 50.0, 1e3, 1e6, 1e12, 1e30, 1e38, 1e300, 1e-40):
        found.append(Call(f"softcap {cap:g}", Lk=40, options={"softcap": cap, "causal": True}))
        found.append(Call(f"softcap {cap:g}, f32", Lq=1, Lk=80, dtype=F32, options={"softcap": cap}))
    found.append(Call("softcap 1e3, scores of 3e3", Lk=40, peak=3e3, dtype=F32, options={"softcap": 1e3}))
    return found


def scales() -> list[Call]:
    """Scales below the least normal float32 number: of dot products that are large, and that are not."""
    found = [Call(f"scale {scale:g}", Lk=40, options={"scale": scale, "causal": True}) for scale in (1e-45, 3e-39)]
    for scale in (1e-38, -1e-38):
        found.append(Call(f"scale {scale:g}, large", Lk=40, peak=5e36, dtype=F32, options={"scale": scale}))
    return found


def sizes() -> list[Call]:
    """Wide float32 heads that share keys; many rows of wide heads; no query at all."""
    found = []
    for heads in (17, 32, 48, 64):
        for paged in (False, True):
            name = f"f32 D=576, {heads} heads a KV head{', pages' if paged else ''}"
            found.append(Call(name, Lq=1, Lk=200, D=576, H=heads, dtype=F32, paged=paged, heavy=True, only="triton"))
    for D in (512, 576):
        found.append(Call(f"f16 D={D}, 64 heads a KV head", Lq=1, Lk=2000, D=D, H=64, heavy=True, only="triton"))
    for paged in (False, True):
        for causal in (False, True):
            name = f"no query{', pages' if paged else ''}{', causal' if causal else ''}"
            found.append(Call(name, Lq=0, Lk=5000, paged=paged, options={"causal": causal}))
    return found


CALLS = [*windows(), *sinks(), *caps(), *scales(), *sizes()]


def inputs(call: Call, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q [B, H, Lq, D], k and v [B, Hkv, Lk, D], peaked."""
    g = torch.Generator().manual_seed(sum(map(ord, call.name)))
    B = 2
    q = torch.randn(B, call.H, call.Lq, call.D, generator=g) * call.peak
    k, v = (torch.randn(B, call.Hkv, call.Lk, call.D, generator=g) for _ in range(2))
    return tuple(x.to(dtype).to(device) for x in (q, k, v))


def visible(call: Call) -> torch.Tensor:
    """bool [B, 1, Lq, Lk], in Python's own integers: nothing wraps."""
    o = call.options
    window = o.get("window")
    left, right = (None, None) if window is None else (window - 1, None) if isinstance(window, int) else window
    chunk = o.get("chunk")
    offsets = call.offsets or (o.get("q_offset", call.Lk - call.Lq),) * 2
    rows = []
    for p in [offset + i for offset in offsets for i in range(call.Lq)]:
        rows.append([
            not (o.get("causal") and j > p)
            and (left is None or p - j <= left)
            and (right is None or j - p <= right)
            and (chunk is None or j // chunk == p // chunk)
            for j in range(call.Lk)
        ])  # fmt: skip
    return torch.tensor(rows, dtype=torch.bool).reshape(2, 1, call.Lq, call.Lk)


def oracle(call: Call, q: Any, k: Any, v: Any, compute: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float]:
    """out, lse, and the largest score, all of `compute`; weights are rounded to v's dtype where that is narrower."""
    dtype = v.dtype
    q, k, v = q.to(compute), *(x.to(compute).repeat_interleave(call.H // call.Hkv, 1) for x in (k, v))
    s = q @ k.mT * call.options.get("scale", call.D**-0.5)
    cap = call.options.get("softcap")
    if cap is not None:
        exact = cap * torch.tanh(s.double() / cap)
        s = exact.to(compute)
    seen = visible(call).to(s.device).expand_as(s)
    s = torch.where(seen, s, -torch.inf)
    sink = torch.full((call.H,), -torch.inf) if not call.sinks else torch.tensor(call.sinks)
    sink = sink.to(s)[None, :, None].expand(*s.shape[:3])
    top = torch.maximum(s.amax(-1) if call.Lk else sink, sink)
    base = torch.where(top.isfinite(), top, 0.0)
    p = torch.where(seen, torch.exp(s - base[..., None]), 0.0)
    total = p.sum(-1) + torch.exp(sink - base)
    taken = sink == torch.inf
    weights = torch.where(taken[..., None], 0.0, p / torch.where(total == 0, 1.0, total)[..., None])
    if compute == F32:
        weights = weights.to(dtype).to(compute)
    lse = torch.where(taken, torch.inf, base + torch.log(total))
    scores = s[s.isfinite()].abs()
    return weights @ v, lse, float(scores.max()) if scores.numel() else 0.0


def run(call: Call, backend: str, device: str) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    dtype = call.dtype_on(backend)
    q, k, v = inputs(call, device, dtype)
    options = {"backend": backend, "return_lse": True, **call.options}
    if call.offsets:
        options |= {"q_offset": torch.tensor(call.offsets, dtype=torch.int32, device=device), "validate": False}
    if call.sinks:
        options["sinks"] = torch.tensor(call.sinks, device=device)
    out = torch.full_like(q, float("nan"))
    if not call.paged:
        state = tilewise.attention(q, k, v, out=out, **options)
        return state.out, state.lse, (q, k, v)
    B, page = q.shape[0], 16
    each = -(-call.Lk // page)
    pages = []
    for x in (k, v):  # NaN in the slack of the last page, and pages out of order
        padded = torch.full((B, call.Hkv, each * page, call.D), float("nan"), dtype=dtype, device=device)
        padded[:, :, : call.Lk] = x
        pages.append(padded.transpose(1, 2).reshape(B * each, page, call.Hkv, call.D).flip(0).contiguous())
    table = torch.arange(B * each - 1, -1, -1, dtype=torch.int32, device=device).view(B, each)
    lengths = torch.full((B,), call.Lk, dtype=torch.int32, device=device)
    state = tilewise.paged_attention(q, *pages, table, lengths, out=out, **options)
    return state.out, state.lse, (q, k, v)


def judge(call: Call, out: torch.Tensor, lse: torch.Tensor, given: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """The worst error of out and lse as a share of what is allowed; above 1 is wrong, NaN too."""
    factor = 3.0 if call.options.get("softcap") else 2.0
    want, want_lse, scores = oracle(call, *given, torch.float64)
    plain, plain_lse, _ = oracle(call, *given, F32)
    if want.numel() == 0:
        return (0.0, 0.0) if out.shape == want.shape and lse.shape == want_lse.shape else (math.inf, math.inf)
    eps = torch.finfo(out.dtype).eps
    allowed = factor * float((plain.to(out.dtype).double() - want).abs().max()) + eps * want.abs().amax(
        -1, keepdim=True
    )
    error = (out.double() - want).abs() / allowed.clamp_min(1e-30)
    finite = want_lse.isfinite()
    ulps = scores * torch.finfo(F32).eps * math.sqrt(call.D)  # of sums of D products
    bound = factor * max(
        float((plain_lse.double() - want_lse)[finite].abs().max()) if finite.any() else 0.0, ulps, 1e-6
    )
    lse_error = torch.where(
        finite, (lse.double() - want_lse).abs() / bound, torch.where(lse == want_lse, 0.0, math.inf)
    )
    masked = torch.isneginf(want_lse) | torch.isposinf(want_lse)
    if bool((out[masked] != 0).any()):
        return math.inf, float(lse_error.max())
    worst = [float(x.max()) if not bool(x.isnan().any()) else math.inf for x in (error, lse_error)]
    return worst[0], worst[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backends", nargs="+", default=["triton", "hopper"])
    parser.add_argument("--only", default="", help="calls whose name holds this")
    parser.add_argument("--light", action="store_true", help="leave heavy calls out")
    parser.add_argument("--out", type=Path, required=True, help="the folder of trust.json")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for backend in args.backends:
        for call in CALLS:
            if args.only not in call.name or (args.light and call.heavy) or call.only not in ("", backend):
                continue
            if backend == "hopper" and (call.paged or call.dtype == F32):
                continue
            row: dict[str, Any] = {"backend": backend, "call": call.name}
            start = time.perf_counter()
            try:
                row["out"], row["lse"] = judge(call, *run(call, backend, args.device))
                row["ok"] = row["out"] <= 1 and row["lse"] <= 1
            except Exception as error:
                row |= {"ok": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            row["seconds"] = round(time.perf_counter() - start, 2)
            rows.append(row)
            print(f"{'ok  ' if row['ok'] else 'FAIL'} {backend} {call.name} {row['seconds']}", flush=True)
            (args.out / "trust.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\n{'backend':8} {'calls':>5} {'right':>5} {'worst out':>10} {'worst lse':>10}   share of what is allowed")
    for backend in args.backends:
        mine = [row for row in rows if row["backend"] == backend]
        worst = [max((row.get(name, 0.0) for row in mine), default=0.0) for name in ("out", "lse")]
        print(f"{backend:8} {len(mine):5} {sum(row['ok'] for row in mine):5} {worst[0]:10.3g} {worst[1]:10.3g}")
    for row in rows:
        if not row["ok"]:
            print(f"FAIL {row['backend']} {row['call']}: {row.get('error') or (row['out'], row['lse'])}")
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
