"""torch's `scaled_dot_product_attention`, served by tilewise.

float64, which torch computes faster, and head dims over 576, for which tilewise has no kernels, go to torch's own
function; `why_torch` says so. Other calls that tilewise cannot serve raise an error or, with `install(fallback=True)`,
go to torch.

>>> import torch.nn.functional as F
>>> from tilewise.compat import sdpa
>>> q = torch.randn(1, 4, 10, 32)
>>> with sdpa.installed():
...     out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
>>> torch.allclose(out, F.scaled_dot_product_attention(q, q, q, is_causal=True), atol=1e-6)
True
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.compiler import is_compiling

from ..api import attention
from ..core.private.torch import any_autocast
from ..core.problem import MAX_HEAD_DIM
from ..errors import InvalidArgument
from . import sdpa_kernel
from .autocast import autocast
from .caller_names import caller_names
from .replaced import REFUSALS, Replaced, count
from .sdpa_inputs import as_causal, is_causal_bias, jagged_attention

_NAME = "scaled_dot_product_attention"
_replaced = Replaced(torch.nn.functional, _NAME)
_torchs = _replaced.originals[_NAME]

fallbacks: Counter[str] = Counter()  # calls that torch served under `install(fallback=True)`, by the refused argument


@caller_names(q="query", k="key", v="value", mask="attn_mask", causal="is_causal")
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
    """The same as `torch.nn.functional.scaled_dot_product_attention`, with gradients, also for a float `attn_mask`.

    Under autocast, tensors are converted to its dtype, as in torch's function.

    Args:
        query: `[..., H, L, E]`, rank 2 or more; leading dims of query, key and value broadcast, as in a matrix product.
            Or all three are nested tensors `[B, H, L, E]` of layout `torch.jagged`, computed by `varlen_attention`.
        key: `[..., Hkv, S, E]`.
        value: `[..., Hkv, S, Ev]`.
        attn_mask: bool (True: attend) or float (added to the scores), broadcast to `[..., H, L, S]`; or a `CausalBias`
            of `torch.nn.attention.bias`. Not with `is_causal`.
        dropout_p: as there; which weights are dropped differs from torch, for the same `torch.manual_seed`.
        is_causal: query `i` sees keys 0 to `i`, also if `L != S` (top-left alignment).
        scale: factor of the scores. Default: `E ** -0.5`.
        enable_gqa: allow `H` to be a multiple of `Hkv`. Otherwise they are equal, or one of them is 1.

    Returns:
        `[..., H, L, Ev]` in query's dtype; 0 in rows that see no key.
    """
    if is_causal and attn_mask is not None:
        remedy = "tilewise.attention(..., mask=..., causal=True, q_offset=0) takes both"
        raise InvalidArgument("attn_mask", "a mask with is_causal=True", "one of the two, as in torch", remedy)
    if query.is_nested or key.is_nested or value.is_nested:
        return jagged_attention(query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p)
    if any_autocast():
        query, key, value = autocast(query, query, key, value)
        (attn_mask,) = autocast(query, attn_mask)
    if not (query.dtype == key.dtype == value.dtype):
        raise InvalidArgument("key", f"{key.dtype}, value {value.dtype}", f"query's {query.dtype} for both")
    if query.ndim == key.ndim == value.ndim == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]:
        shape = None
    else:
        query, key, value, attn_mask, shape = _of_rank_4(query, key, value, attn_mask, enable_gqa)
    offset = 0 if is_causal else None
    if attn_mask is not None and type(attn_mask) is not torch.Tensor:
        attn_mask, is_causal, offset = as_causal(attn_mask, query.shape[2], key.shape[2])
    if query.dtype is torch.float64 or query.shape[3] > MAX_HEAD_DIM or value.shape[3] > MAX_HEAD_DIM:
        if is_causal and offset != 0:  # torch's flag is aligned to the top left
            attn_mask, is_causal = _lower_right(query, key), False
        grouped = query.shape[1] != key.shape[1]
        out = _torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
    else:
        options: dict[str, Any] = {"causal": is_causal, "q_offset": offset} if is_causal else {}
        if attn_mask is not None:
            options["mask"] = attn_mask
        if scale is not None:
            options["scale"] = scale
        if dropout_p != 0.0:
            options["dropout_p"] = dropout_p
        out = attention(query, key, value, **options)
    return out if shape is None else out.reshape(shape)


def _of_rank_4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, list[int]]:
    """Tensors of any rank, leading dims broadcast, as `[B, H, L, E]`; the mask likewise; the output's shape."""
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
    """The numbers of query heads and of KV heads after broadcasting."""
    if enable_gqa:
        if k != v or not k or q % k:
            raise InvalidArgument("key", f"{k} heads, value {v}", f"one number for both, a divisor of query's {q}")
        return q, k
    most = max(q, k, v)
    if any(n not in (1, most) for n in (q, k, v)):
        remedy = "enable_gqa=True lets several query heads share one"
        raise InvalidArgument("key", f"{k} heads, value {v}", f"query's {q}, or 1", remedy)
    return most, 1 if k == v == 1 else most


