"""From a plan and its tensors to kernel launches. Nothing here reads a value on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...core.expression.mods import is_wide
from ...core.private.triton import INTERPRETED
from ...core.problem import Problem
from ...core.storage import as_bytes
from ...core.tensors import Tensors
from ..gpu.block_sparsity_launch import NO_LISTS, Lister, Lists
from ..gpu.flags import rules_of, softcap_of
from ..gpu.kernel import Arguments, Kernel, captured_arguments, stride_arguments
from ..gpu.launch_program import Recorder
from ..gpu.launcher import PlanLauncher, readable
from ..gpu.semaphores import Semaphores
from ..gpu.target import INTERPRETER, Target, target_of
from ..gpu.varlen_order_launch import Orderer
from . import config, tuned
from .arguments import STRIDES, TENSORS
from .combine import combine
from .fwd_kernel import fwd_kernel
from .mod_lists_launch import ModLister
from .spec import Config
from .split_kv import combines_inside

COMBINE_WARPS = 4


class Launcher(PlanLauncher):
    """The launches of a plan: what all its calls share."""

    def __init__(self, problem: Problem, c: Config, target: Target) -> None:
        super().__init__()
        p = self.problem = problem
        self.config = c
        self.target = target
        spec = self.spec = config.spec(p, c, target)
        early = {"launch_pdl": True} if spec.pdl else {}  # an option of NVIDIA's compiler only
        self.combiner = Kernel(combine, {"S": spec}, num_warps=COMBINE_WARPS, **early)
        self.lister: Lister | ModLister | None = None
        if spec.listed:
            self.lister = Lister(p, c.BM, c.BK, target.measured) if p.mask is not None else ModLister(p, spec)
        self.orderer = Orderer(p, c.BM // c.pack) if spec.ordered else None
        head_blocks = p.heads // c.pack
        self.grid = (config.query_tiles(p, c) * head_blocks * c.slices, c.splits)
        rows = p.total_q if p.packed_q else p.batch * p.q_len
        self.rows = rows * p.heads
        # The workspace of partials: m and l of every split of every row, then acc. Both are aligned to 16 bytes.
        self.partial_at = -(-self.rows * c.splits * 2 // 4) * 4
        self.partial_end = self.partial_at + self.rows * c.splits * p.value_dim
        self.sizes: Arguments = {
            "batch": p.batch,
            "head_blocks": head_blocks,
            "q_len": p.q_len,
            "kv_len": p.kv_len,
            "total_q": p.total_q,
            "scale": abs(p.scale) if spec.linear else p.scale,
            "softcap": softcap_of(p),
            **rules_of(p),
            "swizzle": config.swizzle(p, c),
            "splits": c.splits,
            "split_tiles": c.split_tiles,
            "chosen_keys": p.selected_keys,
        }
        # If the last-arriver combines, the workspace is kept, one per stream: semaphores, then partials as in `memory`.
        self.combines_inside = combines_inside(p, c)
        self.semaphores_end = -(-self.grid[0] // 4) * 4
        self.semaphores = Semaphores(self.semaphores_end + self.partial_end, spare=0)

    def __call__(self, t: Tensors) -> None:
        if t.tile_map is not None and isinstance(self.lister, Lister):
            self.run(t, self.lister.states(t.tile_map))
        else:
            self.run(t)

    def launch(self, r: Recorder, t: Tensors, *states: torch.Tensor) -> None:
        """Launches a call through `r`; `states` are those of its tile map in this launch's tiles."""
        t = replace(t, captured=readable(t.captured, r))
        inside = self.combines_inside and not r.captured
        workspace = semaphores = partial = partial_ml = flags = None
        if inside:
            semaphores = r.counters(self.semaphores)
            workspace = semaphores[self.semaphores_end :].view(torch.float32)
        elif self.spec.split:
            workspace = r.empty(self.partial_end)
        if workspace is not None:
            partial, partial_ml = workspace[self.partial_at :], workspace[: self.partial_at]
        if self.spec.guard == "flag":
            flags = r.empty(self.grid[0] * self.grid[1], dtype=torch.int32)
        lists = NO_LISTS if self.lister is None else self.lister.launch(r, t, *states)
        order = None if self.orderer is None else self.orderer.launch(r, t)
        kernel, fixup, arguments = self.attention(t, (partial, partial_ml, semaphores, flags, order), lists)
        r.launch(kernel, self.grid, arguments)
        if fixup is not None:
            r.launch(fixup, self.grid, arguments)
        if self.spec.split and not inside:
            r.launch(self.combiner, (self.rows, 1), self.combine_arguments(t, partial, partial_ml))

    def attention(
        self, t: Tensors, memory: tuple[Any, ...] = (None,) * 5, lists: Lists = NO_LISTS
    ) -> tuple[Kernel, Kernel | None, Arguments]:
        """`fwd_kernel` and its non-finite fix-up as compiled for tensors of these strides, and their arguments.

        `memory` holds split-KV partials (acc, then m and l), semaphores, flags and the varlen order. With semaphores,
        the kernel combines splits itself.
        """
        c = self.config
        p = self.problem
        pairs = all(in_pairs(x) for x, fmt in ((t.k, p.k_format), (t.v, p.v_format)) if fmt.is_quantised)
        spec = self.spec if pairs else config.spec(p, c, self.target, pairs=False)
        k, v = (_stored(x, op.unit) for x, op in ((t.k, spec.keys), (t.v, spec.values)))
        align = alignment(k, v)
        grain = align if align < 16 else 1
        scale_align = alignment(t.k_scales, t.v_scales)
        scale_grain = scale_align if scale_align < 16 else 1
        if spec.keys.in_row or spec.values.in_row:
            scale_align = min(scale_align, max(1, align * spec.keys.unit // 4))
        spec = replace(spec, grain=grain, align=align, scale_grain=scale_grain, scale_align=scale_align)
        function = fwd_kernel
        if spec.mods is not None:
            spec = replace(spec, mods=replace(spec.mods, wide=is_wide(t.captured)))
            function = fwd_kernel.with_captured(tuple(x.ndim for x in t.captured))
        if memory[2] is not None:
            spec = replace(spec, combine="inside", pdl=False)
        LIST, RANK, list_strides = lists
        given: Arguments = {name: _stored(getattr(t, source)) for name, source in TENSORS.items()}
        given |= {"K": k, "V": v, "LIST": LIST, "RANK": RANK}
        given |= dict(zip(("PARTIAL", "PARTIAL_ML", "SEMAPHORES", "FLAGS", "ORDER"), memory, strict=True))
        strided = {"q": t.q, "k": k, "v": v, "o": t.out, "lse": t.lse, "ks": t.k_scales, "vs": t.v_scales}
        strided |= {"mask": t.mask, "slopes": t.alibi_slopes, "table": t.block_table, "indices": t.key_indices}
        strided |= {"tree": t.tree_mask, "positions": t.positions, "qb": t.q_bias, "kb": t.k_bias}
        grains = {"k": grain, "v": grain, "ks": scale_grain, "vs": scale_grain}
        for name, x in strided.items():
            given |= stride_arguments(name, STRIDES[name], x, grains.get(name, 1))
        given |= dict(zip(("list_b", "list_h", "list_q", "list_n"), list_strides, strict=True))
        given |= captured_arguments(t.captured)
        kernel = Kernel(function, {"S": spec}, num_warps=c.warps, num_stages=c.stages)
        fixup_kernel = None
        if spec.guard == "flag":
            fixup_kernel = Kernel(function, {"S": replace(spec, guard="fixup")}, num_warps=c.warps, num_stages=1)
        return kernel, fixup_kernel, given | self.sizes

    def combine_arguments(self, t: Tensors, partial: Any, partial_ml: Any) -> Arguments:
        """The arguments of `combine`."""
        p = self.problem
        given: Arguments = {"PARTIAL": partial, "PARTIAL_ML": partial_ml, "OUT": t.out, "LSE": t.lse}
        given |= {"SINKS": t.sinks, "CU_Q": t.cu_seqlens_q}
        given |= stride_arguments("o", "bhl", t.out) | stride_arguments("lse", "bhl", t.lse)
        return given | {"q_len": p.q_len, "heads": p.heads, "splits": self.config.splits, "batch": p.batch}


def in_pairs(x: torch.Tensor) -> bool:
    """Whether a tensor of bytes can be read in units of two."""
    return x.shape[-1] % 2 == 0 and not any(n % 2 for n in (x.data_ptr(), *x.stride()[:-1]))


def _stored(x: torch.Tensor | None, unit: int = 1) -> torch.Tensor | None:
    """A tensor as a kernel reads it: types that Triton does not know as bytes, or as units of two bytes."""
    if x is None or unit == 1:
        return None if x is None else as_bytes(x)
    return x.view(torch.int16)


def alignment(*tensors: torch.Tensor | None) -> int:
    """Common alignment of all strides, 16 at most, which Triton detects itself; rows of D = 72 are multiples of 8.
    Without it a kernel would load single elements, not pipelined.
    """
    either = 0
    for x in tensors:
        for stride in x.stride()[:3] if x is not None else ():
            either |= stride
    return next(n for n in (16, 8, 4, 2, 1) if either % n == 0)


def launcher_of(problem: Problem) -> Launcher:
    """The launcher of a problem's plan."""
    target = target_of(problem.device)
    c = tuned.config_of(problem, target)
    return Launcher(problem, c, INTERPRETER if INTERPRETED and target.ptx else target)
