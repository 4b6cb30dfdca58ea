"""The options of the entry points as types, for overloads, and the signatures that `help` shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence  # noqa: F401  (in a signature)
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from typing_extensions import TypedDict

from .options import Array, Options, RuleOptions

if TYPE_CHECKING:
    import numpy as np

    from .tile_map import TileMap

# The kind of q, which is that of the result. Arrays of other libraries (Array) give Any.
Kind = TypeVar("Kind", torch.Tensor, "np.ndarray[Any, Any]")
Keys = Any  # an Array or a Quantised
ScoreMod = Callable[..., Any]  # (score, b, h, q_idx, kv_idx) -> score
MaskMod = Callable[..., Any]  # (b, h, q_idx, kv_idx) -> bool
Layout = Literal["bhld", "blhd"]
Function = TypeVar("Function", bound=Callable[..., Any])
NAMES: dict[str, tuple[str, ...]] = {}  # the argument names of each entry point
TENSORS: dict[str, tuple[str, ...]] = {}  # those that go by position
UNSET: dict[str, frozenset[str]] = {}  # the options of each entry point whose default is None


class SharedOptions(RuleOptions, total=False):
    scale: float | None
    mask: Array | None
    tree_mask: Array | None
    positions: Array | None
    softcap: float | None
    alibi_slopes: Array | None
    q_bias: Array | None
    k_bias: Array | None
    sinks: Array | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    key_indices: Array | None
    dropout_p: float
    dropout_seed: Array | int | None
    tile_map: TileMap | None
    split_size: int | None
    key_mass_queries: int | None
    weight_indices: Array | None
    out: Array | None
    allow_tf32: bool
    validate: bool | None
    backend: str | None


class BlockOptions(TypedDict, total=False):
    block_indices: Array | None
    block_size: int | None


class AttentionOptions(SharedOptions, BlockOptions, total=False):
    k_shared: Array | None
    kv_lengths: Array | None
    layout: Layout
    deterministic: bool


class VarlenOptions(SharedOptions, total=False):
    k_shared: Array | None
    max_q: int | None
    max_k: int | None
    kv_lengths: Array | None
    deterministic: bool


class PagedOptions(SharedOptions, BlockOptions, total=False):
    cu_seqlens_q: Array | None
    max_q: int | None
    layout: Layout


class CacheOptions(AttentionOptions, total=False):
    """Of `KVCache.attend`."""

    counts: Array | None


class BatchOptions(PagedOptions, total=False):
    """Of a paged cache's `Batch.attend`."""

    cascade: bool | None


class PagedCacheOptions(BatchOptions, total=False):
    """Of `PagedKVCache.attend`."""

    layer: int
    counts: Array | None


def typed_signature(options: Any, lse: bool = True) -> Callable[[Function], Function]:
    """Decorator: gives a function of `**options` a signature that names them, with the defaults of `Options`.

    `lse`: it has `return_lse` and `return_aux` too, which are not in the types because the overloads differ in them.
    """
    types = {name: getattr(x, "__forward_arg__", x) for name, x in options.__annotations__.items()}
    if lse:
        types |= {"return_lse": "bool", "return_aux": "Sequence[str] | None"}

    def show(function: Function) -> Function:
        found = inspect.signature(function)
        tensors = [p for p in found.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        named = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=types[f.name])
            for f in fields(Options)
            if f.name in types
        ]
        function.__signature__ = found.replace(parameters=[*tensors, *named])  # type: ignore[attr-defined]
        NAMES[function.__name__] = tuple(p.name for p in (*tensors, *named))
        TENSORS[function.__name__] = tuple(p.name for p in tensors)
        UNSET[function.__name__] = frozenset(p.name for p in named if p.default is None)
        return function

    return show
