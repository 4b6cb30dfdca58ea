"""The launches of a backward pass of head dims up to 128."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ....core.problem import Problem
from ....core.tensors import BackwardTensors
from ...gpu.kernel import Arguments, Kernel
from ...gpu.launch_program import Recorder, Workspaces
from ...gpu.target import Target
from ..descriptors import descriptor, flat_descriptor, has_tiles, mask_descriptor, row_descriptor
from . import config
from .kernel import backward
from .launch import Launcher
from .mask_sums import mask_sums
from .prepost import combine_splits, postprocess
from .spec import BackwardSpec

COMBINE_ROWS = 16  # of `combine_splits`


class NarrowLauncher(Launcher):
    """One kernel, with dQ accumulated in global memory."""

    def __init__(self, problem: Problem, target: Target, planes: int = 0) -> None:
        p = config.unstrided(problem)
        s = config.spec_of(p, target)
        super().__init__(problem, target, s, s.BM, s.D, s.D)
        self.splits = config.splits_of(p, target)
        self.planes = config.planes_of(p) * self.splits
        self.sizes |= {
            "planes": self.planes,
            "splits": self.splits if s.split else None,
            "swizzle": planes or config.planes_at_once(p, s, target),
            "SOFTCAP": s.softcap,
            "CONVERTS": s if s.converts else None,
        }
        self.kernel, self.post, self.sums = Kernel(backward), Kernel(postprocess), Kernel(mask_sums)
        self.combine = Kernel(combine_splits, {"ROWS": COMBINE_ROWS})

    def tensors(self, t: BackwardTensors, r: Workspaces) -> dict[str, torch.Tensor | None]:
        s, room = self.spec, self.blocks * self.BM
        given = super().tensors(t, r) | {
            "ACC": r.empty(room * s.D // 32, 32),
            "LSE2": r.empty(self.blocks, s.BM) if s.row_lse else None,
            "TABLE": r.empty(self.k_blocks(t.forward.k), 2, dtype=torch.int32) if s.packed else None,
        }
        if s.split:
            batch, kv_heads, rows, _ = t.forward.k.shape
            for name in ("DK_PARTIALS", "DV_PARTIALS"):
                given[name] = r.empty(batch, kv_heads * self.splits, rows, s.D)
        return given

    def k_blocks(self, k: torch.Tensor) -> int:
        return self.outer_blocks(self.problem.kv_len, k.shape[2], config.BN)

    def launch_main(self, r: Recorder, given: dict[str, Any], arguments: Arguments) -> None:
        p, s = self.problem, self.spec
        if s.packed:
            self.launch_listing(r, given["CU_K"], given["TABLE"], config.BN)
        own = arguments | self.descriptors(given) | self.partials(given)
        programs = arguments["blocks"] * self.planes
        r.launch(self.kernel, (min(programs, self.processors) if s.persistent else programs, 1), own)
        if not s.converts:
            r.launch(self.post, (self.longest, p.batch * p.heads), arguments)
        if s.split:
            batch, kv_heads, rows, _ = given["DK"].shape
            sizes = {"rows": rows, "kv_heads": kv_heads}
            r.launch(self.combine, (-(-rows // COMBINE_ROWS), batch * kv_heads), arguments | sizes)
        if config.sums_mask(p):
            tiles = given["DMASK"].shape[0] * arguments["planes_h"] * self.q_blocks * arguments["tiles_k"]
            r.launch(self.sums, (tiles, 1), own)

    def arguments(self, given: dict[str, Any]) -> Arguments:
        return super().arguments(given) | {"blocks": self.k_blocks(given["k"])} | self.mask_arguments(given)

    def partials(self, given: dict[str, Any]) -> Arguments:
        """Arguments for the partials of dK and dV of split key blocks."""
        if not self.spec.split:
            return {}
        dk, dv = given["DK_PARTIALS"], given["DV_PARTIALS"]
        b, h, row, _ = dk.stride()
        strides = {f"{name}_{dim}": n for name in ("dk", "dv") for dim, n in (("b", b), ("h", h), ("l", row))}
        return {"DK": dk, "DV": dv} | strides

    def mask_arguments(self, given: dict[str, Any]) -> Arguments:
        """Arguments of a mask, and of the pairs that share a plane of its gradient."""
        p, x, offset = self.problem, given["MASK"], self.problem.rules.q_offset
        if p.mask is None:
            return {"mask_batch": None, "mask_heads": None}
        batch, heads = (n if free else 1 for n, free in zip((p.batch, p.heads), p.mask.broadcast, strict=False))
        return {
            "mask_batch": int(x.stride(0) != 0),
            "mask_heads": int(x.stride(1) != 0),
            "tiles_k": -(-p.kv_len // config.BN),
            "planes_h": p.heads // heads,
            "count_h": heads,
            "pairs": batch * heads,
            "shift": offset if isinstance(offset, int) else p.kv_len - p.q_len,
            "S": self.spec_for(given),
        }

    def spec_for(self, given: dict[str, Any]) -> BackwardSpec:
        """The spec of a call with these tensors: whether TMA can copy tiles of its mask."""
        s, x, dx = self.spec, given["MASK"], given["DMASK"]
        if x is None:
            return s
        dense = s.dmask and not s.softcap and dx.dtype == given["q"].dtype and has_tiles(dx)
        near = all(128 * sum(y.stride()[2:]) < 2**31 for y in (x, dx) if y is not None)
        return replace(s, mask_tiles=x.element_size() == 2 and has_tiles(x), dmask_tiles=dense, near=near)

    def descriptors(self, given: dict[str, Any]) -> Arguments:
        s = self.spec_for(given)
        return {
            "q": descriptor(given["q"], s.BM, s.D, s.dtype),
            "k": descriptor(given["k"], 64, s.D, s.dtype),
            "v": descriptor(given["v"], 64, s.D, s.dtype),
            "do": descriptor(given["DOUT"], s.BM, s.D, s.dtype),
            "dk": descriptor(given["DK"], 64, s.D, s.dtype),
            "dv": descriptor(given["DV"], 64, s.D, s.dtype),
            "dq": flat_descriptor(given["ACC"], 128, 32),
            "piece": flat_descriptor(given["ACC"], 16, 32) if s.converts else None,
            "dq16": descriptor(given["DQ"], 16, 32, s.dtype) if s.converts else None,
            "stats": flat_descriptor(given["STATS"], s.BM, 32),
            "lse": row_descriptor(given["LSE2"], s.BM) if s.row_lse else None,
            "mask": mask_descriptor(given["MASK"], s.BM) if s.mask_tiles else None,
            "dmask": mask_descriptor(given["DMASK"], s.BM) if s.dmask_tiles else None,
        }
