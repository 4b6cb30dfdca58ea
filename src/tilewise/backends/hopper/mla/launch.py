"""From a plan and its tensors to the launches of latent decode. Nothing here reads a value on the device."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....core.problem import Problem
from ....core.tensors import Tensors
from ...gpu.kernel import Arguments, Kernel, stride_arguments
from ...gpu.launch_program import Recorder, Workspaces
from ...gpu.launcher import PlanLauncher
from ...gpu.semaphores import Semaphores
from ...gpu.target import Target, target_of
from ..descriptors import block_descriptor
from . import config
from .combine import combine
from .kernel import latent_decode
from .spec import LATENT, ROPE


class Launcher(PlanLauncher):
    """The launches of a plan: what all its calls share."""

    def __init__(self, problem: Problem, target: Target) -> None:
        super().__init__()
        p = self.problem = problem
        c = self.config = config.config_of(p, target)
        self.spec = config.spec(p, c)
        self.lse_at = c.partial_rows * LATENT  # offset in the workspace, in elements of 4 bytes
        self.fragments_at = self.lse_at + c.partial_rows
        self.decode = Kernel(latent_decode)
        self.counters = Semaphores(c.sequences)
        self.combining = Kernel(combine, {"ROWS": c.rows, "COLUMNS": c.columns, "AT_ONCE": c.at_once})
        self.sizes: Arguments = {
            "batch": c.sequences, "heads": p.heads, "q_len": p.q_len, "kv_len": p.kv_len, "tiles": c.tiles,
            "splits": c.splits, "head_rows": c.head_rows, "factor": config.factor(p), "size": c.size,
            "chosen": p.selection.count if p.selection else 0, "per": p.q_len if p.selection else 1,
        }  # fmt: skip

    def launch(self, r: Recorder, t: Tensors, *more: torch.Tensor) -> None:
        c, given = self.config, self.arguments(t, r)
        r.launch(self.decode, (c.splits * c.tiles, 1), given)
        if c.cut and not self.spec.inside:
            r.launch(self.combining, (c.combiners, 1), given)

    def arguments(self, t: Tensors, r: Workspaces) -> Arguments:
        """The arguments of both kernels."""
        workspace = r.empty(self.fragments_at + self.config.sequences)
        s, cache = self.spec, t.k[:, 0]  # [pages or B, rows, 576], in float8 656 bytes
        if cache.stride(1) != LATENT + ROPE:
            s = replace(s, prefetch=False)  # needs contiguous rows
        rows = t.q.transpose(1, 2)  # [B, Lq, H, 576]
        q_block, k_block = [1, s.queries, s.head_rows], [1, s.page_rows]
        given: Arguments = {
            "q": block_descriptor(rows, [*q_block, s.width], s.dtype),
            "q_rope": block_descriptor(rows, [*q_block, ROPE], s.dtype),
            "k": None if s.gather else block_descriptor(cache, [*k_block, s.width], s.dtype),
            "k_rope": None if s.gather else block_descriptor(cache, [*k_block, ROPE], s.dtype),
            "CACHE": cache.view(torch.int32) if s.fp8 else cache,
            "SCALES": cache.view(torch.float32) if s.fp8 else None, "page_size": cache.shape[1],
            "INDICES": t.key_indices, "out": block_descriptor(t.out.transpose(1, 2), [*q_block, s.width], s.dtype),
            "OUT": t.out, "LSE": t.lse, "SINKS": t.sinks, "LENGTHS": t.kv_lengths, "TABLE": t.block_table,
            "PARTIAL": workspace, "PARTIAL_LSE": workspace[self.lse_at :],
            "FRAGMENTS": workspace[self.fragments_at :].view(torch.int32), "S": s,
            "COUNTERS": r.counters(self.counters) if s.inside else None,
        }  # fmt: skip
        given |= stride_arguments("table", "b", t.block_table) | stride_arguments(
            "page", "bl", cache, 16 // cache.element_size()
        )
        given |= stride_arguments("i", "bhl", t.key_indices) | self.sizes
        return given | stride_arguments("o", "bhl", t.out) | stride_arguments("lse", "bhl", t.lse)


def launcher_of(problem: Problem) -> Launcher:
    """The launcher of a problem's plan."""
    return Launcher(problem, target_of(problem.device))
