"""From a plan of a backward pass and its tensors to kernel launches, in this order:

    sum_delta         delta = rowsum(dout out) - dlse, for each row and head
    key_gradients     dK and dV
    query_gradients   dQ, each row's share of the slopes' gradient, the gradient of a mask with no broadcast dim
    distance_gradients  gradients of captured tensors by q - k; those by queries and keys are sums of the kernels above
    mask_gradients    the gradient of a broadcast mask
    row_sums          gradients of sinks and slopes

Every sum has a fixed order, so that the same call gives the same bits.

Products also multiply operands under hidden cells, by zero. If such an operand is not finite, a gradient becomes NaN;
then a program sets a flag, and a second launch of the same grid recomputes the flagged tiles with NaN and Inf in
operands replaced by 0 (non-finite fix-up, `fixup_of`). Its other programs exit at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ....core.expression.mods import is_wide
from ....core.expression.sums import AXES, LoadGradient
from ....core.mod_gradients import add_axis_sums, loads_of
from ....core.private.triton import INTERPRETED
from ....core.problem import MaskSpec, Problem
from ....core.storage import as_bytes
from ....core.tensors import BackwardTensors, Tensors
from ....core.tile_map import TileMap
from ...gpu.block_sparsity_launch import NO_LISTS, Lister, Lists
from ...gpu.flags import rules_of, softcap_of
from ...gpu.kernel import Arguments, Kernel, captured_arguments, stride_arguments
from ...gpu.launch_program import Recorder, Workspaces
from ...gpu.launcher import PlanLauncher, readable
from ...gpu.target import INTERPRETER, Target, target_of
from ..launch import alignment
from . import config, dense_mask
from .arguments import GRADIENTS, STRIDES, TENSORS
from .distances import distance_gradients
from .keys import key_gradients
from .mask import mask_gradients
from .queries import query_gradients
from .rows import row_sums, sum_delta
from .spec import BackwardConfig, Tile

Launch = tuple[Kernel, tuple[int, int], Arguments]


class Backward(PlanLauncher):
    """The backward launches of a plan: what all its calls share."""

    def __init__(self, problem: Problem, c: BackwardConfig, target: Target) -> None:
        super().__init__()
        self.given = problem
        p = self.problem = dense_mask.masked_problem(self.given)
        self.config, self.target = c, target
        self.rows = p.total_q if p.packed_q else p.q_len
        self.sizes: Arguments = {
            "batch": p.batch, "heads": p.heads, "rows": self.rows, "q_len": p.q_len, "kv_len": p.kv_len,
            "total_q": p.total_q, "scale": p.scale, "softcap": softcap_of(p), **rules_of(p),
            "total_k": 0, "swizzle": 1, "mask_heads": 1, "tiles_q": 1, "tiles_k": 1,
        }  # fmt: skip
        self.cells = "mask" in p.grads and p.mask is not None and not any(p.mask.broadcast)
        self.guarded = config.hides(p)
        self.loads: dict[str, list[LoadGradient]] = {axis: [x for x in loads_of(p) if x.axis == axis] for axis in AXES}
        self.listers: dict[str, Lister] = {}
        if config.lists_tiles(p):
            listed = replace(p, heads=p.heads // dense_mask.heads_of_plane(self.given))
            self.listers["queries"] = Lister(listed, c.queries.BQ, c.queries.BK, target.measured)
            self.listers["keys"] = Lister(transposed(listed), c.keys.BK, c.keys.BQ, target.measured)

    def __call__(self, t: BackwardTensors) -> None:
        p, t = self.problem, self.with_mask(t)
        if self.cells and t.dmask is not None and config.skips(p):
            t.dmask.zero_()
        sums = self.load_sums(t)
        more = [*sums.values()]
        if t.dsinks is not None:  # by sequence
            more.append(torch.empty(p.batch, p.heads, dtype=torch.float32, device=t.dout.device))
        for side, lister in self.listers.items():
            if (tile_map := of_side(t.forward, side).tile_map) is not None:
                more.append(lister.states(tile_map))
        self.run(t, *more)
        if t.dsinks is not None:
            torch.sum(more[len(sums)], 0, out=t.dsinks)
        self.write_captured(t, sums)

    def load_sums(self, t: BackwardTensors) -> dict[str, torch.Tensor]:
        """Room for the sums of each load over its axis, `[loads, B, H, n]` or packed `[loads, 1, H, n]`."""
        p = self.problem
        made: dict[str, torch.Tensor] = {}
        keys = t.forward.k.shape[2] if p.form == "varlen" else p.kv_len
        sizes = {"rows": self.rows, "keys": keys, "distances": self.rows + keys}
        for axis, loads in self.loads.items():
            if loads:
                shape = (len(loads), 1 if p.packed_q else p.batch, p.heads, sizes[axis])
                fill = torch.zeros if p.packed_q else torch.empty  # rows of no sequence
                made[axis] = fill(shape, dtype=torch.float32, device=t.dout.device)
        return made

    def write_captured(self, t: BackwardTensors, sums: dict[str, torch.Tensor]) -> None:
        """The gradients of captured tensors: of each element, the sums of all indices that lead to it."""
        totals = {n: torch.zeros(x.shape, dtype=torch.float64, device=x.device) for n, x in t.dcaptured.items()}
        for axis, found in sums.items():
            for load, x in zip(self.loads[axis], found, strict=True):
                by_head = x.transpose(0, 1).reshape(self.problem.heads, -1)
                add_axis_sums(self.problem, t.forward, load, by_head, totals[load.number])
        for number, x in t.dcaptured.items():
            x.copy_(totals[number])

    def with_mask(self, t: BackwardTensors) -> BackwardTensors:
        """The tensors of `problem`: with a dense mask in the place of indices and positions."""
        if not dense_mask.is_needed(self.given):
            return t
        return replace(t, forward=dense_mask.masked_tensors(self.given, t.forward))

    def launch(self, r: Recorder, t: BackwardTensors, *more: torch.Tensor) -> None:
        """Launches a pass through `r`; `more`: room for the sums of loads and for the sinks' gradients, and the states
        of a tile map.
        """
        t = replace(t, forward=replace(t.forward, captured=readable(t.forward.captured, r)))
        memory = self.memory(t, r)
        states = [*more]
        sums = {axis: states.pop(0) for axis, loads in self.loads.items() if loads}
        if t.dsinks is not None:
            memory["DSINKS"] = states.pop(0)
        lists = {}
        for i, (side, lister) in enumerate(self.listers.items()):
            lists[side] = lister.launch(r, of_side(t.forward, side), *states[i : i + 1])
        for kernel, grid, given in self.launches(t, memory, lists, sums):
            r.launch(kernel, grid, given)
            if (fixup := fixup_of(kernel)) is not None:
                r.launch(fixup, grid, given)

    def memory(self, t: BackwardTensors, r: Workspaces) -> Arguments:
        """The workspaces of a pass, without that of the sinks."""
        p, grads = self.problem, self.problem.grads
        planes = (1 if p.packed_q else p.batch, p.heads, self.rows)
        return {
            "DELTA": r.empty(*planes),
            "DROWS": r.empty(*planes) if "alibi_slopes" in grads else None,
            "FLAGS": r.empty(max(self.grid_sizes(t)), dtype=torch.int32) if self.guarded else None,
        }

    def grid_sizes(self, t: BackwardTensors) -> tuple[int, int]:
        """Grid sizes of dK and dV and of dQ; upper bounds for packed sequences."""
        p, BK, BQ = self.problem, self.config.keys.BK, self.config.queries.BQ
        if p.packed_q:
            return (t.forward.k.shape[2] // BK + p.batch + 1) * p.kv_heads, (p.total_q // BQ + p.batch + 1) * p.heads
        return p.batch * -(-p.kv_len // BK) * p.kv_heads, p.batch * -(-p.q_len // BQ) * p.heads

    def launches(
        self, t: BackwardTensors, memory: Arguments, lists: dict[str, Lists], sums: dict[str, torch.Tensor]
    ) -> Iterator[Launch]:
        """Kernels in their order, with grids and arguments."""
        p, c, grads = self.problem, self.config, self.problem.grads
        given = self.arguments(t) | {"DSINKS": None} | memory | _listed(NO_LISTS)
        grain = given.pop("grain")
        captured = t.forward.captured
        ranks, wide = tuple(x.ndim for x in captured), is_wide(captured)

        def kernel(function: Any, tile: Tile, **what: Any) -> Kernel:
            near = tile.BQ * max(given["mask_q"], given["lse_l"]) < 2**31
            what["mask_group"] = dense_mask.heads_of_plane(self.given)
            spec = replace(config.spec(p, tile, self.target, **what), near=near, grain=grain)
            if spec.mods is not None and hasattr(function, "with_captured"):
                function = function.with_captured(ranks)
                spec = replace(spec, mods=replace(spec.mods, wide=wide))
            constants: Arguments = {"S": spec}
            if function is row_sums:
                constants["BLOCK"] = config.SUMMED_ROWS
            return Kernel(function, constants, num_warps=tile.warps, num_stages=tile.stages)

        planes, programs = 1 if p.packed_q else p.batch, self.grid_sizes(t)
        small = Tile(config.DELTA_ROWS, 16, 4, 1)
        yield kernel(sum_delta, small, dlse=p.dlse), (-(-self.rows // small.BQ) * planes * p.heads, 1), given
        sides: list[list[str]] = [[name for name in names if name in grads] for names in (("k", "k_bias"), ("v",))]
        if self.loads["keys"]:
            sides[0].append("loads")
        for names in [names for names in (sides if c.apart else [sides[0] + sides[1]]) if names]:
            sizes = {"total_k": t.forward.k.shape[2], "swizzle": config.swizzle(p, True), "LOADS": sums.get("keys")}
            loads = self.loads["keys"] if "loads" in names else ()
            made = kernel(key_gradients, c.keys, loads=loads, **{f"d{name}": True for name in names if name in grads})
            yield made, (programs[0], 1), given | sizes | _listed(lists.get("keys", NO_LISTS))
        slopes = "alibi_slopes" in grads
        biases = "q_bias" in grads
        if "q" in grads or slopes or biases or self.cells or self.loads["rows"]:
            what = {"dq": "q" in grads, "dslopes": slopes, "dq_bias": biases, "dmask": "cells" if self.cells else ""}
            made = kernel(query_gradients, c.queries, loads=self.loads["rows"], **what)
            sizes = {"swizzle": config.swizzle(p, False), "LOADS": sums.get("rows")}
            yield made, (programs[1], 1), given | sizes | _listed(lists.get("queries", NO_LISTS))
        if self.loads["distances"]:
            assert c.distances is not None
            made = kernel(distance_gradients, c.distances, loads=self.loads["distances"], diagonal=True)
            sizes = {"total_k": t.forward.k.shape[2], "LOADS": sums["distances"]}
            tiles = -(-(p.q_len + p.kv_len) // c.distances.BK)
            yield made, (p.batch * p.heads * tiles, 1), given | sizes
        if "mask" in grads and not self.cells:
            assert p.mask is not None
            own = (p.batch, p.heads, -(-p.q_len // c.mask.BQ), -(-p.kv_len // c.mask.BK))
            B, H, nq, nk = (1 if free else n for n, free in zip(own, p.mask.broadcast, strict=True))
            sizes = {"mask_heads": H, "tiles_q": nq, "tiles_k": nk}
            yield kernel(mask_gradients, c.mask, dmask="sums"), (B * H * nq * nk, 1), given | sizes
        if "sinks" in grads or slopes:
            made = kernel(row_sums, small, dsinks="sinks" in grads, dslopes=slopes)
            yield made, (p.batch * p.heads, 1), given

    def arguments(self, t: BackwardTensors) -> Arguments:
        """The arguments of all kernels, and `grain`, the unit of the strides of q, k, v and dout."""
        f, given = t.forward, pointers(t)
        align = alignment(f.q, f.k, f.v, t.dout)
        grain = align if align < 16 else 1
        strided: dict[str, torch.Tensor | None] = {
            "q": f.q, "k": f.k, "v": f.v, "do": t.dout, "lse": f.lse, "dq": t.dq, "dk": t.dk, "dv": t.dv,
            "mask": f.mask, "dmask": t.dmask, "slopes": f.alibi_slopes, "o": f.out, "dlse": t.dlse,
            "tree": f.tree_mask, "qb": f.q_bias, "kb": f.k_bias,
        }  # fmt: skip
        for name, x in strided.items():
            given |= stride_arguments(name, STRIDES.get(name, "bhl"), x, grain if name in ("q", "k", "v", "do") else 1)
        given |= captured_arguments(f.captured)
        return given | self.sizes | {"grain": grain, "LOADS": None}


def pointers(t: BackwardTensors) -> Arguments:
    """The tensors of a call by the kernels' argument names."""
    found = {name: getattr(t.forward, source) for name, source in TENSORS.items()}
    found |= {name: getattr(t, source) for name, source in GRADIENTS.items()}
    cells = {"MASK": t.forward.mask, "TREE": t.forward.tree_mask}
    return found | {name: None if x is None else as_bytes(x) for name, x in cells.items()}


