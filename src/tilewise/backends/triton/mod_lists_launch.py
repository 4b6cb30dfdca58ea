"""Launches that list the key tiles which a mask_mod leaves (`mod_lists.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...core.expression.mods import is_wide
from ...core.problem import Problem
from ...core.tensors import Tensors
from ..gpu.block_sparsity_launch import Lists
from ..gpu.flags import rules_of
from ..gpu.kernel import Arguments, Kernel, captured_arguments
from ..gpu.launch_program import Recorder
from .mod_lists import TENSORS, list_tiles_of_mods

WARPS = 4


class ModLister:
    """Makes the lists of a problem's mask_mod, for the tiles of a kernel that is compiled for `spec`."""

    def __init__(self, problem: Problem, spec: Any) -> None:
        self.problem, self.spec = problem, spec
        p = problem
        assert p.mods is not None
        assert p.mods.mask is not None
        alike = not (p.has_lengths or p.packed_q or p.rules.q_offset == "rows" or p.rules.affine == "rows")
        self.batch = 1 if alike and "b" not in p.mods.mask.inputs else p.batch
        self.heads = p.heads if "h" in p.mods.mask.inputs else 1
        self.tiles, self.n = -(-p.q_len // spec.BM), -(-p.kv_len // spec.BK)

    def launch(self, r: Recorder, t: Tensors) -> Lists:
        rows = self.batch * self.heads * self.tiles
        LIST = r.empty(rows * self.n, dtype=torch.int32)
        RANK = r.empty(rows * (self.n + 1), dtype=torch.int32)
        r.launch(self.kernel(t), (rows, 1), self.arguments(t) | {"LIST": LIST, "RANK": RANK})
        by_head = self.tiles if self.heads > 1 else 0
        return LIST, RANK, (self.heads * self.tiles if self.batch > 1 else 0, by_head, 1, self.n)

    def kernel(self, t: Tensors) -> Kernel:
        spec = replace(self.spec, mods=replace(self.spec.mods, wide=is_wide(t.captured)))
        function = list_tiles_of_mods.with_captured(tuple(x.ndim for x in t.captured))
        return Kernel(function, {"S": spec}, num_warps=WARPS)

    def arguments(self, t: Tensors) -> Arguments:
        """The arguments of the kernel, except its outputs."""
        p = self.problem
        given: Arguments = {name: getattr(t, source) for name, source in TENSORS.items()}
        given |= {"q_len": p.q_len, "kv_len": p.kv_len, "heads": self.heads, "tiles": self.tiles, "n": self.n}
        return given | rules_of(p) | captured_arguments(t.captured)
