"""Launches of the varlen order (`varlen_order.py`): through Triton once, then by address."""

from __future__ import annotations

import torch

from ...core.problem import Problem
from ...core.tensors import Tensors
from .flags import ceil_pow2
from .kernel import Arguments, CompiledLaunch, Kernel
from .varlen_order import sort_sequences


class Orderer:
    """Sorts the sequences of a problem's packed batches."""

    def __init__(self, problem: Problem, BQ: int) -> None:
        p = self.problem = problem
        self.varlen = p.form == "varlen"
        constants = {"VARLEN": self.varlen, "BQ": BQ, "N": ceil_pow2(p.batch + 1)}
        self.kernel = Kernel(sort_sequences, constants, num_warps=4)

    def names(self) -> tuple[str, str]:
        """The tensors that it reads, by the names of its arguments."""
        return "CU_Q", "CU_K" if self.varlen else "KV_LENGTHS"

    def arguments(self, t: Tensors, ranks: torch.Tensor) -> Arguments:
        lengths = {"CU_Q": t.cu_seqlens_q, "CU_K": t.cu_seqlens_k if self.varlen else None}
        lengths["KV_LENGTHS"] = None if self.varlen else t.kv_lengths
        return {**lengths, "ORDER": ranks, "batch": self.problem.batch, "total_q": self.problem.total_q}

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(2 * self.problem.batch + 2, dtype=torch.int32, device=device)

    def compile_and_launch(self, t: Tensors) -> tuple[torch.Tensor, CompiledLaunch | None]:
        """The order of a call's sequences, and the launch by address for later calls."""
        ranks = self.empty(t.q.device)
        return ranks, self.kernel.compile_and_launch((1, 1), self.arguments(t, ranks))
