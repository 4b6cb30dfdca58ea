"""From a plan and its tensors to the launches of a backward pass. Nothing here reads a value on the device.

The first call of a plan with given strides goes through Triton, which compiles. Later calls with the same strides and
aligned pointers pass their addresses directly to the compiled kernels.
"""

from __future__ import annotations

from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....core.plan import ByPlan, Plan
from ....core.tensors import BackwardTensors
from ...gpu.flags import softcap_of
from ...gpu.kernel import Arguments, Kernel, Ready, is_aligned, key_of, stride_arguments
from ...gpu.tensor_map import TensorMap
from ..descriptors import descriptor, has_tiles, mask_descriptor
from . import config
from .kernel import backward
from .mask_sums import mask_sums
from .nonfinite import fix_up
from .prepost import clear_rest, combine_splits, list_blocks, postprocess, preprocess
from .spec import BackwardSpec

GLUON = {torch.float32: gl.float32, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
CLEAR_ROWS, CLEAR_PROGRAMS = 32, 16  # of `clear_rest`
COMBINE_ROWS = 16  # of `combine_splits`
LISTING = {"SLOTS": 128, "RUN": 256}  # of `list_blocks`
FIX_UP_BLOCK, FIX_UP_PROGRAMS = 64, 132


class Step(NamedTuple):
    """A compiled launch that later calls repeat, and the call's names of its pointers and of its tensor maps."""

    launch: Ready
    pointers: list[str]
    maps: list[tuple[TensorMap, str]]


class Launcher:
    """The launches of a plan: those before and after the main kernels, which subclasses launch in `main`."""

    def __init__(self, plan: Plan, spec: Any, BM: int, D: int, value_columns: int) -> None:
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
            "AGAIN": False,
        }
        self.pre, self.list = Kernel(preprocess), Kernel(list_blocks, LISTING)
        self.clear = Kernel(clear_rest, {"ROWS": CLEAR_ROWS})
        self.fix_up = Kernel(fix_up, {"BLOCK": min(FIX_UP_BLOCK, 8192 // D)}, num_stages=1)
        self.ready: dict[Any, list[Step]] = {}
        self.lock = Lock()  # all threads share the memory of launch parameters

    def __call__(self, t: BackwardTensors) -> None:
        if t.dmask is not None and config.skips_cells(self.problem):
            t.dmask.zero_()
        given = self.tensors(t)
        there = {name: x for name, x in given.items() if x is not None}
        at = {name: x.data_ptr() for name, x in there.items()}
        key = key_of(t.forward.k, [*there.values()])
        ready = self.ready.get(key)
        if ready is not None and is_aligned(list(at.values()), t.dout.device):
            self.again(ready, at, t.dout.device)
        else:
            with torch.cuda.device(t.dout.device):
                steps = self.first(given)
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
            "COUNTER_2": None,
            "SEMAPHORES_2": None,
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
        ready = kernel.first(grid, arguments, maps)
        if ready is None:
            return None
        names = names or {}
        described = [(x, names.get(x.name, x.name)) for x in maps.values()]
        return Step(ready, [names.get(x, x) for x in ready.pointers], described)

    def first(self, given: dict[str, torch.Tensor | None]) -> list[Step | None]:
        """Launches through Triton."""
        p, s = self.problem, self.spec
        arguments = self.arguments(given)
        rows = (self.longest, p.batch * p.heads)
        steps = [self.step(self.pre, rows, arguments | {"D": arguments["D_V"]})]
        steps += self.main(given, arguments)
        if s.guarded:
            steps += self.fix_up_steps(given, arguments)
        for name, cu, heads in (("DQ", "CU_Q", p.heads), ("DK", "CU_K", p.kv_heads), ("DV", "CU_K", p.kv_heads)):
            if s.packed:
                x = given[name]
                assert x is not None
                strides = {"x_h": x.stride(1), "x_l": x.stride(2), "total": x.shape[2], "width": x.shape[3]}
                rest = arguments | strides | {"CU": given[cu], "X": x}
                steps.append(self.step(self.clear, (CLEAR_PROGRAMS, heads), rest, {"CU": cu, "X": name}))
        return steps

    def fix_up_steps(self, given: dict[str, Any], arguments: Arguments) -> list[Step | None]:
        """The non-finite fix-up."""
        return [self.step(self.fix_up, (FIX_UP_PROGRAMS, 1), arguments)]

    def list_step(self, given: dict[str, Any], cu: str, table: str, block: int) -> Step | None:
        """Packed: lists outer blocks in `table`."""
        slots = given[table].shape[0]
        sizes = {"batch": self.problem.batch, "slots": slots, "BN": block, "CU_K": given[cu], "TABLE": given[table]}
        return self.step(self.list, (-(-slots // LISTING["SLOTS"]), 1), sizes, {"CU_K": cu, "TABLE": table})

    def again(self, ready: list[Step], at: dict[str, int], device: torch.device) -> None:
        """Repeats an earlier call's launches, with tensors at these addresses."""
        stream = torch._C._cuda_getCurrentRawStream(device.index)
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


class Bound(Launcher):
    """One kernel, with dQ accumulated in global memory."""

    def __init__(self, plan: Plan, planes: int = 0) -> None:
        p = config.unstrided(plan.problem)
        s = config.spec_of(p)
        super().__init__(plan, s, s.BM, s.D, s.D)
        self.cleans = s.guarded and config.cleans()
        self.splits = config.splits_of(p)
        self.planes = config.planes_of(p) * self.splits
        self.sizes |= {
            "planes": self.planes,
            "splits": self.splits if s.split else None,
            "swizzle": planes or config.planes_at_once(p, s),
            "SOFTCAP": s.softcap,
            "CONVERTS": s if s.converts else None,
        }
        self.kernel, self.post, self.sums = Kernel(backward), Kernel(postprocess), Kernel(mask_sums)
        self.combine = Kernel(combine_splits, {"ROWS": COMBINE_ROWS})

    def tensors(self, t: BackwardTensors) -> dict[str, torch.Tensor | None]:
        s, room, device = self.spec, self.blocks * self.BM, t.dout.device
        given = super().tensors(t) | {
            "ACC": torch.empty(room * s.D // 32, 32, dtype=torch.float32, device=device),
            "LSE2": torch.empty(self.blocks, s.BM, dtype=torch.float32, device=device) if s.row_lse else None,
            "TABLE": torch.empty(self.k_blocks(t.forward.k), 2, dtype=torch.int32, device=device) if s.packed else None,
        }
        if self.cleans:
            ints = torch.empty(4 + self.blocks, dtype=torch.int32, device=device)
            given |= {"COUNTER_2": ints[:1], "SEMAPHORES_2": ints[4:]}
        if s.split:
            batch, kv_heads, rows, _ = t.forward.k.shape
            for name in ("DK_PARTIALS", "DV_PARTIALS"):
                given[name] = torch.empty(batch, kv_heads * self.splits, rows, s.D, dtype=torch.float32, device=device)
        return given

    def k_blocks(self, k: torch.Tensor) -> int:
        return self.outer_blocks(self.problem.kv_len, k.shape[2], config.BN)

    def main(self, given: dict[str, Any], arguments: Arguments) -> list[Step | None]:
        p, s = self.problem, self.spec
        steps = [self.list_step(given, "CU_K", "TABLE", config.BN)] if s.packed else []
        own = arguments | self.descriptors(given) | self.partials(given)
        steps += self.kernel_steps(given, arguments, own, self.names())
        if config.sums_mask(p):
            tiles = given["DMASK"].shape[0] * arguments["planes_h"] * self.q_blocks * arguments["tiles_k"]
            steps.append(self.step(self.sums, (tiles, 1), own, self.names()))
        return steps

    def fix_up_steps(self, given: dict[str, Any], arguments: Arguments) -> list[Step | None]:
        if not self.cleans:
            return super().fix_up_steps(given, arguments)
        again = {name: given[f"{name}_2"] for name in ("COUNTER", "SEMAPHORES")}
        s = replace(self.spec_for(given), clean=True, persistent=True, guarded=False)
        arguments = arguments | again | {"AGAIN": True, "GUARDED": False}
        own = arguments | self.descriptors(given) | self.partials(given) | {"S": s}
        return self.kernel_steps(given, arguments, own, self.names() | {name: f"{name}_2" for name in again})

    def kernel_steps(
        self, given: dict[str, Any], arguments: Arguments, own: Arguments, names: dict[str, str]
    ) -> list[Step | None]:
        """Launches the kernel with its `own` arguments, then `postprocess` and `combine_splits` where needed."""
        p, s = self.problem, own["S"]
        programs = arguments["blocks"] * self.planes
        if s.persistent:
            programs = min(programs, config.PROCESSORS)
        steps = [self.step(self.kernel, (programs, 1), own, names)]
        if not s.converts:
            steps.append(self.step(self.post, (self.longest, p.batch * p.heads), arguments, names))
        if s.split:
            batch, kv_heads, rows, _ = given["DK"].shape
            sizes = arguments | {"rows": rows, "kv_heads": kv_heads}
            steps.append(self.step(self.combine, (-(-rows // COMBINE_ROWS), batch * kv_heads), sizes))
        return steps

    def names(self) -> dict[str, str]:
        """From the kernel's argument names to the call's tensor names."""
        found = {"do": "DOUT", "dk": "DK", "dv": "DV", "dq": "ACC", "stats": "STATS", "lse": "LSE2"}
        found |= {"piece": "ACC", "dq16": "DQ", "mask": "MASK", "dmask": "DMASK"}
        if self.spec.split:
            found |= {"DK": "DK_PARTIALS", "DV": "DV_PARTIALS"}
        return found

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


def flat_descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of tiles [rows, columns] of a matrix."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], GLUON[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


def row_descriptor(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """A descriptor of tiles [1, columns] of a float32 matrix."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, columns], layout)


@ByPlan
def bound_to(plan: Plan) -> Launcher:
    """The launcher of a plan."""
    if config.is_wide(plan.problem):
        from .wide.launch import WideBound

        return WideBound(plan)
    return Bound(plan)
