"""From a plan and its tensors to kernel launches. Nothing here reads a value on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...core.plan import Plan
from ...core.problem import Problem
from ...core.storage import as_bytes
from ...core.tensors import Tensors
from . import config, device, params, text
from .options import MASK_KINDS, options_of
from .spec import BK, SIMDGROUPS, THREADS, TYPES, Config, Spec, operand
from .text import LANES

SOURCES = {  # the buffers of the attention kernels, and the fields of `Tensors` that they come from
    "q": "q", "k": "k", "v": "v", "k_scales": "k_scales", "v_scales": "v_scales", "mask": "mask",
    "slopes": "alibi_slopes", "sinks": "sinks", "lengths": "kv_lengths", "offsets": "q_offset",
    "cu_q": "cu_seqlens_q", "cu_k": "cu_seqlens_k", "table": "block_table", "out": "out", "lse": "lse",
}  # fmt: skip


def run(plan: Plan, tensors: Tensors) -> None:
    p, c = plan.problem, plan.detail
    gpu = device.current()
    states = tile_states(p, c, tensors, gpu)
    numbers = params.numbers(p, c, tensors, states)
    rows = (p.total_q if p.packed_q else p.batch * p.q_len) * p.heads
    given: dict[str, Any] = {name: stored(getattr(tensors, field)) for name, field in SOURCES.items()}
    given["states"] = states
    if c.splits > 1:
        given["partial"] = workspace(tensors.q, rows * c.splits * p.value_dim)
        given["partial_ml"] = workspace(tensors.q, rows * c.splits * 2)
    made = spec(p, c, tensors)
    grid = (config.query_tiles(p, c), p.heads // c.pack, c.splits)
    launch(gpu, text.attention(made), given, numbers, grid, THREADS)
    if c.splits > 1:
        combine = text.combine(made.q_type, made.options)
        launch(gpu, combine, given, numbers, (rows // p.heads, p.heads, 1), LANES)


def spec(problem: Problem, c: Config, t: Tensors) -> Spec:
    """What the attention kernel's source is generated for."""
    p = problem
    unit = 32 if c.kernel == "vector" else 8 * SIMDGROUPS // (c.rows // 8)  # columns of all simdgroups of a row
    scales = [None if x is None else x.dtype for x in (t.k_scales, t.v_scales)]
    keys = operand(p.head_dim, p.k_format, scales[0], unit)
    values = operand(p.value_dim, p.v_format, scales[1], unit)
    made = Spec(c.kernel, TYPES[p.q_dtype], keys, values, options_of(p, c, t))
    if c.kernel == "vector" and config.reads_once(p, c):  # a lane has the same columns of both
        return replace(made, values=replace(values, columns=keys.columns), rows=c.rows, v_in_k=True)
    if c.kernel == "vector":
        return replace(made, rows=c.rows)
    return replace(made, sg_rows=c.rows // 8)


def tile_states(p: Problem, c: Config, t: Tensors, gpu: device.Device) -> torch.Tensor | None:
    """Tile states in this launch's tiles, uint8 [1 or B, 1 or H, 1 or nq, 1 or nk]: from the tile map or the mask."""
    if t.tile_map is not None and config.uses_states(p, c):
        return t.tile_map.retile((c.queries, BK)).states.contiguous()
    if not config.classifies(p, c):
        return None
    assert t.mask is not None
    shape = state_shape(p, c)
    states = torch.empty(shape, dtype=torch.uint8, device=t.q.device)
    numbers = params.numbers(p, c, t, None)
    planes, heads, tiles_q, tiles_k = shape
    grid = (tiles_k, tiles_q, planes * heads)
    launch(
        gpu,
        text.classification(MASK_KINDS[t.mask.dtype]),
        {"mask": stored(t.mask), "states": states},
        numbers,
        grid,
        LANES,
    )
    return states


def state_shape(p: Problem, c: Config) -> list[int]:
    """The shape of a mask's tile states: 1 where the mask is broadcast."""
    assert p.mask is not None
    sizes = (p.batch, p.heads, -(-p.q_len // c.queries), -(-p.kv_len // BK))
    return [1 if free else size for size, free in zip(sizes, p.mask.broadcast, strict=True)]


def launch(
    gpu: device.Device,
    source: text.Source,
    given: dict[str, Any],
    numbers: params.Numbers,
    grid: tuple[int, int, int],
    threads: int,
) -> None:
    """One kernel over `grid` threadgroups of `threads`."""
    kernel = gpu.kernel(source.kernel, source.torch, threads)
    lists = numbers._asdict()
    names = source.names
    kernel(
        *(lists[n] if n in lists else given[n] for n in names),
        threads=[grid[0] * threads, grid[1], grid[2]],
        group_size=[threads, 1, 1],
        arg_casts={names.index("ints"): "int32"},
    )


def workspace(like: torch.Tensor, size: int) -> torch.Tensor:
    """Uninitialised floats."""
    return like.new_empty(size, dtype=torch.float32)


def stored(x: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor as a kernel reads it: bytes where Metal has no such type."""
    return None if x is None else as_bytes(x)
