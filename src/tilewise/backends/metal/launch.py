"""From a plan and its tensors to kernel launches. Nothing here reads a value on the device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ...core.plan import Plan
from ...core.problem import Problem
from ...core.storage import as_bytes
from ...core.tensors import Tensors
from . import config, device, params, text
from .spec import BK, THREADS, TYPES, Config, Spec, operand

LANES = 32
SOURCES = {  # the buffers of the attention kernels, and the fields of `Tensors` that they come from
    "q": "q", "k": "k", "v": "v", "k_scales": "k_scales", "v_scales": "v_scales", "mask": "mask",
    "slopes": "alibi_slopes", "sinks": "sinks", "lengths": "kv_lengths", "offsets": "q_offset",
    "cu_q": "cu_seqlens_q", "cu_k": "cu_seqlens_k", "table": "block_table", "out": "out", "lse": "lse",
}  # fmt: skip


def run(plan: Plan, tensors: Tensors) -> None:
    p, c = plan.problem, plan.detail
    gpu = device.current()
    states = tile_states(p, c, tensors, gpu)
    ints, floats = params.sizes(p, c, states is not None)
    numbers = params.Numbers(ints, params.strides(tensors, states), floats)
    rows = (p.total_q if p.packed_q else p.batch * p.q_len) * p.heads
    given: dict[str, Any] = {name: stored(getattr(tensors, field)) for name, field in SOURCES.items()}
    given |= {"states": states, "partial": None, "partial_ml": None}
    if c.splits > 1:
        given["partial"] = workspace(tensors.q, rows * c.splits * p.value_dim)
        given["partial_ml"] = workspace(tensors.q, rows * c.splits * 2)
    made = spec(p, c, tensors)
    grid = (config.query_tiles(p, c), p.heads // c.pack, c.splits)
    launch(gpu, c.kernel, text.attention(made), given, numbers, grid, THREADS)
    if c.splits > 1:
        launch(gpu, "combine", text.combine(made.q_type), given, numbers, (rows // p.heads, p.heads, 1), LANES)


def spec(problem: Problem, c: Config, t: Tensors) -> Spec:
    """What the attention kernel's source is generated for."""
    p = problem
    scales = [None if x is None else x.dtype for x in (t.k_scales, t.v_scales)]
    keys = operand(p.head_dim, p.k_format, scales[0])
    values = operand(p.value_dim, p.v_format, scales[1])
    if c.kernel == "vector":
        return Spec("vector", TYPES[p.q_dtype], keys, values, rows=c.rows, v_in_k=config.reads_once(p, c))
    return Spec("tiled", TYPES[p.q_dtype], keys, values, sg_rows=c.rows // 8)


def tile_states(p: Problem, c: Config, t: Tensors, gpu: device.Device) -> torch.Tensor | None:
    """Tile states in this launch's tiles, uint8 [1 or B, 1 or H, 1 or nq, 1 or nk]: from the tile map or the mask."""
    if t.tile_map is not None and config.uses_states(p, c):
        return t.tile_map.retile((c.queries, BK)).states.contiguous()
    if not config.classifies(p, c):
        return None
    assert t.mask is not None
    shape = state_shape(p, c)
    states = torch.empty(shape, dtype=torch.uint8, device=t.q.device)
    ints, floats = params.sizes(p, c, False)
    numbers = params.Numbers(ints, params.strides(t, None), floats)
    planes, heads, tiles_q, tiles_k = shape
    grid = (tiles_k, tiles_q, planes * heads)
    launch(gpu, "classify", text.classification(), {"mask": t.mask, "states": states}, numbers, grid, LANES)
    return states


def state_shape(p: Problem, c: Config) -> list[int]:
    """The shape of a mask's tile states: 1 where the mask is broadcast."""
    assert p.mask is not None
    sizes = (p.batch, p.heads, -(-p.q_len // c.queries), -(-p.kv_len // BK))
    return [1 if free else size for size, free in zip(sizes, p.mask.broadcast, strict=True)]


def launch(
    gpu: device.Device,
    name: str,
    source: str,
    given: dict[str, Any],
    numbers: params.Numbers,
    grid: tuple[int, int, int],
    threads: int,
) -> None:
    """One kernel over `grid` threadgroups of `threads`. Absent buffers are bound to a few zeros."""
    kernel = gpu.kernel(name, source, threads)
    names = text.BUFFERS[name].names
    some = next(x for x in given.values() if x is not None)
    lists = numbers._asdict()
    arguments = [lists[n] if n in lists else given[n] if given[n] is not None else nothing(some.device) for n in names]
    kernel(
        *arguments,
        threads=[grid[0] * threads, grid[1], grid[2]],
        group_size=[threads, 1, 1],
        arg_casts={names.index("ints"): "int32"},
    )


def workspace(like: torch.Tensor, size: int) -> torch.Tensor:
    """Uninitialised floats."""
    return like.new_empty(size, dtype=torch.float32)


@cache
def nothing(on: torch.device) -> torch.Tensor:
    """What an unused buffer is bound to."""
    return torch.zeros(8, dtype=torch.int32, device=on)


def stored(x: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor as a kernel reads it: bytes where Metal has no such type."""
    return None if x is None else as_bytes(x)
