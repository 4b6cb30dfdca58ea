"""Checks that a tile map belongs to its call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..core.expression.mods import Mods
from ..core.problem import Problem
from ..core.tensors import Tensors, sequences
from ..core.tile_map import TileMap
from ..core.tile_spec import TileMapSpec
from ..errors import InvalidArgument
from .values import readable


def as_tile_map(tile_map: Any, heads: int, kv_heads: int) -> TileMap | None:
    """The option as a map of query heads: blocks may be chosen for each KV head."""
    if tile_map is not None and not isinstance(tile_map, TileMap):
        remedy = "make one with TileMap.from_mask or TileMap.from_spec"
        raise InvalidArgument("tile_map", type(tile_map).__name__, "None or a TileMap", remedy)
    if tile_map is not None and tile_map.chosen and 1 < tile_map.states.shape[1] == kv_heads < heads:
        return replace(tile_map, states=tile_map.states.repeat_interleave(heads // kv_heads, 1))
    return tile_map


def check_tile_map(problem: Problem, tensors: Tensors, validate: Any) -> None:
    """Refuses a map of another shape, mask or rules than the call's: it would hide or show the wrong keys."""
    p, tile_map = problem, tensors.tile_map
    if tile_map is None:
        return
    if tile_map.states.device != p.device:
        raise InvalidArgument("tile_map", f"device {tile_map.states.device}", f"{p.device}, as q")
    if validate is True:
        tile_map.check_states()
    planes, sizes = tuple(tile_map.states.shape[:2]), (p.batch, p.heads)
    if any(n not in (1, size) for n, size in zip(planes, sizes, strict=True)):
        raise InvalidArgument("tile_map", f"{planes} planes", f"{sizes}, each size or 1")
    if tile_map.chosen and (p.selection is None or p.selection.block == 1):
        remedy = "block_indices=tile_map.block_indices(), block_size=...: a map alone hides nothing"
        raise InvalidArgument("tile_map", "a map of chosen blocks, without block_indices", "block_indices too", remedy)
    kind = None if p.mask is None else "bool" if p.mask.is_bool else "float"
    if tile_map.mask_kind is not None and kind is None:
        raise InvalidArgument("tile_map", "a map of a dense mask, without that mask", "mask= beside it")
    if tile_map.mask_kind != kind:
        given = "no mask" if tile_map.mask_kind is None else f"a {tile_map.mask_kind} mask"
        remedy = "combine them: TileMap.from_mask(mask, tile) & TileMap.from_spec(...)"
        raise InvalidArgument("tile_map", f"a map of {given}", f"one that classifies the call's {kind} mask", remedy)
    broadcast = (False, False) if p.mask is None or tile_map.spec is not None else p.mask.broadcast[2:]
    for covered, size, free in zip(tile_map.shape, (p.q_len, p.kv_len), broadcast, strict=True):
        if covered != (1 if free else size):
            raise InvalidArgument("tile_map", f"a map of {tile_map.shape}", f"{(p.q_len, p.kv_len)}: (Lq, Lk)")
    if tile_map.spec is not None:
        _check_spec(tile_map.spec, p, tensors, validate)


def check_map_of_mod(tile_map: TileMap | None, mods: Mods | None) -> None:
    """Refuses a map of another mask_mod than the call's. `mods` are those before rules are taken out of them."""
    if tile_map is None or tile_map.mask_mod is None:
        return
    if mods is None or mods.mask_alone is not tile_map.mask_mod:
        given = "no mask_mod" if mods is None or mods.mask is None else "another"
        remedy = "mask_mod= beside it, with the same function"
        raise InvalidArgument("tile_map", "a map of a mask_mod", f"one of the call's, which has {given}", remedy)


def _check_spec(spec: TileMapSpec, p: Problem, tensors: Tensors, validate: Any) -> None:
    """Refuses a map made from other position rules, offsets or lengths than the call's."""
    if p.positions:
        raise InvalidArgument("tile_map", "a map of position rules beside positions", "a map of the mask alone")
    if spec.rules != p.rules.relative():
        raise InvalidArgument("tile_map", f"a map of the rules: {spec.rules}", f"the call's: {p.rules}")
    held = (
        spec.q_offset,
        spec.kv_lengths,
        spec.places,
        tensors.places,
        tensors.q_offset,
        tensors.kv_lengths,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_k,
    )
    if not all(readable(x, validate) for x in held if hasattr(x, "device")):  # type: ignore[arg-type]
        return
    lengths = [p.kv_len] * p.batch if spec.kv_lengths is None else spec.kv_lengths.tolist()
    if spec.q_offset is None:
        offsets = [length - p.q_len for length in lengths]
    else:
        offsets = [spec.q_offset] * p.batch if isinstance(spec.q_offset, int) else spec.q_offset.tolist()
    places = spec.places.tolist() if isinstance(spec.places, torch.Tensor) else [spec.places] * p.batch
    mine = [(seq.q_offset, seq.kv_len, seq.places) for seq in sequences(p, tensors)]
    if mine != list(zip(offsets, lengths, map(tuple, places), strict=False)):
        want = "the call's q_offset, kv_lengths, k_start, k_stride and q_stride"
        raise InvalidArgument("tile_map", "a map of other offsets, strides or lengths", want)
