"""Decode with `key_indices`: top-k 2048 of 32,768 keys, against dense decode of 2048 keys; and with `block_indices`.

    python benchmarks/cpu/chosen_keys.py --json benchmarks/records/cpu/chosen_keys.json

One thread, ways interleaved, by the time that the thread ran: what others do on the machine counts as far as they share
its caches and memory. Every call has indices, or dense keys, of its own, so that nothing waits in a cache. A ratio is
the median of dense calls over the median of the others: 1 is the speed of as many keys that lie side by side.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tilewise import Quantised, attention, paged_attention
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.report import write_json

KEYS, CHOSEN, SETS, BLOCK = 32768, 2048, 16, 64
F32, BF16 = torch.float32, torch.bfloat16
# name: heads, KV heads, D, Dv, dtype, batch, page (0: [B, Hkv, L, D]; -1: [B, L, Hkv, D]), quantised as
CASES: dict[str, tuple[Any, ...]] = {
    "latent, 16 heads, bf16, pages of 64": (16, 1, 576, 512, BF16, 4, 64, ""),
    "latent, 128 heads, bf16, pages of 64": (128, 1, 576, 512, BF16, 1, 64, ""),
    "32/8 heads of 128, bf16, pages of 16": (32, 8, 128, 128, BF16, 1, 16, ""),
    "32/8 heads of 128, f32, pages of 64": (32, 8, 128, 128, F32, 1, 64, ""),
    "32/8 heads of 128, int8, pages of 16": (32, 8, 128, 128, BF16, 1, 16, "int8"),
    "32/8 heads of 128, bf16, [B, L, Hkv, D]": (32, 8, 128, 128, BF16, 1, -1, ""),
    "32/8 heads of 128, bf16, [B, Hkv, L, D]": (32, 8, 128, 128, BF16, 1, 0, ""),
}


def ways_of(
    heads: int, kv_heads: int, D: int, Dv: int, dtype: torch.dtype, B: int, page: int, stored: str
) -> dict[str, Callable[[int], Any]]:
    """Calls number n: dense, with key indices, and with blocks of 64 keys; of pages, block tables shuffled."""
    q = torch.randn(B, heads, 1, D, dtype=dtype)
    keys = [torch.stack([torch.randperm(KEYS)[:CHOSEN] for _ in range(B)])[:, None].int() for _ in range(SETS)]
    blocks = [
        torch.stack([torch.randperm(KEYS // BLOCK)[: CHOSEN // BLOCK] for _ in range(B)])[:, None].int()
        for _ in range(SETS)
    ]
    options: dict[str, Any] = {"validate": False}
    if page > 0:
        count = B * KEYS // page
        k = torch.randn(count, page, kv_heads, D, dtype=dtype)
        v = k[..., :Dv] if Dv < D else torch.randn(count, page, kv_heads, Dv, dtype=dtype)
        if stored:
            k, v = (Quantised.from_float(x, stored, 64) for x in (k, v))  # type: ignore[arg-type, assignment]
        table = torch.randperm(count).int().view(B, -1)
        each = CHOSEN // page
        tables = [table[:, n * each : (n + 1) * each].contiguous() for n in range(SETS)]
        whole, few = (torch.full((B,), n, dtype=torch.int32) for n in (KEYS, CHOSEN))
        call = lambda table, lengths, **o: paged_attention(q, k, v, table, lengths, **o, **options)  # noqa: E731
        return {
            "dense": lambda n: call(tables[n], few),
            "keys": lambda n: call(table, whole, key_indices=keys[n]),
            "blocks": lambda n: call(table, whole, block_indices=blocks[n], block_size=BLOCK),
        }
    shape, dim = ((B, kv_heads, KEYS), 2) if page == 0 else ((B, KEYS, kv_heads), 1)
    options["layout"] = "bhld" if page == 0 else "blhd"
    q = q if page == 0 else q.transpose(1, 2).contiguous()
    k, v = (torch.randn(*shape, width, dtype=dtype) for width in (D, Dv))
    return {
        "dense": lambda n: attention(q, *(x.narrow(dim, n * CHOSEN, CHOSEN) for x in (k, v)), **options),
        "keys": lambda n: attention(q, k, v, key_indices=keys[n], **options),
        "blocks": lambda n: attention(q, k, v, block_indices=blocks[n], block_size=BLOCK, **options),
    }


def measure(ways: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-2, rounds):
        for name, way in ways.items():
            start = time.thread_time()
            way(turn % SETS)
            if turn >= 0:
                times[name].append(time.thread_time() - start)
    found = {f"{name} us": 1e6 * median(each) for name, each in times.items()}
    return found | {f"{name} / dense": found["dense us"] / found[f"{name} us"] for name in ("keys", "blocks")}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    about = describe("python benchmarks/cpu/chosen_keys.py --json benchmarks/records/cpu/chosen_keys.json")
    about["rows"] = {}
    print(f"{CHOSEN} of {KEYS} keys, one thread, speed as a share of dense decode of {CHOSEN} keys")
    for name, case in CASES.items():
        found = about["rows"][name] = measure(ways_of(*case), args.rounds)
        line = f"{name:42}dense {found['dense us']:8.0f} us   keys {found['keys / dense']:.2f}x"
        print(f"{line}   blocks of {BLOCK} {found['blocks / dense']:.2f}x", flush=True)
    if args.json:
        write_json(args.json, about)


if __name__ == "__main__":
    main()