def fixup_of(kernel: Kernel) -> Kernel | None:
    """The same kernel for flagged programs: it keeps NaN and Inf from products with hidden cells."""
    spec = kernel.constants["S"]
    sums = spec.dq or spec.dk or spec.dv  # sums of products; the others are masked cell by cell
    if spec.guard != "flag" or not sums or kernel.function.__name__ not in ("key_gradients", "query_gradients"):
        return None
    constants = {"S": replace(spec, guard="fixup")}
    return Kernel(kernel.function, constants, num_warps=kernel.options["num_warps"], num_stages=1)


def transposed(problem: Problem) -> Problem:
    """The mask and sizes of a problem with queries and keys swapped."""
    p = problem
    assert p.mask is not None
    b, h, q, k = p.mask.broadcast
    return replace(p, q_len=p.kv_len, kv_len=p.q_len, mask=MaskSpec(p.mask.dtype, (b, h, k, q)))


def of_side(t: Tensors, side: str) -> Tensors:
    """The tensors that a lister reads, transposed for side "keys" (dK and dV)."""
    if side == "queries":
        return t
    assert t.mask is not None
    m = t.tile_map
    if m is not None:
        m = TileMap(m.states.transpose(2, 3), (m.tile[1], m.tile[0]), (m.shape[1], m.shape[0]), m.mask_kind, None)
    return replace(t, mask=t.mask.transpose(2, 3), tile_map=m)


def _listed(lists: Lists) -> Arguments:
    LIST, RANK, strides = lists
    return {"LIST": LIST, "RANK": RANK} | dict(zip(("list_b", "list_h", "list_q", "list_n"), strides, strict=True))


def launcher_of(problem: Problem) -> Backward:
    """The launcher of a problem's plan."""
    target = target_of(problem.device)
    if INTERPRETED and target.ptx:
        target = INTERPRETER
    return Backward(problem, config.config(dense_mask.masked_problem(problem), target), target)
