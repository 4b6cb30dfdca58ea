"""Functions of the user in Triton kernels on a GPU: checked against the oracle, for the same bits again, and timed.

    python benchmarks/h200/functions.py --json functions.json [--flex]

Times are of calls with a function beside the same call without it and the same as a dense additive mask; with `--flex`
beside FlexAttention compiled by Inductor. Gradients are those of q, k, v and of the captured table.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilewise import attention, attention_backward
from tilewise.testing import families

DEVICE, BF16 = "cuda", torch.bfloat16
random = torch.Generator(DEVICE).manual_seed(0)
H = 16


def draw(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=random, device=DEVICE, dtype=torch.float32).to(dtype)


TABLE = draw(H, 20000, dtype=torch.float32)
DOCUMENT = torch.arange(20000, device=DEVICE) // 700
MODS: dict[str, Callable[..., Any]] = {
    "rows": lambda s, b, h, q, k: s - TABLE[h, q % 50] * torch.tanh(s / 9),
    "keys": lambda s, b, h, q, k: s + TABLE[h, k // 3] * 0.5,
    "distances": lambda s, b, h, q, k: 20 * torch.tanh(s / 20) + TABLE[h, q - k + 10000],
    "buckets": lambda s, b, h, q, k: s + TABLE[h, (torch.log2((q - k).abs() + 1.3) * 4).int()],
}


def same_document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return DOCUMENT[q] == DOCUMENT[k]


def check_forward() -> dict[str, str]:
    found = {}
    for check in families.checks_of(DEVICE, ("triton",)):
        if check.family == "functions" and check.kind != "time":
            try:
                found[str(check)] = families.run(check, DEVICE).detail
            except Exception as error:
                found[str(check)] = f"FAILED {type(error).__name__}: {str(error)[:300]}"
    return found


def check_gradients() -> dict[str, str]:
    """Errors beside those of plain torch, and the same bits each time."""
    found = {}
    names = ("q", "k", "v", "score_mod")
    for name, mod in MODS.items():
        for dtype, D in ((BF16, 64), (torch.float16, 128), (torch.float32, 64), (BF16, 256)):
            q, dout = draw(2, H, 500, D, dtype=dtype), draw(2, H, 500, D, dtype=dtype)
            k, v = draw(2, 4, 700, D, dtype=dtype), draw(2, 4, 700, D, dtype=dtype)
            options: dict[str, Any] = {"score_mod": mod, "mask_mod": same_document}
            state = attention(q, k, v, backend="triton", return_lse=True, **options)

            def run(backend: str) -> list[torch.Tensor]:
                got = attention_backward(q, k, v, *state, dout, grads=names, backend=backend, **options)  # noqa: B023
                return [got.dq, got.dk, got.dv, got.dscore_mod[0]]

            want, plain, got = run("reference"), run("torch"), run("triton")
            error, allowed = ([(x.double() - y.double()).abs().max().item() for x, y in zip(z, want, strict=True)]
                              for z in (got, plain))  # fmt: skip
            same = all(torch.equal(x, y) for _ in range(3) for x, y in zip(run("triton"), got, strict=True))
            sizes = [y.abs().max().item() for y in want]
            ulp = max(torch.finfo(dtype).eps, 2e-5)  # of the largest element
            bound = [2 * a + ulp * size for a, size in zip(allowed, sizes, strict=True)]
            right = all(e <= a for e, a in zip(error, bound, strict=True))
            words = " ".join(f"{e:.2g}/{a:.2g}" for e, a in zip(error, bound, strict=True))
            found[f"{name} {dtype} D{D}"] = f"{'ok' if right else 'FAILED'} {'' if same else 'OTHER BITS '}{words}"
    return found


def seconds(call: Callable[[], Any], rounds: int = 15) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def time_calls(flex: bool) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    L, D = 4096, 64
    q, k, v, dout = (draw(2, H, L, D) for _ in range(4))
    position = torch.arange(L, device=DEVICE)
    dense = TABLE[:, position[:, None] - position + 10000].to(BF16)[None].contiguous()
    calls: dict[str, dict[str, Any]] = {
        "plain": {},
        "plain, causal": {"causal": True},
        "table by q - k": {"score_mod": lambda s, b, h, q, k: s + TABLE[h, q - k + 10000]},
        "the same as a mask": {"mask": dense},
        "capped table": {"score_mod": MODS["distances"]},
        "softcap": {"softcap": 20.0},
        "softcap as a function": {"score_mod": lambda s, b, h, q, k: 20 * torch.tanh(s / 20)},
        "documents": {"mask_mod": same_document},
        "documents, causal": {"mask_mod": same_document, "causal": True},
    }
    for name, options in calls.items():
        own = found[name] = {"forward": seconds(lambda: attention(q, k, v, backend="triton", **options))}  # noqa: B023
        state = attention(q, k, v, backend="triton", return_lse=True, **options)
        grads = ["q", "k", "v"] + ["score_mod"] * ("table" in name) + ["mask"] * ("mask" in options)
        own["backward"] = seconds(
            lambda: attention_backward(q, k, v, *state, dout, grads=grads, backend="triton", **options)  # noqa: B023
        )
        one = draw(16, H, 1, D)
        keys, values = draw(16, H, 8192, D), draw(16, H, 8192, D)
        if "mask" not in options:
            own["decode"] = seconds(lambda: attention(one, keys, values, backend="triton", **options))  # noqa: B023
    if flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        for name in ("table by q - k", "capped table", "documents"):
            mod, mask = calls[name].get("score_mod"), calls[name].get("mask_mod")
            block_mask = None if mask is None else create_block_mask(mask, None, None, L, L, device=DEVICE)
            try:
                found[name]["flex forward"] = seconds(lambda: compiled(q, k, v, mod, block_mask))  # noqa: B023
            except Exception as error:  # Inductor has no configuration that fits
                print(name, type(error).__name__, str(error).splitlines()[0][:200], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flex", action="store_true")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for part in (check_forward, check_gradients, lambda: time_calls(given.flex)):
        made = part()
        found |= made
        for name, x in made.items():
            print(name, {k: f"{t * 1e6:.0f} us" for k, t in x.items()} if isinstance(x, dict) else x, flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