def why_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> str | None:
    """Why torch's own function would serve this call, as a short text; None if tilewise serves or refuses it.

    >>> why_torch(*[torch.zeros(1, 1, 2, 8, dtype=torch.float64)] * 3)
    'float64: torch computes it faster'
    """
    if query.dtype is torch.float64:
        return "float64: torch computes it faster"
    if max(query.shape[-1], value.shape[-1]) > MAX_HEAD_DIM:
        return f"head dims over {MAX_HEAD_DIM}"
    return None


def install(*, fallback: bool = False) -> None:
    """Replaces torch's `scaled_dot_product_attention` by tilewise's.

    It is replaced in `torch.nn.functional` and in every module that has imported it from there. On the CPU, if this
    torch has a registry of flash kernels, tilewise also replaces that kernel below torch's own function. This reaches
    code that holds the function in other ways, and torch's C++ modules. What tilewise cannot serve there, torch serves.
    The fast path of `nn.MultiheadAttention` and `nn.TransformerEncoder`, which calls neither, is switched off
    (`torch.backends.mha`).

    Args:
        fallback: calls that tilewise refuses go to torch, with a warning the first time; `fallbacks` counts them.
    """
    global _fast_path
    if torch.nn.functional.scaled_dot_product_attention is _torchs:
        _fast_path = torch.backends.mha.get_fastpath_enabled()
    _replaced.put({_NAME: _or_torch if fallback else scaled_dot_product_attention})
    sdpa_kernel.activate()
    torch.backends.mha.set_fastpath_enabled(False)


def uninstall() -> None:
    """Restores torch's own function, and the fast path of its modules as it was."""
    if torch.nn.functional.scaled_dot_product_attention is not _torchs:
        torch.backends.mha.set_fastpath_enabled(_fast_path)
    _replaced.put(_replaced.originals)
    sdpa_kernel.restore()


@contextmanager
def installed(*, fallback: bool = False) -> Iterator[None]:
    """A context manager: `install()` on entry; on exit, what was there before is restored."""
    before = _replaced.now()
    active, fast_path = sdpa_kernel.active(), torch.backends.mha.get_fastpath_enabled()
    install(fallback=fallback)
    try:
        yield
    finally:
        _replaced.put(before)
        torch.backends.mha.set_fastpath_enabled(fast_path)
        if not active:
            sdpa_kernel.restore()


def _or_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """`scaled_dot_product_attention`, or torch's where it refuses."""
    try:
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    except REFUSALS as refusal:
        if not is_compiling():
            count(fallbacks, refusal)
    if attn_mask is not None and type(attn_mask) is not torch.Tensor and is_causal_bias(attn_mask):
        _, _, offset = as_causal(attn_mask, query.shape[-2], key.shape[-2])
        attn_mask, is_causal = (None, True) if offset == 0 else (_lower_right(query, key), False)
    return _torchs(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _lower_right(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    rows, keys = query.shape[-2], key.shape[-2]
    return torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)


_fast_path = True  # whether torch's modules had theirs before `install`
