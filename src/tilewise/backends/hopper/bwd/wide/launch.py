"""The launches of a backward pass of wide heads."""

from __future__ import annotations

from typing import Any

import torch

from .....core.plan import Plan
from .....core.tensors import BackwardTensors
from ....gpu.kernel import Arguments, Kernel
from ...descriptors import descriptor
from ..config import unstrided
from ..launch import Launcher, Step, flat_descriptor
from . import config
from .kernel import wide_backward
from .spec import WideSpec

OF_QUERIES = {"x": "q", "y": "DOUT", "u": "k", "w": "v", "dx": "DQ", "TABLE": "Q_TABLE", "stats": "STATS"}
OF_KEYS = {"x": "k", "y": "v", "u": "q", "w": "DOUT", "dx": "DK", "dy": "DV", "TABLE": "K_TABLE", "stats": "STATS"}


class WideBound(Launcher):
    """dQ by one launch, dK and dV by another."""

    def __init__(self, plan: Plan) -> None:
        self.specs = config.specs_of(unstrided(plan.problem))
        s = self.specs[0]
        super().__init__(plan, s, s.stats_block, 256, s.DV)
        self.kernel = Kernel(wide_backward)

    def tensors(self, t: BackwardTensors) -> dict[str, torch.Tensor | None]:
        found = super().tensors(t)
        for s in self.specs:
            blocks = self.programs(t.forward.q, t.forward.k, s)[0]
            table = torch.empty(blocks, 2, dtype=torch.int32, device=t.dout.device) if s.packed else None
            found["Q_TABLE" if s.of_queries else "K_TABLE"] = table
        return found

    def programs(self, q: torch.Tensor, k: torch.Tensor, s: WideSpec) -> tuple[int, int]:
        """Outer blocks of a plane, and planes."""
        p = self.problem
        rows, x, heads = (p.q_len, q, p.heads) if s.of_queries else (p.kv_len, k, p.kv_heads)
        return self.outer_blocks(rows, x.shape[2], s.BO), heads * (1 if p.packed_q else p.batch)

    def main(self, given: dict[str, Any], arguments: Arguments) -> list[Step | None]:
        steps = []
        for s in self.specs:
            names = OF_QUERIES if s.of_queries else OF_KEYS
            if s.packed:
                cu = "CU_Q" if s.of_queries else "CU_K"
                steps.append(self.list_step(given, cu, names["TABLE"], s.BO))
            all_names = names | {x + "1": names[x] for x in ("x", "u", "dx")}
            all_names |= {"DX": names["dx"], "DY": names.get("dy", "")}
            own = self.own(given, s)
            steps.append(self.step(self.kernel, (own["blocks"] * own["planes"], 1), arguments | own, all_names))
        return steps

    def own(self, given: dict[str, Any], s: WideSpec) -> Arguments:
        """The arguments of one launch."""
        names = OF_QUERIES if s.of_queries else OF_KEYS
        blocks, planes = self.programs(given["q"], given["k"], s)
        dx, dy = given[names["dx"]], None if s.of_queries else given[names["dy"]]

        def tiles(name: str, rows: int, columns: int) -> Any:
            return descriptor(given[names[name]], rows, columns, s.dtype) if columns else None

        return {
            "x": tiles("x", 64, s.D),
            "x1": tiles("x", 64, s.tail),
            "y": tiles("y", 64, s.DV),
            "u": tiles("u", s.BI, s.D),
            "u1": tiles("u", s.BI, s.tail),
            "w": tiles("w", s.BI, s.DV),
            "dx": tiles("dx", 64, s.D),
            "dx1": tiles("dx", 64, s.tail),
            "dy": None if s.of_queries else tiles("dy", 64, s.DV),
            "stats": None if s.of_queries else flat_descriptor(given["STATS"], s.BI, 32),
            "DX": dx,
            "DY": dy,
            "dx_h": dx.stride(1),
            "dx_l": dx.stride(2),
            "dy_h": 0 if dy is None else dy.stride(1),
            "dy_l": 0 if dy is None else dy.stride(2),
            "TABLE": given[names["TABLE"]],
            "blocks": blocks,
            "planes": planes,
            "swizzle": config.planes_at_once(self.problem, s),
            "S": s,
        }
