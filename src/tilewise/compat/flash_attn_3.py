"""FlashAttention 3's module `flash_attn_interface`, served by tilewise: its signatures, on any device.

FlashAttention 3 has its options in another order than FlashAttention 2 and returns `(out, softmax_lse)`. Everything
else is that of `flash_attn`, which serves the calls.

>>> q, k, v = (torch.randn(2, 10, heads, 64) for heads in (8, 2, 2))
>>> out, lse = flash_attn_func(q, k, v, None, True, return_attn_probs=True)
>>> out.shape, lse.shape
(torch.Size([2, 10, 8, 64]), torch.Size([2, 8, 10]))
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidArgument
from ..state import AttentionState, merge
from . import flash_attn
from ._flash.kvcache import flash_attn_with_kvcache as _with_kvcache
from ._flash.options import WindowSize
from .flash_attn import get_scheduler_metadata

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Scale = torch.Tensor | float | None


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    softmax_scale: float | None = None, causal: bool = False, qv: torch.Tensor | None = None,
    q_descale: Scale = None, k_descale: Scale = None, v_descale: Scale = None,
    window_size: WindowSize = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """As `tilewise.compat.flash_attn.flash_attn_func`; with `return_attn_probs`, `(out, softmax_lse)`."""
    result = flash_attn.flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs, qv=qv,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        attention_chunk=attention_chunk, num_splits=num_splits,
    )  # fmt: skip
    return result[:2] if return_attn_probs else result  # type: ignore[return-value]


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
    q_descale: Scale = None, k_descale: Scale = None, v_descale: Scale = None,
    window_size: WindowSize = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_func` for `qkv` `[B, L, 3, H, D]` or, with `num_heads_q`, `[B, L, H + 2 Hkv, D]`."""
    if qkv.ndim == 5:
        q, k, v = flash_attn._parts("qkv", qkv, "[B, L, 3, H, D]")
    elif qkv.ndim != 4 or num_heads_q is None or not 0 < num_heads_q < qkv.shape[2] or (qkv.shape[2] - num_heads_q) % 2:
        given = f"shape {tuple(qkv.shape)} with num_heads_q={num_heads_q}"
        raise InvalidArgument("qkv", given, "[B, L, 3, H, D], or [B, L, H + 2 Hkv, D] with num_heads_q=H")
    else:
        kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, kv_heads, kv_heads), dim=2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None, seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: torch.Tensor | None = None,
    q_descale: Scale = None, k_descale: Scale = None, v_descale: Scale = None,
    window_size: WindowSize = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """As `tilewise.compat.flash_attn.flash_attn_varlen_func`; with `return_attn_probs`, `(out, softmax_lse)`."""
    result: Any = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, seqused_q=seqused_q, seqused_k=seqused_k,
        deterministic=deterministic, return_softmax_lse=return_attn_probs, qv=qv,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        attention_chunk=attention_chunk, num_splits=num_splits,
    )  # fmt: skip
    return result


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None, qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None, cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, rotary_seqlens: torch.Tensor | None = None,
    q_descale: Scale = None, k_descale: Scale = None, v_descale: Scale = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Any = None,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Result:  # fmt: skip
    """As `tilewise.compat.flash_attn.flash_attn_with_kvcache`."""
    return _with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        rotary_interleaved=rotary_interleaved, num_splits=num_splits, return_softmax_lse=return_softmax_lse,
        page_table=page_table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens, qv=qv, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
    )  # fmt: skip


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges split-KV partials: `out_partial` `[splits, ..., H, D]` and `lse_partial` `[splits, ..., H]`."""
    if out_partial.shape[:-1] != lse_partial.shape or out_partial.ndim < 2 or not len(out_partial):
        given = f"shape {tuple(lse_partial.shape)} with out_partial {tuple(out_partial.shape)}"
        raise InvalidArgument("lse_partial", given, "[splits, ...], as out_partial without its last dim")
    state = merge([AttentionState(o.float(), lse) for o, lse in zip(out_partial, lse_partial, strict=True)])
    if out is not None:
        return out.copy_(state.out), state.lse
    return state.out.to(out_dtype or out_partial.dtype), state.lse
