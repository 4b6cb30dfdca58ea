"""Many queries: prefill, options and packed sequences, beside SDPA and FlexAttention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from timing import Way, Work, randn
from torch.nn.attention import SDPBackend
from ways import bound_way, causal_mod, flex, sdpa

import tilewise
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.triton import config as configs
from tilewise.core.options import Options
from tilewise.validation import calls


def prefill() -> Iterator[Work]:
    for D, H in ((64, 32), (128, 16), (256, 8), (512, 4)):
        for L in (4096, 16384):
            for causal in (False, True):
                if L == 16384 and D == 512:
                    continue
                B = 16384 // L
                cells = L * (L + 1) / 2 if causal else L * L
                work = Work(f"prefill D{D} {L // 1024}k {'causal' if causal else 'full'}", 4 * D * B * H * cells)
                q, k, v = (randn(B, L, H, D).transpose(1, 2) for _ in range(3))
                work.ways["tilewise"] = lambda q=q, k=k, v=v, c=causal: [
                    lambda: tilewise.attention(q, k, v, causal=c, backend="triton")
                ]
                if D <= 256:
                    work.ways["cudnn"] = lambda q=q, k=k, v=v, c=causal: [
                        sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, is_causal=c)
                    ]
                    work.ways["fa2"] = lambda q=q, k=k, v=v, c=causal: [
                        sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, is_causal=c)
                    ]
                    work.ways["flex"] = lambda q=q, k=k, v=v, c=causal: [
                        flex(q, k, v, mask_mod=causal_mod if c else None)
                    ]
                else:
                    work.ways["mem-eff"] = lambda q=q, k=k, v=v, c=causal: [
                        sdpa(SDPBackend.EFFICIENT_ATTENTION, q, k, v, is_causal=c)
                    ]
                yield work


def f32() -> Iterator[Work]:
    for D, H in ((64, 16), (128, 8)):
        for causal in (False, True):
            B, L = 2, 4096
            cells = L * (L + 1) / 2 if causal else L * L
            work = Work(f"f32 D{D} 4k {'causal' if causal else 'full'}", 4 * D * B * H * cells)
            q, k, v = (randn(B, H, L, D, dtype=torch.float32) for _ in range(3))
            work.ways["tilewise"] = lambda q=q, k=k, v=v, c=causal: [
                lambda: tilewise.attention(q, k, v, causal=c, backend="triton")
            ]
            work.ways["mem-eff"] = lambda q=q, k=k, v=v, c=causal: [
                sdpa(SDPBackend.EFFICIENT_ATTENTION, q, k, v, is_causal=c)
            ]
            yield work


def options() -> Iterator[Work]:
    """Window, masks, softcap."""
    B, H, L, D, W = 1, 16, 8192, 128, 1024
    q, k, v = (randn(B, H, L, D) for _ in range(3))
    cells = B * H * (L * W - W * (W - 1) / 2)
    i = torch.arange(L, device="cuda")
    seen = (i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < W)
    bias = torch.where(seen, 0.0, -torch.inf).to(torch.bfloat16)
    window = Work("window 1024 of 8k", 4 * D * cells)
    window.ways["tilewise"] = lambda: [lambda: tilewise.attention(q, k, v, causal=True, window=W, backend="triton")]
    window.ways["bool mask"] = lambda: [lambda: tilewise.attention(q, k, v, mask=seen, backend="triton")]
    window.ways["additive mask"] = lambda: [lambda: tilewise.attention(q, k, v, mask=bias, backend="triton")]
    window.ways["flex"] = lambda: [flex(q, k, v, mask_mod=lambda b, h, i, j: (j <= i) & (i - j < W))]
    window.ways["cudnn bool"] = lambda: [sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, attn_mask=seen)]
    yield window

    B, H, L, D = 4, 8, 4096, 256
    q2, k2, v2 = (randn(B, H, L, D) for _ in range(3))
    cap = Work("softcap 50 causal D256 4k", 4 * D * B * H * L * (L + 1) / 2)
    cap.ways["tilewise"] = lambda: [lambda: tilewise.attention(q2, k2, v2, causal=True, softcap=50.0, backend="triton")]
    cap.ways["flex"] = lambda: [
        flex(q2, k2, v2, score_mod=lambda s, b, h, i, j: 50.0 * torch.tanh(s / 50.0), mask_mod=causal_mod)
    ]
    yield cap


def packed() -> Iterator[Work]:
    """Sequences of many lengths, the longest last."""
    H, D = 16, 128
    lengths = [300 + 37 * n for n in range(30)] + [8192]
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    q, k, v = (randn(sum(lengths), H, D) for _ in range(3))
    for causal in (False, True):
        cells = sum(n * (n + 1) / 2 if causal else n * n for n in lengths)
        work = Work(f"varlen {'causal' if causal else 'full'}, one of 8k last", 4 * D * H * cells)
        for name, most in (("tilewise", configs.MOST_ORDERED), ("as they come", 0)):
            work.ways[name] = lambda most=most, causal=causal: [ranked_call(most, q, k, v, cu, causal)]
        yield work


def ranked_call(most: int, q: Any, k: Any, v: Any, cu: Any, causal: bool) -> Way:
    """A packed call whose sequences are ranked if there are fewer than `most`."""
    usual, configs.MOST_ORDERED = configs.MOST_ORDERED, most
    try:
        call = calls.varlen(q, k, v, cu, cu, Options(max_q=8192, max_k=8192, causal=causal))
        return bound_way(configs.config_of(call.problem, nvidia(90)), call)
    finally:
        configs.MOST_ORDERED = usual
