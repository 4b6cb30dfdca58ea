"""`tilewise scale`: the predicted efficiency of a model's attention on many devices, by scheme."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ..core.atomic_write import write_whole
from ..distributed.plan import DistributedPlan, Machine, plan
from .bench.plot import png
from .bench.report import aligned, write_json
from .bench.svg import Chart, lines, picture
from .models import Layer

SCHEMES = ("zigzag", "ring", "gather", "ulysses", "2d")
NODE = 8  # Ulysses ranks in "2d"


def predicted(layer: Layer, length: int, ranks: int, scheme: str, backward: bool, m: Machine) -> DistributedPlan | str:
    """The plan of a layer over `ranks` ranks, or why there is none."""
    heads = {"ulysses": ranks, "2d": NODE}.get(scheme, 1)
    if scheme == "2d" and (ranks <= NODE or ranks % NODE):
        return f"needs more than {NODE} ranks"
    if layer.heads % heads:
        return f"{layer.heads} heads"
    if length % (2 * ranks):
        return "tokens do not divide"
    n = length // ranks
    q, k, v = (
        torch.empty(1, h, n, d, device="meta", dtype=torch.bfloat16)
        for h, d in (
            (layer.heads, layer.head_dim),
            (layer.kv_heads, layer.head_dim),
            (layer.kv_heads, layer.value_dim or layer.head_dim),
        )
    )
    mesh = (ranks // NODE, NODE) if scheme == "2d" else ranks
    return plan(
        q, k, v, mesh=mesh, scheme=scheme, causal=layer.causal, window=layer.window, backward=backward, machine=m
    )


def show(
    layer: Layer,
    lengths: Sequence[int],
    ranks: Sequence[int],
    schemes: Sequence[str],
    backward: bool,
    machine: Machine,
    json: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Prints a table, and writes it as JSON and as a picture."""
    rows, data = [["tokens", "ranks", "scheme", "of ideal", "ms", "balance", "steps", "sent MB a rank"]], []
    charts: dict[str, Chart] = {}
    for length in lengths:
        series: dict[str, list[tuple[float, float]]] = {scheme: [] for scheme in schemes}
        for count in ranks:
            for scheme in schemes:
                p = predicted(layer, length, count, scheme, backward, machine)
                if isinstance(p, str):
                    rows.append([f"{length:,}", str(count), scheme, "-", "-", "-", "-", p])
                    continue
                sent = max(r.sent for r in p.ranks)
                series[scheme].append((count, p.efficiency))
                rows.append([
                    f"{length:,}", str(count), scheme, f"{p.efficiency:.1%}", f"{1e3 * p.seconds:.3g}",
                    f"{p.balance:.3f}", f"{p.steps} of {p.ring}", f"{sent / 1e6:.4g}",
                ])  # fmt: skip
                data.append({
                    "tokens": length, "ranks": count, "scheme": scheme, "efficiency": p.efficiency,
                    "seconds": p.seconds, "balance": p.balance, "steps": p.steps, "sent": sent,
                })  # fmt: skip
        if any(series.values()):
            charts[f"{length:,} tokens"] = lines(series, "ranks", "share of ideal")
    what = f"{layer.heads}/{layer.kv_heads} heads of {layer.head_dim}, " + "causal, " * layer.causal
    what += f"window {layer.window}, " * bool(layer.window) + "forward" + " and backward" * backward
    notes = [f"{what}; by a model, not measured: {machine.name}"]
    print(notes[0], *aligned(rows), sep="\n")
    if json is not None:
        write_json(json, {"about": notes[0], "rows": data})
    if plot is not None:
        svg = picture(charts, "tilewise scale", notes, **({} if plot.suffix == ".svg" else {"theme": "light"}))
        write_whole(plot, svg if plot.suffix == ".svg" else png(svg))
    return 0
