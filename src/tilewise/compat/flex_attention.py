"""torch's `flex_attention`, served by tilewise: functions on scores and block masks, with gradients on any device.

>>> from tilewise.compat.flex_attention import create_block_mask, flex_attention
>>> mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 300, 300, device="cpu")
>>> q = torch.randn(1, 2, 300, 32, requires_grad=True)
>>> out = flex_attention(q, q, q, score_mod=lambda score, b, h, q_idx, kv_idx: score * 2, block_mask=mask)
>>> out.sum().backward()
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import flex_attention as _home
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_mask, noop_mask, or_masks

from ..api import attention
from ..core.eager import eager_function
from ..core.expression.mods import TRACED_ITSELF
from ..core.private.torch import any_autocast
from ..core.problem import MAX_HEAD_DIM
from ..errors import InvalidArgument
from .autocast import autocast
from .block_mask import NO_BLOCKS, create_block_mask, mask_mod_of
from .caller_names import caller_names
from .replaced import REFUSALS, Replaced, count

__all__ = ["and_masks", "create_block_mask", "create_mask", "fallbacks", "flex_attention", "install", "installed",
           "noop_mask", "or_masks", "uninstall"]  # fmt: skip

_replaced = Replaced(_home, "flex_attention", "create_block_mask")
_torchs = _replaced.originals

fallbacks: Counter[str] = Counter()  # calls that torch served under `install(fallback=True)`, by the refused argument


@caller_names(q="query", k="key", v="value", mask_mod="block_mask")
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """The same as `torch.nn.attention.flex_attention.flex_attention`, with gradients and lse on a CPU too.

    `q_idx` and `kv_idx` are row numbers, as torch's. Under autocast, tensors are converted to its dtype. float64 and
    head dims over 576 go to torch's own function.

    Args:
        query: `[B, Hq, L, E]`.
        key: `[B or 1, Hkv, S, E]`.
        value: `[B or 1, Hkv, S, Ev]`.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)`; float tensors that it captures may require grad.
        block_mask: from `create_block_mask`, torch's or tilewise's. A cell is visible in a full block, and in a partial
            one if the mask's `mask_mod` says so.
        scale: factor of the scores. Default: `E ** -0.5`.
        enable_gqa: allow `Hq` to be a multiple of `Hkv`.
        return_lse: also return lse, `[B, Hq, L]` float32.
        kernel_options: those of torch's kernels: tilewise has others, and the result does not depend on them.
        return_aux: torch's `AuxRequest(lse=True, max_scores=True)`, on a CPU too.

    Returns:
        `[B, Hq, L, Ev]` in query's dtype, 0 in rows that see no key; with it lse, or torch's `AuxOutput`.
    """
    _check(query, key, value, enable_gqa)
    if return_aux is not None and return_lse:
        remedy = "return_aux=AuxRequest(lse=True)"
        raise InvalidArgument("return_lse", "both return_lse and return_aux", "one of them", remedy)
    if not isinstance(kernel_options, (dict, type(None))):
        raise InvalidArgument("kernel_options", type(kernel_options).__name__, "None or a dict")
    if query.dtype is torch.float64 or max(query.shape[3], value.shape[3]) > MAX_HEAD_DIM:
        aux = {} if return_aux is None else {"return_aux": return_aux}
        return _torchs["flex_attention"](query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse,
                                         kernel_options, **aux)  # fmt: skip
    if any_autocast():
        query, key, value = autocast(query, query, key, value)
    mask_mod = None if block_mask is None else _mask_mod(block_mask, query, key)
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    options: dict[str, Any] = {"q_offset": 0}
    if scale is not None:
        options["scale"] = scale
    if score_mod is not None:
        options["score_mod"] = score_mod
    if mask_mod is not None:
        options["mask_mod"] = mask_mod
    if return_aux is None:
        result = attention(query, key, value, return_lse=bool(return_lse), **options)
        return tuple(result) if return_lse else result
    names = ["lse"] * bool(return_aux.lse) + ["max_logits"] * bool(return_aux.max_scores)
    out, found = attention(query, key, value, return_aux=names, **options)
    return out, _home.AuxOutput(lse=found.lse, max_scores=found.max_logits)


eager_function(flex_attention, TRACED_ITSELF)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    """What torch asks of the three beyond what `attention` does."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested:
            raise InvalidArgument(name, "a nested tensor", "a plain one", "varlen_attention takes its values")
        if x.ndim != 4:
            raise InvalidArgument(name, f"rank {x.ndim}", "rank 4: [B, H, L, E]")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        remedy = "enable_gqa=True lets several query heads share one"
        raise InvalidArgument("key", f"{key.shape[1]} heads", f"query's {query.shape[1]}", remedy)
    if key.shape[0] not in (1, query.shape[0]):
        raise InvalidArgument("key", f"{key.shape[0]} batch rows", f"query's {query.shape[0]}, or 1")


def _mask_mod(mask: Any, query: torch.Tensor, key: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The mask as a mask_mod of `attention`; checks that it is one of this call's sizes."""
    if not isinstance(mask, BlockMask):
        given = f"a {type(mask).__name__}"
        remedy = "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN) makes one of a function"
        raise InvalidArgument("block_mask", given, "a BlockMask", remedy)
    lengths = query.shape[2], key.shape[2]
    if min(mask.BLOCK_SIZE) < NO_BLOCKS and tuple(mask.seq_lengths) != lengths:
        given = f"a mask of {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} keys"
        raise InvalidArgument("block_mask", given, f"{lengths[0]} and {lengths[1]}", "make one of these lengths")
    if mask.kv_indices.device != query.device:
        raise InvalidArgument("block_mask", f"device {mask.kv_indices.device}", f"{query.device}, as query")
    return mask_mod_of(mask, query.shape[0], query.shape[1])


def install(*, fallback: bool = False) -> None:
    """Replaces torch's `flex_attention` and `create_block_mask` by tilewise's.

    They are replaced in `torch.nn.attention.flex_attention` and in every module that has imported them from there. Code
    that holds the result of `torch.compile(flex_attention)` keeps it; transformers makes its own anew.

    Args:
        fallback: what tilewise refuses goes to torch, with a warning the first time; `fallbacks` counts them.
    """
    ours: tuple[Any, ...] = (flex_attention, create_block_mask)
    _put(dict(zip(_torchs, (_flex_or_torch, _mask_or_torch) if fallback else ours, strict=True)))


def uninstall() -> None:
    """Restores torch's own functions."""
    _put(_torchs)


@contextmanager
def installed(*, fallback: bool = False) -> Iterator[None]:
    """A context manager: `install()` on entry; on exit, what was there before is restored."""
    before = _replaced.now()
    install(fallback=fallback)
    try:
        yield
    finally:
        _put(before)


def _put(functions: dict[str, Any]) -> None:
    _replaced.put(functions)
    theirs = sys.modules.get("transformers.integrations.flex_attention")
    if theirs is not None:  # it keeps one compiled function for the process
        theirs.WrappedFlexAttention._instance = None


def _flex_or_torch(*args: Any, **options: Any) -> Any:
    """`flex_attention`, or torch's where it refuses."""
    try:
        return flex_attention(*args, **options)
    except REFUSALS as refusal:
        count(fallbacks, refusal)
    return _torchs["flex_attention"](*args, **options)


def _mask_or_torch(*args: Any, **options: Any) -> BlockMask:
    try:
        return create_block_mask(*args, **options)
    except REFUSALS as refusal:
        count(fallbacks, refusal)
    return _torchs["create_block_mask"](*args, **options)


for _function in (_flex_or_torch, _mask_or_torch):
    eager_function(_function)
