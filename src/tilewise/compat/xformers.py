"""xformers' `memory_efficient_attention`, served by tilewise on any device.

The biases are xformers' own objects (`xformers.ops.fmha.attn_bias`), known by the names of their classes. xformers is a
wheel without kernels for most machines; `install()` puts tilewise in the place of its functions.

>>> from tilewise.compat.xformers import memory_efficient_attention
>>> q = torch.randn(2, 10, 4, 32)  # [B, M, H, K]
>>> memory_efficient_attention(q, q, q, p=0.0).shape
torch.Size([2, 10, 4, 32])
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from ..api import attention, paged_attention, varlen_attention
from ..core.extras import MissingPackage
from ..errors import InvalidArgument
from .autocast import autocast
from .replaced import Replaced

__all__ = [
    "install",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "uninstall",
]

TOP_LEFT = {"causal": True, "q_offset": 0}
BOTTOM_RIGHT = {"causal": True}


def _within(bias: Any) -> dict[str, Any]:
    return {"window": int(bias._window_size)}


def _around(bias: Any) -> dict[str, Any]:
    return {"window": (int(bias.window_left), int(bias.window_right))}


def _nothing(bias: Any) -> dict[str, Any]:
    return {}


DENSE: dict[str, tuple[dict[str, Any], Callable[[Any], dict[str, Any]]]] = {
    "LowerTriangularMask": (TOP_LEFT, _nothing),
    "LowerTriangularMaskWithTensorBias": (TOP_LEFT, lambda bias: {"mask": bias._bias}),
    "LowerTriangularFromBottomRightMask": (BOTTOM_RIGHT, _nothing),
    "LowerTriangularFromBottomRightLocalAttentionMask": (BOTTOM_RIGHT, _within),
    "LocalAttentionFromBottomRightMask": ({}, _around),
}
PACKED: dict[str, tuple[dict[str, Any], Callable[[Any], dict[str, Any]]]] = {
    "BlockDiagonalMask": ({}, _nothing),
    "BlockDiagonalCausalMask": (TOP_LEFT, _nothing),
    "BlockDiagonalCausalFromBottomRightMask": (BOTTOM_RIGHT, _nothing),
    "BlockDiagonalCausalLocalAttentionMask": (TOP_LEFT, _within),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (BOTTOM_RIGHT, _within),
    "BlockDiagonalPaddedKeysMask": ({}, _nothing),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (BOTTOM_RIGHT, _nothing),
    "BlockDiagonalLocalAttentionPaddedKeysMask": ({}, _around),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (BOTTOM_RIGHT, _within),
}
PAGED: dict[str, dict[str, Any]] = {
    "PagedBlockDiagonalPaddedKeysMask": {},
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": BOTTOM_RIGHT,
}


class _Result(NamedTuple):
    out: torch.Tensor  # in the form of the query
    lse: torch.Tensor  # [B, H, M]


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """xformers' function of this name.

    Args:
        query: `[B, M, H, K]`, `[B, M, K]` or, of grouped heads, `[B, M, G, H, K]`; packed ones with `B = 1`.
        key, value: likewise. Grouped heads that were expanded are read once.
        attn_bias: a tensor `[B, H, Mq, Mk]`, broadcast as in `tilewise.attention`, or one of xformers' bias objects.
        p: dropout of the weights.
        scale: default `K ** -0.5`.
        op: None: tilewise chooses the kernel.
        output_dtype: of what is returned. Default: the query's.
    """
    return _attend(query, key, value, attn_bias, p, scale, op, output_dtype).out


def memory_efficient_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same without gradients."""
    with torch.no_grad():
        return _attend(query, key, value, attn_bias, p, scale, op, output_dtype).out


