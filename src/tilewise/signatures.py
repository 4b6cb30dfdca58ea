"""The options of the entry points as types, for their overloads."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from .core.tile_map import TileMap

Array = Any  # a torch tensor, a NumPy array, or anything with __dlpack__; results are of q's kind
Keys = Any  # an Array or a Quantised
Width = int | tuple[int | None, int | None]
Layout = Literal["bhld", "blhd"]


class SharedOptions(TypedDict, total=False):
    scale: float | None
    causal: bool
    q_offset: Array | int | None
    window: Width | None
    chunk: int | None
    mask: Array | None
    softcap: float | None
    alibi_slopes: Array | None
    sinks: Array | None
    tile_map: TileMap | None
    split_size: int | None
    out: Array | None
    allow_tf32: bool
    validate: bool | None
    backend: str | None


class AttentionOptions(SharedOptions, total=False):
    kv_lengths: Array | None
    layout: Layout


class VarlenOptions(SharedOptions, total=False):
    max_q: int | None
    max_k: int | None
    kv_lengths: Array | None


class PagedOptions(SharedOptions, total=False):
    cu_seqlens_q: Array | None
    max_q: int | None
    layout: Layout
