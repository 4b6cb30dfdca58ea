"""The launches of a backward pass of wide heads."""

from __future__ import annotations

from typing import Any

import torch

from .....core.problem import Problem
from .....core.tensors import BackwardTensors
from ....gpu.kernel import Arguments, Kernel
from ....gpu.launch_program import Recorder, Workspaces
from ....gpu.target import Target
from ...descriptors import descriptor, flat_descriptor, row_descriptor
from ..config import unstrided
from ..launch import Launcher
from ..prepost import preprocess
from . import config
from .kernel import wide_backward
from .spec import WideSpec

# From argument names of the launches to the call's tensor names.
OF_QUERIES = {"x": "q", "y": "DOUT", "u": "k", "w": "v", "dx": "DQ", "TABLE": "Q_TABLE"}
OF_KEYS = {"x": "k", "y": "v", "u": "q", "w": "DOUT", "dx": "DK", "dy": "DV", "TABLE": "K_TABLE"}
OF_VALUES = {"x": "k", "u": "q", "w": "DOUT", "dx": "DV", "TABLE": "K_TABLE"}


def names_of(s: WideSpec) -> dict[str, str]:
    return OF_QUERIES if s.of_queries else OF_VALUES if s.only == "v" else OF_KEYS


class WideLauncher(Launcher):
    """dQ by one launch, dK and dV by another, or by one each."""

    def __init__(self, problem: Problem, target: Target, planes: int = 0) -> None:
        self.planes = planes
        self.specs = config.specs_of(unstrided(problem))
        s = self.specs[0]
        super().__init__(problem, target, s, s.stats_block, 256 if s.chunks == 1 else s.D * s.chunks, s.DV * s.chunks)
        self.sizes["SOFTCAP"] = s.softcap
        self.pre = Kernel(preprocess, num_warps=4 * s.chunks)
        self.kernel = Kernel(wide_backward)

    def tensors(self, t: BackwardTensors, r: Workspaces) -> dict[str, torch.Tensor | None]:
        found = super().tensors(t, r)
        if self.spec.softcap:
            found["LSE2"] = r.empty(self.blocks, self.BM)
        for s in self.specs:
            blocks = self.grid_sizes(t.forward.q, t.forward.k, s)[0]
            table = "Q_TABLE" if s.of_queries else "K_TABLE"
            if s.only != "v":  # else it is there
                found[table] = r.empty(blocks, 2, dtype=torch.int32) if s.packed else None
        return found

    def grid_sizes(self, q: torch.Tensor, k: torch.Tensor, s: WideSpec) -> tuple[int, int]:
        """Outer blocks of a plane, and planes."""
        p = self.problem
        rows, x, heads = (p.q_len, q, p.heads) if s.of_queries else (p.kv_len, k, p.kv_heads)
        return self.outer_blocks(rows, x.shape[2], s.BO), heads * (1 if p.packed_q else p.batch)

    def launch_main(self, r: Recorder, given: dict[str, Any], arguments: Arguments) -> None:
        for s in self.specs:
            if s.packed and s.only != "v":
                self.launch_listing(r, given["CU_Q" if s.of_queries else "CU_K"], given[names_of(s)["TABLE"]], s.BO)
            own = self.own(given, s)
            r.launch(self.kernel, (own["blocks"] * own["planes"], 1), arguments | own)

    def own(self, given: dict[str, Any], s: WideSpec) -> Arguments:
        """The arguments of one launch."""
        names = names_of(s)
        blocks, planes = self.grid_sizes(given["q"], given["k"], s)
        alone = s.of_queries or s.only != ""
        dx, dy = given[names["dx"]], None if alone else given[names["dy"]]

        def tiles(name: str, rows: int, columns: int) -> Any:
            return descriptor(given[names[name]], rows, columns, s.dtype) if columns and name in names else None

        return {
            "x": tiles("x", 64, s.D),
            "x1": tiles("x", 64, s.tail),
            "y": tiles("y", 64, s.DV),
            "u": tiles("u", s.BI, s.D),
            "u1": tiles("u", s.BI, s.tail),
            "w": tiles("w", s.BI, s.DV),
            "dx": tiles("dx", 64, s.D),
            "dx1": tiles("dx", 64, s.tail),
            "dy": None if alone else tiles("dy", 64, s.DV),
            "stats": None if s.of_queries else flat_descriptor(given["STATS"], s.BI, 32),
            "lse": row_descriptor(given["LSE2"], s.BI) if s.softcap and not s.of_queries else None,
            "DX": dx,
            "DY": dy,
            "dx_h": dx.stride(1),
            "dx_l": dx.stride(2),
            "dy_h": 0 if dy is None else dy.stride(1),
            "dy_l": 0 if dy is None else dy.stride(2),
            "TABLE": given[names["TABLE"]],
            "blocks": blocks,
            "planes": planes,
            "swizzle": self.planes or config.planes_at_once(self.problem, s),
            "S": s,
        }