def memory_efficient_attention_forward_requires_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `lse` `[B, H, M]`, without gradients: those who call it write the backward pass themselves."""
    with torch.no_grad():
        return tuple(_attend(query, key, value, attn_bias, p, scale, op, output_dtype))  # type: ignore[return-value]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any,
    p: float,
    scale: float | None,
    op: Any,
    output_dtype: torch.dtype | None,
) -> _Result:
    if op is not None:
        raise InvalidArgument("op", repr(op), "None", "it names a kernel of xformers; tilewise chooses its own")
    shape, form = query.shape, query.ndim
    query, key, value = autocast(query, query, key, value)
    q, k, v = (_by_heads(name, x, form) for name, x in (("query", query), ("key", key), ("value", value)))
    options: dict[str, Any] = {"scale": scale, "dropout_p": float(p), "return_lse": True}
    name = type(attn_bias).__name__
    if attn_bias is None or isinstance(attn_bias, torch.Tensor):
        mask = attn_bias
        if mask is not None and form != 4:  # [B, M, N] of one head, [B, G, H, M, N] of groups
            mask = mask[:, None] if form == 3 else mask.flatten(1, 2)
        state = attention(q, k, v, layout="blhd", mask=mask, **options)
    elif name in DENSE:
        rules, more = DENSE[name]
        state = attention(q, k, v, layout="blhd", **rules, **more(attn_bias), **options)
    elif name in PACKED or name in PAGED:
        state = _packed(q, k, v, attn_bias, options)
    else:
        remedy = "attn_bias.materialize(shape) is a tensor"
        raise InvalidArgument(
            "attn_bias", f"a {name}", f"a tensor or one of {', '.join((*DENSE, *PACKED, *PAGED))}", remedy
        )
    out = state.out.reshape(*shape[:-1], value.shape[-1])
    return _Result(out if output_dtype is None else out.to(output_dtype), state.lse.transpose(1, 2))


def _packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, options: dict[str, Any]) -> Any:
    """Sequences one after another in a single row, keys perhaps with room after each sequence, or in pages."""
    if q.shape[0] != 1 or k.shape[0] != 1:
        raise InvalidArgument("query", f"a batch of {q.shape[0]}", "1: sequences are packed along M")
    device, queries, keys = q.device, bias.q_seqinfo, bias.k_seqinfo
    offsets = queries.seqstart.to(device)
    used = getattr(keys, "seqlen", None)  # of keys with room
    name = type(bias).__name__
    if name in PAGED:
        assert used is not None
        k_pages, v_pages = (x[0].unflatten(0, (-1, bias.page_size)) for x in (k, v))
        rules = {"cu_seqlens_q": offsets, "max_q": queries.max_seqlen} | PAGED[name] | options
        state = paged_attention(q[0], k_pages, v_pages, bias.block_tables.to(device), used.to(device), **rules)
    else:
        rules, more = PACKED[name]
        room = getattr(keys, "padding", keys.max_seqlen)
        state = varlen_attention(
            q[0], k[0], v[0], offsets, keys.seqstart.to(device), max_q=queries.max_seqlen, max_k=room,
            kv_lengths=None if used is None else used.to(device), **rules, **more(bias), **options,
        )  # fmt: skip
    return type(state)(state.out[None], state.lse[None])


def _by_heads(name: str, x: torch.Tensor, form: int) -> torch.Tensor:
    """`[B, M, heads, K]`; heads that were expanded from one of their group count once."""
    if x.ndim != form or form not in (3, 4, 5):
        given = f"{x.ndim} dims" if x.ndim != form else f"shape {tuple(x.shape)}"
        raise InvalidArgument(name, given, "[B, M, H, K], [B, M, K] or [B, M, G, H, K], in q, k and v alike")
    if form == 3:
        return x[:, :, None]
    if form == 5:
        return x[:, :, :, 0] if x.stride(3) == 0 and x.shape[3] > 1 and name != "query" else x.flatten(2, 3)
    return x


_replaced: list[Replaced] = []
FUNCTIONS = tuple(name for name in __all__ if name.startswith("memory_efficient"))


def install() -> None:
    """Replaces xformers' functions by tilewise's, in `xformers.ops` and in every module that has imported them.

    Code that only asks for the package, such as diffusers, then runs its xformers path on tilewise, on any device.
    """
    if not _replaced:
        try:
            home = import_module("xformers.ops.fmha")
        except ImportError:
            remedy = "the biases are its own: pip install --no-deps xformers"
            raise MissingPackage(f"xformers is not installed, {remedy}", name="xformers") from None
        _replaced.append(Replaced(home, *FUNCTIONS))
    _replaced[0].put({name: globals()[name] for name in FUNCTIONS})


def uninstall() -> None:
    """Restores xformers' own functions."""
    if _replaced:
        _replaced[0].put(_replaced[0].originals)
