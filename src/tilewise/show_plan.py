"""`tilewise plan`: the plans of a known model's layers, each with a picture of its tiles."""

from __future__ import annotations

from typing import Any

import torch

from . import Plan, TileMap, plan
from .conformance.case import DTYPES
from .errors import InvalidArgument
from .models import Layer, find


def show(
    model: str,
    *,
    keys: int,
    queries: int,
    layer: str | None = None,
    rows: int = 1,
    page_size: int = 0,
    device: str = "cpu",
    dtype: str | None = None,
) -> int:
    """Prints them; returns the exit status."""
    known = find(model)
    if queries > keys:
        raise InvalidArgument("--queries", queries, f"at most {keys}, the keys: queries are the last of them")
    kind = DTYPES[dtype or ("bf16" if device == "cuda" else "f32")]
    layers = known.layers if layer is None else (known.layer(layer),)
    print(f"{known.name}: {known.about}")
    for each in layers:
        chosen = plan_of(each, rows, queries, keys, page_size, torch.device(device), kind)
        print(f"\n{each.name} layers: {chosen}")
        print(picture(each, chosen, queries, keys))
    return 0


def plan_of(
    layer: Layer, rows: int, queries: int, keys: int, page_size: int, device: torch.device, dtype: torch.dtype
) -> Plan:
    """The plan of a layer's call. Its tensors are never written, and so take no memory on a CPU."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    names = ("causal", "window", "chunk", "softcap", "scale")
    options: dict[str, Any] = {name: getattr(layer, name) for name in names}
    for name, asked in (("sinks", layer.sinks), ("alibi_slopes", layer.alibi)):
        options[name] = torch.zeros(layer.heads, device=device) if asked else None
    q = empty(rows, layer.heads, queries, layer.head_dim)
    widths = (layer.head_dim, layer.value_dim or layer.head_dim)
    if not page_size:
        k, v = (empty(rows, layer.kv_heads, keys, width) for width in widths)
        return plan(q, k, v, **options)
    pages = -(-keys // page_size)
    k, v = (empty(rows * pages, page_size, layer.kv_heads, width) for width in widths)
    table = torch.arange(rows * pages, dtype=torch.int32, device=device).view(rows, pages)
    lengths = torch.full((rows,), keys, dtype=torch.int32, device=device)
    return plan(q, k, v, block_table=table, context_lens=lengths, **options)


def picture(layer: Layer, chosen: Plan, queries: int, keys: int) -> str:
    """The tiles of one head."""
    tile = (min(chosen.tile[0], queries), min(chosen.tile[1], keys))
    found = TileMap.from_spec(queries, keys, tile, causal=layer.causal, window=layer.window, chunk=layer.chunk)
    return f"{found}\n. skipped  ▒ some cells hidden  █ whole"
