"""Translates FlashAttention's options to tilewise's; refuses those that have no counterpart."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, TypedDict

import torch

from ...core import keywords
from ...errors import InvalidArgument

# FlashAttention's names of tilewise's arguments.
NAMES = {
    "scale": "softmax_scale", "window": "window_size", "chunk": "attention_chunk", "sinks": "s_aux",
    "max_q": "max_seqlen_q", "max_k": "max_seqlen_k",
}  # fmt: skip
Side = int | None
WindowSize = tuple[Side, Side] | Sequence[Side] | torch.Tensor | None


class CacheLater(TypedDict, total=False):
    """Options that FlashAttention 3 and its forks add to those of FlashAttention 2; all by keyword.

    attention_chunk: a query sees only keys of its own chunk of this many positions; 0 is off.
    s_aux: `[H]`, sinks.
    qv: as q with the width of V: `qv v` is added to `q k` before the scale, which is `(D + Dv) ** -0.5` by default.
    q_v: another name for `qv`.
    q_descale, k_descale, v_descale: a number or `[B, Hkv]`: factors of float8 values of q, k and v. For wider dtypes
        they are not used, as in FlashAttention 3.
    pack_gqa, sm_margin, scheduler_metadata, fa_version: how FlashAttention uses a GPU. They never change a result and
        have no counterpart here.
    """

    attention_chunk: int
    s_aux: torch.Tensor | None
    qv: torch.Tensor | None
    q_v: torch.Tensor | None
    q_descale: torch.Tensor | float | None
    k_descale: torch.Tensor | float | None
    v_descale: torch.Tensor | float | None
    pack_gqa: bool | None
    sm_margin: int
    scheduler_metadata: Any
    fa_version: int


class Later(CacheLater, total=False):
    """The same, and a keyword that in FlashAttention 2 only `flash_attn_with_kvcache` had.

    num_splits: number of parts that keys are split into; 0 lets tilewise choose.
    """

    num_splits: int


class FlashOptions(Later, total=False):
    """The options of `flash_attn_func` as keywords, for overloads."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: WindowSize
    softcap: float
    alibi_slopes: torch.Tensor | None
    deterministic: bool


class VarlenFlashOptions(FlashOptions, total=False):
    """Likewise of `flash_attn_varlen_func`."""

    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    block_table: torch.Tensor | None
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    page_table: torch.Tensor | None
    out: torch.Tensor | None


def translate(
    keys: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    later: Later,
) -> dict[str, Any]:
    """The options that are set, as keywords of `tilewise.attention`; `keys` is the longest sequence of keys."""
    options: dict[str, Any] = {"causal": causal}
    if dropout_p != 0.0:
        options["dropout_p"] = dropout_p
    if softmax_scale is not None:
        options["scale"] = softmax_scale
    if (sides := window(window_size)) is not None:
        options["window"] = sides
    if softcap != 0.0:
        options["softcap"] = softcap
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes
    if later:
        known = Later.__annotations__
        if unknown := [name for name in later if name not in known]:
            names = [*keywords.of(translate)[1:-1], *known]  # without keys and later
            keywords.refuse(unknown, names, "tilewise.compat.flash_attn.flash_attn_func")
        options["chunk"] = chunk(later.get("attention_chunk", 0))
        options["sinks"] = later.get("s_aux")
        options["split_size"] = split_size(later.get("num_splits", 0), keys)
    return options


def one_table(block_table: torch.Tensor | None, page_table: torch.Tensor | None) -> torch.Tensor | None:
    """The block table: FlashAttention 2 and 3 have different names for it."""
    if block_table is not None and page_table is not None:
        raise InvalidArgument("page_table", "both page_table and block_table", "one of them: both mean the same")
    return page_table if block_table is None else block_table


def window(window_size: WindowSize) -> tuple[int | None, int | None] | None:
    """FlashAttention's pair, in which a negative side is unlimited."""
    if window_size is None:
        return None
    sides = window_size.tolist() if isinstance(window_size, torch.Tensor) else window_size
    if not (isinstance(sides, (tuple, list)) and len(sides) == 2):
        raise InvalidArgument("window_size", repr(window_size), "a pair (left, right); -1 is unlimited")
    left, right = (None if side is None or index(side) < 0 else index(side) for side in sides)
    return None if left is None and right is None else (left, right)


def chunk(attention_chunk: int) -> int | None:
    if index(attention_chunk) < 0:
        raise InvalidArgument("attention_chunk", attention_chunk, "0 (off) or more")
    return index(attention_chunk) or None


def split_size(num_splits: int, keys: int) -> int | None:
    """Keys of each split, for `num_splits` splits."""
    if index(num_splits) < 0:
        raise InvalidArgument("num_splits", num_splits, "0 (tilewise decides) or more")
    return max(1, -(-keys // index(num_splits))) if num_splits else None
