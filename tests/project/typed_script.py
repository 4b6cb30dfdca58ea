"""A user's script, which mypy and pyright check and nobody runs: `test_types.py`."""

from typing import Any

import numpy as np
import torch
from typing_extensions import assert_type

import tilewise
from tilewise import AttentionState, Aux, KVCache, PagedKVCache, attention, paged_attention, varlen_attention
from tilewise.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def entry_points(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, lse: bool) -> None:
    assert_type(attention(q, k, v), Tensor)
    assert_type(attention(q, k, v, causal=True, window=(3, None), return_lse=False), Tensor)
    assert_type(attention(q, k, v, return_lse=True), AttentionState)
    assert_type(attention(q, k, v, return_lse=lse), Tensor | AttentionState)
    assert_type(attention(torch.nn.Parameter(q), k, v), Tensor)
    assert_type(attention(q, k, v, return_aux=("entropy",), causal=True), tuple[Tensor, Aux])
    assert_type(varlen_attention(q, k, v, cu, cu, return_aux=["lse"]), tuple[Tensor, Aux])
    assert_type(paged_attention(q, k, v, cu, cu, return_aux=("key_mass",), key_mass_queries=8), tuple[Tensor, Aux])
    assert_type(varlen_attention(q, k, v, cu, cu, max_q=8), Tensor)
    assert_type(varlen_attention(q, k, v, cu, cu, return_lse=True), AttentionState)
    assert_type(paged_attention(q, k, v, cu, cu, cu_seqlens_q=cu), Tensor)
    assert_type(paged_attention(q, k, v, cu, cu, return_lse=True), AttentionState)
    state = attention(q, k, v, return_lse=True)
    assert_type(tilewise.merge([state, state]), AttentionState)
    gradients = tilewise.attention_backward(q, k, v, state.out, state.lse, state.out)
    assert_type(gradients.dq, Tensor | None)
    print(attention(q, k, v).shape, state.lse.shape)


def other_arrays(array: "np.ndarray[Any, np.dtype[np.float32]]", q: Any) -> None:
    print(attention(array, array, array).shape)
    print(attention(q, q, q).shape)  # of another library: Any


def caches(cache: KVCache, pages: PagedKVCache, q: Tensor, lse: bool) -> None:
    assert_type(cache.attend(q), Tensor)
    assert_type(cache.attend(q, counts=[1, 2], causal=False), Tensor)
    assert_type(cache.attend(q, return_lse=True), AttentionState)
    assert_type(cache.attend(q, return_aux=("key_mass",)), tuple[Tensor, Aux])
    assert_type(pages.attend([0, 1], q, return_aux=("key_mass",)), tuple[Tensor, Aux])
    assert_type(cache.attend(q, return_lse=lse), Tensor | AttentionState)
    assert_type(pages.attend([0, 1], q, layer=1), Tensor)
    assert_type(pages.attend([0, 1], q, return_lse=True), AttentionState)
    batch = pages.view([0, 1])
    assert_type(batch.attend(q, 1, cascade=False), Tensor)
    assert_type(batch.attend(q, return_lse=True), AttentionState)
    static = pages.static_batch(2, 64)
    assert_type(static.attend(q), Tensor)
    assert_type(static.attend(q, return_lse=True), AttentionState)


def drop_ins(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, lse: bool) -> None:
    assert_type(flash_attn_func(q, k, v, 0.0, None, True), Tensor)
    assert_type(flash_attn_func(q, k, v, causal=True, s_aux=None), Tensor)
    out, softmax_lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert_type(out, Tensor)
    assert_type(softmax_lse, Tensor)
    assert_type(flash_attn_func(q, k, v, return_attn_probs=lse), Tensor | Pair | Triple)
    assert_type(flash_attn_varlen_func(q, k, v, cu, cu, 8, 8), Tensor)
    assert_type(flash_attn_varlen_func(q, k, v, cu, return_softmax_lse=True), Pair)
    assert_type(flash_attn_with_kvcache(q, k, v, cache_seqlens=cu), Tensor)
    assert_type(flash_attn_with_kvcache(q, k, v, return_softmax_lse=True), Pair)


def mistakes(q: Tensor, k: Tensor, v: Tensor, cache: KVCache) -> None:
    attention(q, k, v, windw=3)  # type: ignore[call-overload]
    attention(q, k, v, causal="yes")  # type: ignore[call-overload]
    attention(q, k, v, True)  # type: ignore[call-overload]
    attention(q, k)  # type: ignore[call-overload]
    cache.attend(q, casual=True)  # type: ignore[call-overload]
    flash_attn_func(q, k, v, is_causal=True)  # type: ignore[call-overload]
