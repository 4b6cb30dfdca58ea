"""Ways to do a work: our kernels with a launch of one's own choice, and the peers."""

from __future__ import annotations

from typing import Any

import torch
from timing import Way
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.backends.triton.spec import Config
from tilewise.validation import calls


def bound_way(c: Config, call: calls.Call) -> Way:
    """A call with a launch that need not be the heuristics' choice."""
    from tilewise.backends.gpu.target import target_of
    from tilewise.backends.triton.launch import Launcher

    bound = Launcher(call.problem, c, target_of(call.problem.device))

    def run() -> torch.Tensor:
        bound(call.tensors)
        return call.out

    return run


def sdpa(backend: SDPBackend, q: Any, k: Any, v: Any, **options: Any) -> Way:
    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return run


def flex(q: Any, k: Any, v: Any, score_mod: Any = None, mask_mod: Any = None) -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.cache_size_limit = 256
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])


def causal_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j <= i


def pages(k: torch.Tensor, v: torch.Tensor, page: int) -> tuple[torch.Tensor, ...]:
    """The same cache in shuffled pages: keys, values, table, lengths."""
    B, Hkv, L, D = k.shape
    count = B * L // page
    order = torch.randperm(count, device="cuda")
    k_pages, v_pages = torch.empty(2, count, page, Hkv, D, device="cuda", dtype=k.dtype)
    for cache, out in ((k, k_pages), (v, v_pages)):
        out[order] = cache.transpose(1, 2).reshape(count, page, Hkv, D)
    table = order.view(B, L // page).to(torch.int32)
    return k_pages, v_pages, table, torch.full((B,), L, dtype=torch.int32, device="cuda")
