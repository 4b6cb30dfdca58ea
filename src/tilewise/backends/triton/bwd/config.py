"""Launch heuristics of the backward pass: plain functions of a `Problem`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....core.expression.sums import LoadGradient
from ....core.problem import Problem
from ...gpu.flags import DTYPE_NAMES, ceil_pow2, classifies, flags_of
from ...gpu.target import INTERPRETER, Target
from ..mod_printer import ModFunctions, captured_bytes
from ..operands import is_float32, operand
from .spec import BackwardConfig, BackwardSpec, Tile

L2_SWIZZLE = 32 << 20  # bytes of rows that an L2 swizzle group may hold
DELTA_ROWS = 32  # rows of a program of `sum_delta`
SUMMED_ROWS = 1024  # rows that a program of `row_sums` loads at once
CHUNK = 64  # columns of a product where tiles are reloaded, and of a float32 product (`add_dot`)
FEW_ROWS = 16  # queries up to which float32 products over columns are sums, not MMA
SCRATCH = 2048  # bytes of shared memory for reductions and layout conversions, and for each warp:
WARP_SCRATCH = 256


def config(problem: Problem, target: Target) -> BackwardConfig:
    """The launch shapes of a problem on a device, fitted to its shared memory."""
    c = _tiles(problem, target)
    return replace(
        c,
        keys=fitted(problem, c.keys, target, "keys"),
        queries=fitted(problem, c.queries, target, "queries"),
        mask=fitted(problem, c.mask, target, "queries"),
        distances=None if problem.mods is None else distance_tile(problem, target),
    )


def distance_tile(problem: Problem, target: Target) -> Tile:
    """The tile of gradients by distances: as many queries as keys."""
    wide = max(problem.head_dim, problem.value_dim)
    size = min(32 if is_float32(problem) or wide > 128 else 64, _least(max(problem.q_len, problem.kv_len)))
    tile = Tile(size, size, min(4 if wide <= 64 else 8, target.most_warps), 1)
    while target.vendor != "interpreter" and needed(problem, tile, "queries") > target.shared_memory:
        assert size > 16 or not tile.reload, f"no tile fits {target}: {problem}"
        size = max(16, size // 2)
        tile = replace(tile, BQ=size, BK=size, reload=tile.BK == 16)
    return tile


def _tiles(problem: Problem, target: Target) -> BackwardConfig:
    wide = max(problem.head_dim, problem.value_dim)
    if target.vendor == "interpreter":  # where a step takes the same time whatever its size
        tile = Tile(64, 64, 4, 1)
        return BackwardConfig(tile, tile, tile, apart=wide > 256)
    if target.amd:
        tile = amd_tile(problem, wide, target)
        return BackwardConfig(tile, tile, tile, apart=wide > (64 if target.rdna else 128))
    if is_float32(problem):
        few = target.reads_operands and wide <= 64
        tile = Tile(32, 16 if few else 32, 4 if wide <= 64 and target.large_backward_tiles else 8, 1, wide > 128)
        keys = Tile(64, 32, 8, 1) if wide <= 64 and target.large_backward_tiles else tile
        return BackwardConfig(keys, tile, tile, apart=wide > 256)
    if not target.large_backward_tiles:
        tile = Tile(32, 32, 4, 2)
        if wide > 128 or is_crowded(problem):
            tile = Tile(32 if target.reads_operands and wide <= 256 else 16, 32, 8, 1)
        return BackwardConfig(tile, tile, tile, apart=wide > 256)
    # dK and dV of 128 keys do not fit together where heads are wider than 128.
    dense = problem.mask is not None and not problem.mask.is_bool
    if wide <= 64:
        small = Tile(64, 64, 4, 3)  # for masks: programs of an SM hide each other's latency
        if dense:
            return BackwardConfig(Tile(64, 128, 8, 2), small, small)
        return BackwardConfig(Tile(32, 64, 4, 3), Tile(64, 32, 4, 3), small)
    if wide <= 128:
        queries = Tile(128, 64, 8, 2) if dense else Tile(64, 32, 4, 3)
        return BackwardConfig(Tile(32, 128, 8, 3), queries, Tile(64, 64, 4, 2))
    if wide <= 256:
        return BackwardConfig(Tile(32, 128, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 8, 1), apart=True)
    return BackwardConfig(Tile(32, 64, 8, 1), Tile(64, 32, 8, 1), Tile(64, 32, 8, 1), apart=True)


def amd_tile(problem: Problem, wide: int, target: Target) -> Tile:
    """Tiles for AMD GPUs, chosen by register use as compiled; none has been measured."""
    if target.rdna:
        few = is_crowded(problem) or problem.rules.flags.jumps or (problem.softcap > 0 and wide > 64)
        return Tile(16, 32, 8, 1) if few else Tile(32, 32, 4 if wide <= 64 else 8, 1)
    if wide <= 128 and not is_float32(problem) and not is_crowded(problem):
        return Tile(64, 64, 4, 1)
    return Tile(32, 32 if wide <= 256 else 16, 4, 1, reload=wide > 256 or is_float32(problem))


def is_crowded(problem: Problem) -> bool:
    """Whether a step holds more than scores and operands: a mask tile, biases of rows and columns, functions."""
    return problem.mask is not None or problem.biased or problem.mods is not None


def fitted(problem: Problem, tile: Tile, target: Target, side: str) -> Tile:
    """The tile, clipped to the call's lengths and reduced until it fits shared memory: by fewer stages, then less of
    what a step loads, then less of what a program keeps.
    """
    p = problem
    tile = replace(tile, BQ=min(tile.BQ, _least(p.q_len)), BK=min(tile.BK, _least(p.kv_len)))
    while target.vendor != "interpreter" and needed(p, tile, side) > target.shared_memory:
        kept, step = ("BK", "BQ") if side == "keys" else ("BQ", "BK")
        if tile.stages > 1:
            tile = replace(tile, stages=tile.stages - 1)
        elif getattr(tile, step) > 16 and getattr(tile, step) >= getattr(tile, kept):
            tile = replace(tile, **{step: getattr(tile, step) // 2})
        else:
            smaller = getattr(tile, kept) > 16
            assert smaller or not tile.reload, f"no tile fits {target}: {problem}"
            tile = replace(tile, **{kept: getattr(tile, kept) // 2}) if smaller else replace(tile, reload=True)
    return tile


def needed(problem: Problem, tile: Tile, side: str) -> int:
    """An upper bound on the bytes of shared memory of a launch: what a program keeps, what its stages load, weights
    during layout conversion, and scratch.
    """
    p = problem
    s = spec(p, tile, target=None)
    columns = max(s.k.widths + s.v.widths) if tile.reload else sum(s.k.widths) + sum(s.v.widths)
    kept, step = (tile.BK, tile.BQ) if side == "keys" else (tile.BQ, tile.BK)
    size = 4 if is_float32(p) else 2
    total = (kept + tile.stages * step) * columns * size
    total += tile.stages * captured_bytes(p.mods, tile.BQ, tile.BK)
    return total + size * tile.BQ * tile.BK + SCRATCH + WARP_SCRATCH * tile.warps


def spec(
    problem: Problem, tile: Tile, target: Target | None, loads: Sequence[LoadGradient] = (), diagonal: bool = False,
    **what: Any,
) -> BackwardSpec:  # fmt: skip
    """What a kernel is compiled for; `what`: the gradients that it computes, and `mask_group`. `loads` are those of
    captured tensors whose gradients it sums, `diagonal` whether by distances.
    """
    p = problem
    most = max(tile.BQ, tile.BK)
    device = target or INTERPRETER
    k = operand(p, p.head_dim, p.k_format, True, most, device)
    v = operand(p, p.value_dim, p.v_format, False, most, device)
    if tile.reload or is_float32(p):
        k, v = (replace(op, widths=(CHUNK,) * -(-op.columns // CHUNK)) if op.columns > CHUNK else op for op in (k, v))
    own: dict[str, Any] = {
        "work": DTYPE_NAMES[p.q_dtype],
        "precision": device.precision(p.allow_tf32),
    }  # of q and dout: q's type alone
    flags = flags_of(p, tile.BK)
    if p.mods is not None:
        own_loads = {x.load for x in loads}
        numbers = tuple(n for n, x in enumerate(p.mods.by_loads) if x in own_loads)
        flags |= {"mods": ModFunctions(p.mods, backward=True, loads=numbers), "linear": False}
    flags["tail"] |= diagonal
    flags["dropout_by_block"] &= not diagonal  # its tiles begin at any key
    tail_q = p.packed_q or diagonal or p.q_len % tile.BQ != 0
    none: dict[str, Any] = {
        "dq": False, "dk": False, "dv": False, "dmask": "", "dsinks": False, "dslopes": False, "dlse": False,
        "dq_bias": False, "dk_bias": False, "mask_group": 1,
    }  # fmt: skip
    return BackwardSpec(
        **flags,
        q=replace(k, **own),
        k=k,
        v=v,
        dout=replace(v, **own),
        round=DTYPE_NAMES[p.q_dtype],
        BQ=tile.BQ,
        BK=tile.BK,
        reload=tile.reload,
        few=is_float32(p) and not p.allow_tf32 and p.q_len <= FEW_ROWS,
        group=p.group,
        varlen=p.form == "varlen",
        listed=lists_tiles(p) and not diagonal,
        loads=len(loads),
        diagonal=diagonal,
        # Always for wide heads: the branch keeps MMA descriptors out of registers, which spill.
        partial=hides(p) or tail_q or flags["tail"] or max(p.head_dim, p.value_dim) > 256,
        tail_q=tail_q,
        guard="flag" if hides(p) else "",
        ptx=target is not None and target.ptx,
        near=False,
        grain=1,
        summed=(False,) * 4 if p.mask is None else p.mask.broadcast,
        **(none | what),
    )


def hides(problem: Problem) -> bool:
    """Whether cells of a tile may be hidden."""
    p = problem
    return p.mask is not None or p.rules.by_position or p.biased or p.tree or p.mods is not None


def skips(problem: Problem) -> bool:
    """Whether there may be tiles that no program visits."""
    return problem.rules.by_position or problem.has_lengths or lists_tiles(problem)


def lists_tiles(problem: Problem) -> bool:
    """Whether a block-sparsity list is made first: for a mask with a tile map, or one that is classified."""
    p = problem
    return p.mask is not None and (p.tile_map is not None or classifies(p))


def swizzle(problem: Problem, of_keys: bool) -> int:
    """Planes of an L2 swizzle group, whose tiles are interleaved: those whose rows fit L2 together. 1 for packed
    queries, and where no rule makes some tiles longer than others.

    A plane is a KV head, whose programs read its group's queries, or a query head, whose programs read its keys.
    """
    p = problem
    if not p.rules.by_position or p.packed_q:
        return 1
    if of_keys:
        size, planes = p.q_len * p.group * p.q_dtype.itemsize * (p.head_dim + p.value_dim), p.batch * p.kv_heads
    else:
        size, planes = p.kv_len * p.k_dtype.itemsize * (p.head_dim + p.value_dim) // p.group, p.batch * p.heads
    return max(1, min(planes, L2_SWIZZLE // max(1, size)))


def _least(length: int) -> int:
    return max(16, ceil_pow2(length))
