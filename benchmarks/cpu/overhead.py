"""What a call costs beside its kernel, on the CPU: the entry points, torch's operators and the drop-ins.

    python benchmarks/cpu/overhead.py --json benchmarks/records/cpu/overhead.json

Each is a call so small that its kernel takes microseconds, made again and again in one thread, interleaved with the
kernel alone: the compiled function, called by the addresses of tensors that are there already.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

from tilewise import attention
from tilewise.compat import flash_attn, sdpa
from tilewise.dispatch import call_cache
from tilewise.tools.bench.machine import describe
from tilewise.tools.bench.measure import interleaved
from tilewise.tools.bench.report import write_json

HEADS, KV_HEADS, KEYS, WIDTH = 4, 4, 16, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        q = torch.randn(1, HEADS, 1, WIDTH)
        k, v = torch.randn(2, 1, KV_HEADS, KEYS, WIDTH)
        rows = [x.transpose(1, 2) for x in (q, k, v)]  # [B, L, H, D]
        step = [x[:, -1:].clone() for x in rows]
        k_cache, v_cache = torch.zeros(2, 1, 64, KV_HEADS, WIDTH)
        lengths = torch.tensor([KEYS - 1], dtype=torch.int32)
        out = attention(q, k, v)
        kernel = next(reversed(call_cache._known.values())).launch
        operator = torch.ops.tilewise.attention.default
        calls = {
            "kernel": lambda: kernel(q, k, v, out, None),
            "attention": lambda: attention(q, k, v),
            "torch.ops.tilewise.attention": lambda: operator(q, k, v),
            "sdpa drop-in": lambda: sdpa.scaled_dot_product_attention(q, k, v),
            "flash_attn_func": lambda: flash_attn.flash_attn_func(*rows),
            "flash_attn_with_kvcache": lambda: flash_attn.flash_attn_with_kvcache(
                step[0], k_cache, v_cache, cache_seqlens=lengths
            ),
            "flash_attn_with_kvcache, append": lambda: flash_attn.flash_attn_with_kvcache(
                step[0], k_cache, v_cache, step[1], step[2], cache_seqlens=lengths
            ),
            "torch's SDPA": lambda: F.scaled_dot_product_attention(q, k, v),
        }
        timings = interleaved(list(calls.values()), options.seconds)
    micro = {name: 1e6 * t.seconds for name, t in zip(calls, timings, strict=True)}
    for name, t in micro.items():
        print(f"{name:34} {t:7.1f} us, {t - micro['kernel']:7.1f} above the kernel")
    if options.json:
        shape = {"heads": HEADS, "kv_heads": KV_HEADS, "keys": KEYS, "head_dim": WIDTH, "queries": 1}
        about = describe(f"python benchmarks/cpu/overhead.py --seconds {options.seconds:g}")
        about |= {"shape": shape, "microseconds": micro}
        write_json(options.json, about)


if __name__ == "__main__":
    main()
