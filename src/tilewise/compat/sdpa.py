"""torch's `scaled_dot_product_attention`, served by tilewise.

>>> import torch.nn.functional as F
>>> from tilewise.compat import sdpa
>>> q = torch.randn(1, 4, 10, 32)
>>> with sdpa.installed():
...     out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
>>> torch.allclose(out, F.scaled_dot_product_attention(q, q, q, is_causal=True), atol=1e-6)
True
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..api import attention
from ..errors import InvalidArgument

_torchs = torch.nn.functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`, forward only.

    Args:
        query: `[..., H, L, E]`, rank 2 or more; leading dims of the three broadcast, as in a matrix product.
        key: `[..., Hkv, S, E]`.
        value: `[..., Hkv, S, Ev]`.
        attn_mask: broadcasts to `[..., H, L, S]`: bool (True = attend) or float (added). Not with `is_causal`.
        dropout_p: 0.0; anything else is refused.
        is_causal: row `i` sees keys 0 to `i`, also where `L != S` (top left).
        scale: default `E ** -0.5`.
        enable_gqa: `H` may be a multiple of `Hkv`. Without it they are equal, or one of them is 1.

    Returns:
        `[..., H, L, Ev]` in query's dtype; 0 in rows that see no key.
    """
    if dropout_p != 0.0:
        raise InvalidArgument(
            "dropout_p", dropout_p, "0.0", "tilewise has no dropout: pass `p if self.training else 0.0`"
        )
    if is_causal and attn_mask is not None:
        remedy = "tilewise.attention(..., mask=..., causal=True, q_offset=0) takes both"
        raise InvalidArgument("attn_mask", "a mask with is_causal=True", "one of the two, as in torch", remedy)
    if not (query.dtype == key.dtype == value.dtype):
        raise InvalidArgument("key", f"{key.dtype}, value {value.dtype}", f"query's {query.dtype} for both")
    if query.ndim == key.ndim == value.ndim == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]:
        shape = None
    else:
        query, key, value, attn_mask, shape = _of_rank_4(query, key, value, attn_mask, enable_gqa)
    offset = 0 if is_causal else None
    out = attention(query, key, value, mask=attn_mask, causal=is_causal, q_offset=offset, scale=scale)
    return out if shape is None else out.reshape(shape)


def _of_rank_4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, list[int]]:
    """Any ranks, with leading dims that broadcast, as `[B, H, L, E]`; the mask likewise; the shape of the output."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim < 2:
            raise InvalidArgument(name, f"shape {tuple(x.shape)}", "rank 2 or more: [..., L, E]")
    rank = max(q.ndim, k.ndim, v.ndim)
    q, k, v = (x[(None,) * (max(rank, 4) - x.ndim)] for x in (q, k, v))
    try:
        lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except RuntimeError:
        given = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        raise InvalidArgument("query, key, value", given, "leading dims that broadcast") from None
    heads, kv_heads = _heads(q.shape[-3], k.shape[-3], v.shape[-3], enable_gqa)
    q = q.expand(*lead, heads, -1, -1)
    k, v = (x.expand(*lead, kv_heads, -1, -1) for x in (k, v))
    shape = [*lead, heads, q.shape[-2], v.shape[-1]][-rank:]
    if mask is not None and mask.ndim > 3 and rank > 4:
        mask = mask.expand(*lead, -1, -1, -1).flatten(0, -4)
    return q.flatten(0, -4), k.flatten(0, -4), v.flatten(0, -4), mask, shape


def _heads(q: int, k: int, v: int, enable_gqa: bool) -> tuple[int, int]:
    """The heads of queries, and those of keys and values, of which each serves as many queries."""
    if enable_gqa:
        if k != v or not k or q % k:
            raise InvalidArgument("key", f"{k} heads, value {v}", f"a divisor of query's {q} for both")
        return q, k
    most = max(q, k, v)
    if any(n not in (1, most) for n in (q, k, v)):
        remedy = "enable_gqa=True lets several query heads share one"
        raise InvalidArgument("key", f"{k} heads, value {v}", f"query's {q}, or 1", remedy)
    return most, 1 if k == v == 1 else most


def install() -> None:
    """Puts tilewise's function in the place of torch's, for all that calls it as `torch.nn.functional`'s."""
    _put(scaled_dot_product_attention)


def uninstall() -> None:
    """Puts torch's own function back."""
    _put(_torchs)


@contextmanager
def installed() -> Iterator[None]:
    """`install()` for a block of code; afterwards what was there before is back."""
    before = torch.nn.functional.scaled_dot_product_attention
    install()
    try:
        yield
    finally:
        _put(before)


def _put(function: Any) -> None:
    torch.nn.functional.scaled_dot_product_attention = function
