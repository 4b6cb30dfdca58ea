"""From a plan and its tensors to kernel launches. Nothing here reads a value on the device."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....core.problem import Problem
from ....core.tensors import Tensors
from ...gpu.block_sparsity_launch import NO_LISTS, BlockLister, Lists
from ...gpu.flags import rules_of, softcap_of
from ...gpu.kernel import Arguments, Kernel, stride_arguments
from ...gpu.launch_program import Recorder, Workspaces
from ...gpu.launcher import PlanLauncher
from ...gpu.semaphores import SPARE, Semaphores
from ...gpu.target import Target, target_of
from ...gpu.varlen_order import rank_sequences
from ..descriptors import descriptor
from . import config
from .config import Config
from .kernel import fwd_kernel

TENSORS = {  # arguments, and the fields of `Tensors` that they come from; q, k, v and out have descriptors too
    "OUT": "out", "LSE": "lse", "SLOPES": "alibi_slopes", "SINKS": "sinks", "PLACES": "places",
    "INDICES": "key_indices", "KV_LENGTHS": "kv_lengths", "Q_OFFSET": "q_offset", "CU_Q": "cu_seqlens_q",
    "CU_K": "cu_seqlens_k",
}  # fmt: skip
FIXUP_COLUMNS = 128  # output columns that the fix-up computes at a time; more would not fit a warpgroup's registers
ORDER_RUN = 64  # sequences that one program of `rank_sequences` ranks
FLAGS_AT = 4  # offset of the non-finite flags of tiles, after the counter: aligned to 16 bytes
SPARE_BYTES = 4 << 20  # of counters and flags for captured calls


class Launcher(PlanLauncher):
    """The launches of a plan: what all its calls share."""

    def __init__(self, problem: Problem, c: Config, target: Target) -> None:
        super().__init__()
        p = self.problem = problem
        s = config.spec(p, c)
        tiles = p.total_q // s.BM + p.batch + 1 if p.packed_q else p.batch * -(-p.q_len // s.BM)
        self.work_tiles = tiles * p.heads * s.value_tiles  # an upper bound for packed sequences
        places = target.processors * c.per_processor
        self.programs = min(self.work_tiles, places)
        # Where work tiles differ in length, they are scheduled dynamically.
        self.dynamic = self.programs < self.work_tiles and config.uneven(p)
        s = self.spec = replace(
            s, prefetch_tile=self.dynamic and config.prefetches_tile(p, c, self.work_tiles / self.programs)
        )
        self.fixup_programs = min(2 * target.processors, self.work_tiles * s.consumers)
        # The work tile counter and the non-finite flags: zero before a call, and reset by the fix-up.
        flags = FLAGS_AT + self.work_tiles * s.consumers
        self.semaphores = Semaphores(flags, spare=max(1, min(SPARE, SPARE_BYTES // (4 * flags))))
        # Programs on one SM share its registers.
        limit: Arguments = {"maxnreg": target.registers // (c.per_processor * 32 * 4 * (s.consumers + 1)) // 8 * 8}
        self.order, self.fixup = Kernel(rank_sequences), Kernel(fwd_kernel)
        self.attention = Kernel(fwd_kernel, **(limit if c.per_processor > 1 else {}))
        self.lister = BlockLister(p, s.BM, s.BN) if s.blocks else None
        # Fields that only prefill uses have fixed values, so that fewer kernels are compiled.
        self.fixup_spec = replace(
            s, DV=min(s.DV, FIXUP_COLUMNS), out_columns=s.DV, q_stages=1, k_stages=1, v_stages=1,
            late_wait=False, overlaps=True, consumer_regs=0, producer_regs=0, prefetch_tile=False, fixup=True,
        )  # fmt: skip
        self.sizes: Arguments = {
            "batch": p.batch,
            "heads": p.heads,
            "group": p.group,
            "q_len": p.q_len,
            "kv_len": p.kv_len,
            "total_q": p.total_q,
            "value_dim": p.value_dim,
            "scale": p.scale,
            "softcap": softcap_of(p),
            **rules_of(p),
            "swizzle": config.swizzle(p, c, places),
            "work_tiles": self.work_tiles,
            "S": s,
        }

    def launch(self, r: Recorder, t: Tensors, *more: torch.Tensor) -> None:
        """Launches a call through `r`."""
        lists = NO_LISTS if self.lister is None else self.lister.launch(r, t)
        given = self.arguments(t, self.memory(r), lists)
        if self.spec.packed_q:
            runs = -(-(self.problem.batch + 1) // ORDER_RUN)
            r.launch(self.order, (runs, 1), given | {"BM": self.spec.BM, "RUN": ORDER_RUN})
        r.launch(self.attention, (self.programs, 1), given)
        if self.spec.guard:
            r.launch(self.fixup, (self.fixup_programs, 1), self.fixup_arguments(t, given))

    def arguments(self, t: Tensors, memory: Arguments, lists: Lists) -> Arguments:
        """The arguments of the kernels."""
        s = self.spec
        given: Arguments = {name: getattr(t, source) for name, source in TENSORS.items()} | memory
        given |= {
            "q": descriptor(t.q, 64, s.chunk_d, s.dtype),
            "k": descriptor(t.k, s.BN, s.chunk_d, s.dtype),
            "v": descriptor(t.v, s.BN // s.pieces, s.DV, s.dtype),
            "o": descriptor(t.out, 64, s.out_columns, s.dtype),
        }
        LIST, RANK, list_strides = lists
        given |= {"LIST": LIST, "RANK": RANK}
        given |= stride_arguments("o", "bhl", t.out) | stride_arguments("lse", "bhl", t.lse)
        given |= stride_arguments("slopes", "b", t.alibi_slopes)
        given |= dict(zip(("list_b", "list_h", "list_q", "list_n"), list_strides, strict=True))
        return given | self.sizes

    def fixup_arguments(self, t: Tensors, given: Arguments) -> Arguments:
        s = self.fixup_spec
        return given | {"v": descriptor(t.v, s.BN, s.DV, s.dtype), "S": s}

    def memory(self, r: Workspaces) -> Arguments:
        """The workspaces of a call."""
        made: Arguments = dict.fromkeys(("FLAGS", "COUNTER", "ORDER", "START"))
        if self.spec.packed_q:  # the outputs of `rank_sequences`
            ranks = r.empty(2, -(-(self.problem.batch + 2) // 4) * 4, dtype=torch.int32)
            made |= {"ORDER": ranks[0], "START": ranks[1]}
        if self.spec.guard:
            semaphores = r.counters(self.semaphores)
            made["FLAGS"] = semaphores[FLAGS_AT:]
            made["COUNTER"] = semaphores[:1] if self.dynamic else None
        return made


def launcher_of(problem: Problem) -> Launcher:
    """The launcher of a problem's plan."""
    return Launcher(problem, config.config_of(problem), target_of(problem.device))
