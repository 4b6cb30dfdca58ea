"""From a plan and its tensors to the launches of a backward pass. Nothing here reads a value on the device.

The first call of a plan with given strides goes through Triton, which compiles. Later calls with the same strides and
aligned pointers pass their addresses directly to the compiled kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....core.forks import new_lock
from ....core.plan import ByPlan, Plan
from ....core.private import torch as private
from ....core.tensors import BackwardTensors
from ...gpu.flags import softcap_of
from ...gpu.kernel import Arguments, CompiledLaunch, Kernel, is_aligned, key_of, stride_arguments
from ...gpu.target import Target, target_of
from ...gpu.tensor_map import TensorMap
from . import config
from .nonfinite import fix_up
from .prepost import clear_rest, list_blocks, preprocess

CLEAR_ROWS, CLEAR_PROGRAMS = 32, 16  # of `clear_rest`
LISTING = {"SLOTS": 128, "RUN": 256}  # of `list_blocks`
FIX_UP_BLOCK = 64


class Step(NamedTuple):
    """A compiled launch that later calls repeat, and the call's names of its pointers and of its tensor maps."""

    launch: CompiledLaunch
    pointers: list[str]
    maps: list[tuple[TensorMap, str]]


class Launcher:
    """The launches of a plan: those before and after the main kernels, which subclasses launch in `main`."""

    def __init__(self, plan: Plan, target: Target, spec: Any, BM: int, D: int, value_columns: int) -> None:
        self.processors = target.processors
        p = self.problem = config.unstrided(plan.problem)
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
        self.ready: dict[Any, list[Step]] = {}
        self.lock = new_lock(self, "lock")  # all threads share the memory of launch parameters

    def __call__(self, t: BackwardTensors) -> None:
        if t.dmask is not None and config.skips_cells(self.problem):
            t.dmask.zero_()
        given = self.tensors(t)
        there = {name: x for name, x in given.items() if x is not None}
        at = {name: x.data_ptr() for name, x in there.items()}
        key = key_of(t.forward.k, [*there.values()])
        ready = self.ready.get(key)
        if ready is not None and is_aligned(list(at.values()), t.dout.device):
            self.relaunch(ready, at, t.dout.device)
        else:
            with torch.cuda.device(t.dout.device):
                steps = self.compile_and_launch(given)
            if is_aligned(list(at.values()), t.dout.device) and None not in steps:
                self.ready[key] = [step for step in steps if step is not None]
        if t.dsinks is not None:
            shares = there["SHARES"].view(-1, self.problem.heads, self.q_blocks)
            torch.sum(shares, (0, 2), out=t.dsinks)

    def tensors(self, t: BackwardTensors) -> dict[str, torch.Tensor | None]:
        """All tensors by their names in kernels; gradients that were not requested are workspaces."""
        f, device = t.forward, t.dout.device
        room = -(-self.blocks // 4) * 4  # parts are aligned to 16 bytes
        ints = torch.empty((1 + (self.problem.mask is not None)) * room + 8, dtype=torch.int32, device=device)
        shares = None
        if t.dsinks is not None:
            shares = torch.zeros(self.blocks, dtype=torch.float32, device=device)
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
            "DQ": torch.empty_like(f.q) if t.dq is None else t.dq,
            "DK": torch.empty_like(f.k) if t.dk is None else t.dk,
            "DV": torch.empty_like(f.v) if t.dv is None else t.dv,
            "LSE2": None,
            "STATS": torch.empty(self.blocks * self.BM, 32, dtype=f.q.dtype, device=device),
            "COUNTER": ints[:1],
            "FLAG": ints[4:5],
            "SEMAPHORES": ints[8 : 8 + room],
            "HUGE": ints[8 + room :] if self.problem.mask is not None else None,
            "SHARES": shares,
        }

    def outer_blocks(self, rows: int, total: int, block: int) -> int:
        """Blocks of a plane with `rows` rows; packed: of a head with `total` rows, with room for all sequences."""
        p = self.problem
        return total // block + p.batch if p.packed_q else -(-rows // block)

    def main(self, given: dict[str, Any], arguments: Arguments) -> list[Step | None]:
        raise NotImplementedError

    def spec_for(self, given: dict[str, Any]) -> Any:
        """The spec of a call with these tensors."""
        return self.spec

    def step(
        self, kernel: Kernel, grid: tuple[int, int], arguments: Arguments, names: dict[str, str] | None = None
    ) -> Step | None:
        """Launches through Triton; returns what later calls repeat. `names` maps argument names to the call's."""
        maps: dict[Any, TensorMap] = {}
        ready = kernel.compile_and_launch(grid, arguments, maps)
        if ready is None:
            return None
        names = names or {}
        described = [(x, names.get(x.name, x.name)) for x in maps.values()]
        return Step(ready, [names.get(x, x) for x in ready.pointers], described)

    def compile_and_launch(self, given: dict[str, torch.Tensor | None]) -> list[Step | None]:
        """Launches through Triton."""
        p, s = self.problem, self.spec
        arguments = self.arguments(given)
        rows = (self.longest, p.batch * p.heads)
        steps = [self.step(self.pre, rows, arguments | {"D": arguments["D_V"]})]
        steps += self.main(given, arguments)
        if s.guarded:
            steps.append(self.step(self.fix_up, (self.processors, 1), arguments))
        for name, cu, heads in (("DQ", "CU_Q", p.heads), ("DK", "CU_K", p.kv_heads), ("DV", "CU_K", p.kv_heads)):
            if s.packed:
                x = given[name]
                assert x is not None
                strides = {"x_h": x.stride(1), "x_l": x.stride(2), "total": x.shape[2], "width": x.shape[3]}
                rest = arguments | strides | {"CU": given[cu], "X": x}
                steps.append(self.step(self.clear, (CLEAR_PROGRAMS, heads), rest, {"CU": cu, "X": name}))
        return steps

    def list_step(self, given: dict[str, Any], cu: str, table: str, block: int) -> Step | None:
        """Packed: lists outer blocks in `table`."""
        slots = given[table].shape[0]
        sizes = {"batch": self.problem.batch, "slots": slots, "BN": block, "CU_K": given[cu], "TABLE": given[table]}
        return self.step(self.list, (-(-slots // LISTING["SLOTS"]), 1), sizes, {"CU_K": cu, "TABLE": table})

    def relaunch(self, ready: list[Step], at: dict[str, int], device: torch.device) -> None:
        """Repeats an earlier call's launches, with tensors at these addresses."""
        stream = private.current_stream(device.index)
        with self.lock:
            for launch, pointers, maps in ready:
                for tensor_map, name in maps:
                    tensor_map.move(at[name])
                launch([at[name] for name in pointers], stream)

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


@ByPlan
def launcher_of(plan: Plan) -> Launcher:
    """The launcher of a plan."""
    target = target_of(plan.problem.device)
    if config.is_wide(plan.problem):
        from .wide.launch import WideLauncher

        return WideLauncher(plan, target)
    from .narrow_launch import NarrowLauncher

    return NarrowLauncher(plan, target)
