"""From a plan and its tensors to the launches of a backward pass. Nothing here reads a value on the device."""

from __future__ import annotations

from typing import Any

import torch

from ....core.problem import Problem
from ....core.tensors import BackwardTensors
from ...gpu.flags import softcap_of
from ...gpu.kernel import Arguments, Kernel, stride_arguments
from ...gpu.launch_program import Recorder, Workspaces
from ...gpu.launcher import PlanLauncher
from ...gpu.target import Target, target_of
from . import config
from .nonfinite import fix_up
from .prepost import clear_rest, list_blocks, preprocess

CLEAR_ROWS, CLEAR_PROGRAMS = 32, 16  # of `clear_rest`
LISTING = {"SLOTS": 128, "RUN": 256}  # of `list_blocks`
FIX_UP_BLOCK = 64


class Launcher(PlanLauncher):
    """The launches of a plan: those before and after the main kernels, which subclasses launch."""

    def __init__(self, problem: Problem, target: Target, spec: Any, BM: int, D: int, value_columns: int) -> None:
        super().__init__()
        self.processors = target.processors
        p = self.problem = config.unstrided(problem)
        s = self.spec = spec
        self.BM = BM
        self.longest, self.q_blocks = config.query_blocks(p, BM)
        self.blocks = self.q_blocks * p.heads * (1 if p.packed_q else p.batch)
        left, right = config.sides(p)
        offset = p.rules.q_offset
        self.sizes: Arguments = {
            "heads": p.heads,
            "group": p.group,
            "batch": p.batch,
            "q_len": p.q_len,
            "kv_len": p.kv_len,
            "q_blocks": self.q_blocks,
            "q_offset": offset if isinstance(offset, int) else 0,
            "left": left,
            "right": right,
            "scale": p.scale,
            "softcap": softcap_of(p),
            "value_dim": p.value_dim,
            "head_dim": p.head_dim,
            "S": s,
            "BM": BM,
            "D": D,
            "D_V": value_columns,
            "PACKED": s.packed,
            "HAS_DLSE": p.dlse,
            "HAS_SINKS": "sinks" in p.grads,
            "MASKED": p.mask is not None,
            "GUARDED": s.guarded,
            "CONVERTS": None,
        }
        self.pre, self.list = Kernel(preprocess), Kernel(list_blocks, LISTING)
        self.clear = Kernel(clear_rest, {"ROWS": CLEAR_ROWS})
        self.fix_up = Kernel(fix_up, {"BLOCK": min(FIX_UP_BLOCK, 8192 // D)}, num_stages=1)

    def __call__(self, t: BackwardTensors) -> None:
        if t.dmask is not None and config.skips_cells(self.problem):
            t.dmask.zero_()
        if t.dsinks is None:
            self.run(t)
            return
        shares = torch.zeros(self.blocks, dtype=torch.float32, device=t.dout.device)
        self.run(t, shares)
        torch.sum(shares.view(-1, self.problem.heads, self.q_blocks), (0, 2), out=t.dsinks)

    def launch(self, r: Recorder, t: BackwardTensors, *more: torch.Tensor) -> None:
        """Launches a pass through `r`; `more`: the shares of the sinks' gradients, all zero."""
        p, s, given = self.problem, self.spec, self.tensors(t, r)
        given["SHARES"] = more[0] if more else None
        arguments = self.arguments(given)
        r.launch(self.pre, (self.longest, p.batch * p.heads), arguments | {"D": arguments["D_V"]})
        self.launch_main(r, given, arguments)
        if s.guarded:
            r.launch(self.fix_up, (self.processors, 1), arguments)
        for name, cu, heads in (("DQ", "CU_Q", p.heads), ("DK", "CU_K", p.kv_heads), ("DV", "CU_K", p.kv_heads)):
            if s.packed:
                x = given[name]
                assert x is not None
                strides = {"x_h": x.stride(1), "x_l": x.stride(2), "total": x.shape[2], "width": x.shape[3]}
                r.launch(self.clear, (CLEAR_PROGRAMS, heads), arguments | strides | {"CU": given[cu], "X": x})

    def tensors(self, t: BackwardTensors, r: Workspaces) -> dict[str, torch.Tensor | None]:
        """All tensors by their names in kernels; gradients that were not requested are workspaces."""
        f = t.forward
        room = -(-self.blocks // 4) * 4  # parts are aligned to 16 bytes
        ints = r.empty((1 + (self.problem.mask is not None)) * room + 8, dtype=torch.int32)
        return {
            "q": f.q,
            "k": f.k,
            "v": f.v,
            "OUT": f.out,
            "LSE": f.lse,
            "DOUT": t.dout,
            "DLSE": t.dlse,
            "SINKS": f.sinks if t.dsinks is not None else None,
            "KV_LENGTHS": f.kv_lengths,
            "Q_OFFSET": f.q_offset,
            "CU_Q": f.cu_seqlens_q,
            "CU_K": f.cu_seqlens_k,
            "MASK": f.mask,
            "DMASK": t.dmask,
            "DQ": r.empty_like(f.q) if t.dq is None else t.dq,
            "DK": r.empty_like(f.k) if t.dk is None else t.dk,
            "DV": r.empty_like(f.v) if t.dv is None else t.dv,
            "LSE2": None,
            "STATS": r.empty(self.blocks * self.BM, 32, dtype=f.q.dtype),
            "COUNTER": ints[:1],
            "FLAG": ints[4:5],
            "SEMAPHORES": ints[8 : 8 + room],
            "HUGE": ints[8 + room :] if self.problem.mask is not None else None,
            "SHARES": None,
        }

    def outer_blocks(self, rows: int, total: int, block: int) -> int:
        """Blocks of a plane with `rows` rows; packed: of a head with `total` rows, with room for all sequences."""
        p = self.problem
        return total // block + p.batch if p.packed_q else -(-rows // block)

    def launch_main(self, r: Recorder, given: dict[str, Any], arguments: Arguments) -> None:
        """Launches the main kernels."""
        raise NotImplementedError

    def spec_for(self, given: dict[str, Any]) -> Any:
        """The spec of a call with these tensors."""
        return self.spec

    def launch_listing(self, r: Recorder, cu: torch.Tensor, table: torch.Tensor, block: int) -> None:
        """Packed: lists outer blocks in `table`."""
        slots = table.shape[0]
        sizes = {"batch": self.problem.batch, "slots": slots, "BN": block, "CU_K": cu, "TABLE": table}
        r.launch(self.list, (-(-slots // LISTING["SLOTS"]), 1), sizes)

    def arguments(self, given: dict[str, Any]) -> Arguments:
        """The arguments of all kernels: tensors, their strides, and sizes."""
        made: Arguments = dict(given)
        strided = {"q": "q", "k": "k", "v": "v", "o": "OUT", "do": "DOUT", "lse": "LSE", "dlse": "DLSE"}
        for prefix, name in (strided | {"dq": "DQ", "dk": "DK", "dv": "DV"}).items():
            strides = (0, 0, 0) if given[name] is None else given[name].stride()
            made |= dict(zip((f"{prefix}_b", f"{prefix}_h", f"{prefix}_l"), strides, strict=False))
        for prefix, x in (("mask", given["MASK"]), ("dmask", given["DMASK"])):
            strides = stride_arguments(prefix, "bhqk", x)
            made |= strides if x is not None else dict.fromkeys(strides)
        return made | {"SOFTCAP": False} | self.sizes


def launcher_of(problem: Problem) -> Launcher:
    """The launcher of a problem's plan."""
    target = target_of(problem.device)
    if config.is_wide(problem):
        from .wide.launch import WideLauncher

        return WideLauncher(problem, target)
    from .narrow_launch import NarrowLauncher

    return NarrowLauncher(problem, target)
