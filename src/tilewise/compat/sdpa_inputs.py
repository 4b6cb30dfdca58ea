"""Inputs of torch's `scaled_dot_product_attention` that are not plain tensors: causal biases, jagged tensors."""

from __future__ import annotations

from typing import Any

import torch

from ..api import varlen_attention
from ..core.private.torch import no_torch_function
from ..errors import InvalidArgument


def is_causal_bias(mask: Any) -> bool:
    """Whether it is a `torch.nn.attention.bias.CausalBias`: a rule, whose memory is never initialised."""
    from torch.nn.attention.bias import CausalBias

    return isinstance(mask, CausalBias)


def as_causal(mask: Any, rows: int, keys: int) -> tuple[torch.Tensor | None, bool, int | None]:
    """A mask of a tensor subclass as `mask`, `causal` and `q_offset` of `tilewise.attention`."""
    if is_causal_bias(mask):
        from torch.nn.attention.bias import CausalVariant

        if (mask.seq_len_q, mask.seq_len_kv) != (rows, keys):
            given = f"a CausalBias of {mask.seq_len_q} rows and {mask.seq_len_kv} keys"
            raise InvalidArgument("attn_mask", given, f"{rows} rows and {keys} keys, as query and key")
        return None, True, 0 if mask.variant == CausalVariant.UPPER_LEFT else keys - rows
    own = type(mask).__torch_function__
    if own not in (torch.Tensor.__torch_function__, no_torch_function):
        raise InvalidArgument(
            "attn_mask", f"a {type(mask).__name__}", "a plain tensor or a CausalBias", "make a bool mask of it"
        )
    return mask, False, None


def jagged_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float,
) -> torch.Tensor:
    """Attention within the sequences of jagged nested tensors `[B, H, L, E]`; the output has query's sequences."""
    if mask is not None:
        raise InvalidArgument("attn_mask", "a mask with nested tensors", "None", "is_causal=True is served")
    q, k, v = (_packed(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise InvalidArgument("key", f"{k.shape[1]} heads", f"query's {q.shape[1]}", "enable_gqa=True lets heads share")
    if value.offsets() is not key.offsets() and not value.offsets().equal(key.offsets()):
        raise InvalidArgument("value", "sequences of other lengths than key", "the same")
    offsets = query.offsets()
    dropout: dict[str, Any] = {"dropout_p": dropout_p} if dropout_p else {}
    out = varlen_attention(
        q, k, v, offsets, key.offsets(), causal=is_causal, q_offset=0 if is_causal else None, scale=scale, **dropout
    )
    return torch.nested.nested_tensor_from_jagged(out, offsets).transpose(1, 2)


def _packed(name: str, x: Any) -> torch.Tensor:
    """The rows of a nested tensor, packed as `[T, H, E]`, a view."""
    expected = "a nested tensor [B, H, L, E] of layout torch.jagged, as all three"
    if not x.is_nested or x.layout != torch.jagged:
        kind = f"a nested tensor of layout {x.layout}" if x.is_nested else "a plain tensor beside nested ones"
        raise InvalidArgument(name, kind, expected, "torch.nested.nested_tensor(..., layout=torch.jagged) makes one")
    if x.ndim != 4 or isinstance(x.shape[2], int):
        given = f"{x.ndim} dims" if x.ndim != 4 else "lengths that do not vary in its third dim"
        raise InvalidArgument(name, given, expected, "transpose(1, 2) turns [B, L, H, E] into it")
    if x.lengths() is not None:
        raise InvalidArgument(name, "a nested tensor with holes", "one without", f"{name}.contiguous() closes them")
    return x.values().transpose(0, 1)
