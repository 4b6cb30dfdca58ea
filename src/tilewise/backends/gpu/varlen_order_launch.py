"""The launch of the varlen order (`varlen_order.py`)."""

from __future__ import annotations

import torch

from ...core.problem import Problem
from ...core.tensors import Tensors
from .flags import ceil_pow2
from .kernel import Arguments, Kernel
from .launch_program import Recorder
from .varlen_order import sort_sequences


class Orderer:
    """Sorts the sequences of a problem's packed batches."""

    def __init__(self, problem: Problem, BQ: int) -> None:
        p = self.problem = problem
        self.varlen = p.form == "varlen"
        constants = {"VARLEN": self.varlen, "BQ": BQ, "N": ceil_pow2(p.batch + 1)}
        self.kernel = Kernel(sort_sequences, constants, num_warps=4)

    def arguments(self, t: Tensors, order: torch.Tensor) -> Arguments:
        lengths = {"CU_Q": t.cu_seqlens_q, "CU_K": t.cu_seqlens_k if self.varlen else None}
        lengths["KV_LENGTHS"] = None if self.varlen else t.kv_lengths
        return {**lengths, "ORDER": order, "batch": self.problem.batch, "total_q": self.problem.total_q}

    def launch(self, r: Recorder, t: Tensors) -> torch.Tensor:
        """The order of a call's sequences."""
        order = r.empty(2 * self.problem.batch + 2, dtype=torch.int32)
        r.launch(self.kernel, (1, 1), self.arguments(t, order))
        return order
