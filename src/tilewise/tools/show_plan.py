"""`tilewise plan`: the plans of a known model's layers, each with a picture of its tiles."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import torch

from .. import Plan, TileMap
from ..core import cost
from ..core.options import Options
from ..core.storage import FLOATS
from ..dispatch import planner
from ..errors import InvalidArgument
from ..validation import calls
from .models import Layer, find

MOST_QUERIES = 2**25  # of a batch: the CPU's plan lists its work items
MOST_TILES = 2**20  # of a picture: more are drawn as larger ones


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
    every_backend: bool = False,
    as_json: bool = False,
) -> int:
    """Prints the plans; returns the exit status. `device` is one of torch's, or another machine by name."""
    known = find(model)
    if queries > keys:
        raise InvalidArgument("--queries", queries, f"at most {keys}, the keys: queries are the last of them")
    if rows * queries > MOST_QUERIES:
        raise InvalidArgument("--batch", rows, f"at most {MOST_QUERIES // queries} rows of {queries} queries")
    other = planner.machines().get(device)
    kind = FLOATS[dtype or ("f32" if (other.device if other else device) == "cpu" else "bf16")]
    layers = known.layers if layer is None else (known.layer(layer),)
    plans = {shown: plan_of(shown, rows, queries, keys, page_size, device, kind) for shown in layers}
    if as_json:
        layer_facts = {shown.name: facts(chosen) for shown, chosen in plans.items()}
        report = {"model": known.name, "device": device, "layers": layer_facts}
        print(json.dumps(report, indent=1))
        return 0
    print(f"{known.name}: {known.about}")
    for shown, chosen in plans.items():
        print(f"\n{shown.name} layers: {chosen.text(every_backend)}")
        print(picture(shown, chosen, queries, keys))
    return 0


def plan_of(layer: Layer, rows: int, queries: int, keys: int, page_size: int, device: str, dtype: torch.dtype) -> Plan:
    """The plan of a layer's call on a device or another machine, made with meta tensors."""

    def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    names = ("causal", "window", "chunk", "softcap", "scale")
    options: dict[str, Any] = {name: getattr(layer, name) for name in names}
    for name, present in (("sinks", layer.sinks), ("alibi_slopes", layer.alibi)):
        options[name] = empty(layer.heads, kind=torch.float32) if present else None
    q = empty(rows, layer.heads, queries, layer.head_dim)
    widths = (layer.head_dim, layer.value_dim or layer.head_dim)
    lengths = None
    if page_size:
        pages = -(-keys // page_size)
        k, v = (empty(rows * pages, page_size, layer.kv_heads, width) for width in widths)
        v = k[..., : widths[1]] if layer.latent else v
        table, unread = empty(rows, pages, kind=torch.int32), empty(rows, kind=torch.int32)
        call = calls.paged(q, k, v, table, unread, Options(**options))
        lengths = torch.full((rows,), keys, dtype=torch.int32, device="cpu")  # on the CPU: the plan reads them
    else:
        k, v = (empty(rows, layer.kv_heads, keys, width) for width in widths)
        v = k[..., : widths[1]] if layer.latent else v
        call = calls.dense(q, k, v, Options(**options))
    problem, threads = call.problem, torch.get_num_threads()
    if device in planner.machines():
        chosen = planner.choose_on(device, problem, None, threads)
    else:
        chosen = planner.choose(replace(problem, device=torch.device(device)), None, threads)
    return replace(chosen, cost=cost.estimate(problem, replace(call.tensors, kv_lengths=lengths), chosen.tile))


def facts(chosen: Plan) -> dict[str, Any]:
    """A plan as plain data."""
    assert chosen.cost is not None
    cost = asdict(chosen.cost) | {"tiles": chosen.cost.tiles._asdict()}
    return {
        "backend": chosen.backend, "kernel": chosen.kernel, "tile": chosen.tile, "splits": chosen.splits,
        "workspace_bytes": chosen.workspace_bytes, "options": chosen.problem.options(), "notes": chosen.notes,
        "not": dict(chosen.passed_over), **cost,
    }  # fmt: skip


def picture(layer: Layer, chosen: Plan, queries: int, keys: int) -> str:
    """A picture of the tiles of one head; in a long call tiles are merged."""
    rows, columns = min(chosen.tile[0], queries), min(chosen.tile[1], keys)
    tile = rows, columns
    while -(-queries // rows) * -(-keys // columns) > MOST_TILES:
        rows, columns = 2 * rows, 2 * columns
    tiles = TileMap.from_spec(
        queries, keys, (rows, columns), causal=layer.causal, window=layer.window, chunk=layer.chunk
    )
    larger = "" if (rows, columns) == tile else f"\nthe plan's tiles of {tile[0]} x {tile[1]} are merged here"
    return f"{tiles}\n. skipped  ▒ some cells hidden  █ whole{larger}"
