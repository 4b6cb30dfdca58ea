"""The position rules of a tile map, checked, and the key spans that they leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidArgument
from .arrays import to_tensor
from .devices import as_device
from .mask_rules import MaskRules, Offset, Places, key_spans, place_rows
from .options import LIMIT, PLACES, Options, as_offset, as_places, as_rules, is_int, to_int


@dataclass(frozen=True, slots=True)
class TileMapSpec:
    """The position rules that a map was made from; a call that uses the map must ask for the same."""

    rules: MaskRules  # relative(): positions are below
    q_offset: torch.Tensor | int | None
    kv_lengths: torch.Tensor | None
    places: torch.Tensor | tuple[int, int, int]  # as in `Tensors` or `MaskRules`


def spec_of(
    o: Options, Lq: int, Lk: int, device: torch.device | str | None
) -> tuple[TileMapSpec, tuple[torch.Tensor, torch.Tensor]]:
    """The rules of `TileMap.from_spec`, and the key spans `lo`, `hi` `[1 or B, Lq]` of its queries."""
    given = _given(o, Lq, Lk)
    q_offset, kv_lengths, *numbers = given.values()
    rows = [x for x in given.values() if isinstance(x, torch.Tensor)]
    device = as_device(device) if device is not None else rows[0].device if rows else torch.device("cpu")
    lengths = torch.tensor([Lk], dtype=torch.int64, device=device)
    if kv_lengths is not None:
        lengths = kv_lengths.long().to(device)
    offset = lengths - Lq if q_offset is None else torch.as_tensor(q_offset, device=device).long().reshape(-1)
    batch = len(rows[0]) if rows else 1
    places: torch.Tensor | tuple[int, int, int]
    steps: tuple[Any, ...]
    if any(isinstance(x, torch.Tensor) for x in numbers):
        places = place_rows(numbers, batch, device, LIMIT)
        steps = places.long()[:, :, None].unbind(1)  # [B, 1] each
    else:
        steps = places = as_places(numbers, q_offset if isinstance(q_offset, int) else "end", Lq, Lk)
    kind: Offset = "end" if q_offset is None else q_offset if isinstance(q_offset, int) else "rows"
    own: Places = places if isinstance(places, tuple) else "rows"
    rules = as_rules(o, kind, places=own, sizes=(Lq, Lk)).relative()  # as those of the call
    positions = offset[:, None] + steps[2] * torch.arange(Lq, device=device)  # [1 or B, Lq]
    spans = key_spans(rules, positions.expand(batch, -1), lengths[:, None], steps[:2])
    return TileMapSpec(rules, q_offset, kv_lengths, places), spans


def _given(o: Options, Lq: int, Lk: int) -> dict[str, Any]:
    """Offsets, lengths and places: None, ints, or tensors `[B]` of one length, checked for their range."""
    q_offset = to_int(o.q_offset)
    if q_offset is not None and is_int(q_offset):
        as_offset(q_offset, Lq, Lk)
    elif q_offset is not None:
        q_offset = to_tensor("q_offset", q_offset)
    found = {
        "q_offset": q_offset,
        "kv_lengths": None if o.kv_lengths is None else to_tensor("kv_lengths", o.kv_lengths),
    }
    for name in PLACES:
        x = to_int(getattr(o, name))
        found[name] = x if is_int(x) else to_tensor(name, x)
    rows = {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}
    for name, x in rows.items():
        if x.ndim != 1 or x.dtype not in (torch.int32, torch.int64):
            raise InvalidArgument(name, f"{x.dtype} of rank {x.ndim}", "an int32 or int64 tensor [B]")
        if x.is_cpu:
            low, high = (0, Lk) if name == "kv_lengths" else (Lk - LIMIT, LIMIT - Lq)
            low, high = (-LIMIT, LIMIT) if name == "k_start" else (1, LIMIT) if name in PLACES else (low, high)
            for b, value in enumerate(x.tolist()):
                if not low <= value <= high:
                    raise InvalidArgument(f"{name}[{b}]", value, f"{low} to {high}")
    sizes = {name: len(x) for name, x in rows.items()}
    if len(set(sizes.values())) > 1:
        name = next(iter(sizes))
        other = max(sizes, key=lambda x: sizes[x] != sizes[name])
        raise InvalidArgument(name, f"{sizes[name]} rows", f"{sizes[other]}, as {other}")
    return found
