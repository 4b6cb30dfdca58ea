"""From a plan and its tensors to the launches of a backward pass. Nothing here reads a value on the device.

The first call of a plan with given strides goes through Triton, which compiles. Later calls with the same strides and
aligned pointers pass their addresses directly to the compiled kernels.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....core.plan import ByPlan, Plan
from ....core.tensors import BackwardTensors
from ...gpu.flags import softcap_of
from ...gpu.kernel import Arguments, Kernel, Ready, is_aligned, key_of
from ...gpu.tensor_map import TensorMap
from ..descriptors import descriptor
from . import config
from .kernel import backward
from .nonfinite import fix_up
from .prepost import clear_rest, list_blocks, postprocess, preprocess

GLUON = {torch.float32: gl.float32, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
CLEAR_ROWS, CLEAR_PROGRAMS = 32, 16  # of `clear_rest`
LISTING = {"SLOTS": 128, "RUN": 256}  # of `list_blocks`
FIX_UP_BLOCK, FIX_UP_PROGRAMS = 64, 132


class Launches(NamedTuple):
    """What a call like an earlier one launches."""

    kernels: list[Ready]
    clear: list[tuple[Any, str, str]]  # a kernel, its tensor and offsets
    maps: list[TensorMap]


class Bound:
    """All that a plan's calls have in common."""

    def __init__(self, plan: Plan, planes: int = 0) -> None:
        p = self.problem = plan.problem
        s = self.spec = config.spec_of(p)
        self.longest, self.q_blocks = config.query_blocks(p, s.BM)
        self.blocks = self.q_blocks * p.heads * (1 if p.packed_q else p.batch)
        self.planes = p.kv_heads * (1 if p.packed_q else p.batch)
        left, right = config.sides(p)
        offset = p.rules.q_offset
        self.sizes: Arguments = {
            "heads": p.heads,
            "group": p.group,
            "batch": p.batch,
            "q_len": p.q_len,
            "kv_len": p.kv_len,
            "q_blocks": self.q_blocks,
            "planes": self.planes,
            "q_offset": offset if isinstance(offset, int) else 0,
            "left": left,
            "right": right,
            "swizzle": planes or config.planes_at_once(p, s),
            "scale": p.scale,
            "softcap": softcap_of(p),
            "SOFTCAP": s.softcap,
            "value_dim": p.value_dim,
            "head_dim": p.head_dim,
            "S": s,
            "BM": s.BM,
            "D": s.D,
            "PACKED": s.packed,
            "HAS_DLSE": p.dlse,
            "HAS_SINKS": "sinks" in p.grads,
            "CLEARS": not s.deterministic,
            "ORDERED": s.deterministic,
            "GUARDED": s.guarded,
            "BN": config.BN,
        }
        self.pre, self.main, self.post = Kernel(preprocess), Kernel(backward), Kernel(postprocess)
        self.list, self.clear = Kernel(list_blocks, LISTING), Kernel(clear_rest, {"ROWS": CLEAR_ROWS})
        self.fix_up = Kernel(fix_up, {"BLOCK": FIX_UP_BLOCK}, num_stages=1)
        self.ready: dict[Any, Launches] = {}
        self.lock = Lock()  # what is launched lies in memory that all threads share

    def __call__(self, t: BackwardTensors) -> None:
        given = self.tensors(t)
        there = {name: x for name, x in given.items() if x is not None}
        at = {name: x.data_ptr() for name, x in there.items()}
        key = key_of(t.forward.k, [*there.values()])
        ready = self.ready.get(key)
        if ready is not None and is_aligned(list(at.values()), t.dout.device):
            self.again(ready, at, t.dout.device)
        else:
            with torch.cuda.device(t.dout.device):
                self.first(given, key, is_aligned(list(at.values()), t.dout.device))
        if t.dsinks is not None:
            shares = there["SHARES"].view(-1, self.problem.heads, self.q_blocks)
            torch.sum(shares, (0, 2), out=t.dsinks)

    def tensors(self, t: BackwardTensors) -> dict[str, torch.Tensor | None]:
        """Every tensor by its kernels' name; gradients that nobody asked for get memory of the call's own."""
        f, s, device = t.forward, self.spec, t.dout.device
        room = self.blocks * s.BM
        ints = torch.empty(self.blocks + 8, dtype=torch.int32, device=device)
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
            "DQ": torch.empty_like(f.q) if t.dq is None else t.dq,
            "DK": torch.empty_like(f.k) if t.dk is None else t.dk,
            "DV": torch.empty_like(f.v) if t.dv is None else t.dv,
            "ACC": torch.empty(room * s.D // 32, 32, dtype=torch.float32, device=device),
            "STATS": torch.empty(room, 32, dtype=f.q.dtype, device=device),
            "LSE2": torch.empty(self.blocks, s.BM, dtype=torch.float32, device=device) if s.softcap else None,
            "COUNTER": ints[:1],
            "FLAG": ints[4:5],
            "SEMAPHORES": ints[8:],
            "SHARES": shares,
            "TABLE": torch.empty(self.k_blocks(f.k), 2, dtype=torch.int32, device=device) if s.packed else None,
        }

    def k_blocks(self, k: torch.Tensor) -> int:
        """Key blocks of a plane; packed: of a head, room for all sequences."""
        p = self.problem
        return k.shape[2] // config.BN + p.batch if p.packed_q else -(-p.kv_len // config.BN)

    def first(self, given: dict[str, torch.Tensor | None], key: Any, keep: bool) -> None:
        """A call through Triton; if `keep`, later ones like it are launched by address."""
        p, s = self.problem, self.spec
        arguments = self.arguments(given)
        maps: dict[Any, TensorMap] = {}
        rows = (self.longest, p.batch * p.heads)
        k_blocks = arguments["k_blocks"]
        kernels = [self.pre.first(rows, arguments)]
        if s.packed:
            kernels.append(self.list.first((-(-k_blocks // LISTING["SLOTS"]), 1), arguments | {"slots": k_blocks}))
        programs = k_blocks * self.planes
        if s.persistent:
            programs = min(programs, config.PROCESSORS)
        kernels.append(self.main.first((programs, 1), arguments, maps))
        kernels.append(self.post.first(rows, arguments))
        if s.guarded:
            memory = {name: given[name] for name in ("q", "k", "v")}
            kernels.append(self.fix_up.first((FIX_UP_PROGRAMS, 1), arguments | memory))
        clear = []
        for name, cu, heads in (("DQ", "CU_Q", p.heads), ("DK", "CU_K", p.kv_heads), ("DV", "CU_K", p.kv_heads)):
            if s.packed:
                x = given[name]
                assert x is not None
                strides = {"x_h": x.stride(1), "x_l": x.stride(2), "total": x.shape[2], "width": x.shape[3]}
                rest = arguments | strides | {"CU": given[cu], "X": x}
                clear.append((self.clear.first((CLEAR_PROGRAMS, heads), rest), name, cu))
        ready = [kernel for kernel in kernels if kernel is not None]
        if keep and len(ready) == len(kernels):
            self.ready[key] = Launches(ready, clear, list(maps.values()))

    def again(self, ready: Launches, at: dict[str, int], device: torch.device) -> None:
        """A call like an earlier one, with tensors at these addresses."""
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        at |= {"do": at["DOUT"], "dk": at["DK"], "dv": at["DV"], "dq": at["ACC"], "stats": at["STATS"]}
        at["lse"] = at.get("LSE2", 0)
        with self.lock:
            for tensor_map in ready.maps:
                tensor_map.move(at[tensor_map.name])
            for launch in ready.kernels:
                launch([at[name] for name in launch.pointers], stream)
            for launch, name, cu in ready.clear:
                launch([at[{"CU": cu, "X": name}[pointer]] for pointer in launch.pointers], stream)

    def arguments(self, given: dict[str, Any]) -> Arguments:
        """Of all kernels."""
        s = self.spec
        made: Arguments = dict(given)
        made |= {
            "q": descriptor(given["q"], s.BM, s.D, s.dtype),
            "k": descriptor(given["k"], 64, s.D, s.dtype),
            "v": descriptor(given["v"], 64, s.D, s.dtype),
            "do": descriptor(given["DOUT"], s.BM, s.D, s.dtype),
            "dk": descriptor(given["DK"], 64, s.D, s.dtype),
            "dv": descriptor(given["DV"], 64, s.D, s.dtype),
            "dq": flat_descriptor(given["ACC"], 128, 32),
            "stats": flat_descriptor(given["STATS"], s.BM, 32),
            "lse": row_descriptor(given["LSE2"], s.BM) if s.softcap else None,
        }
        strided = {"q": "q", "k": "k", "v": "v", "o": "OUT", "do": "DOUT", "lse": "LSE", "dlse": "DLSE"}
        for prefix, name in (strided | {"dq": "DQ", "dk": "DK", "dv": "DV"}).items():
            strides = (0, 0, 0) if given[name] is None else given[name].stride()
            made |= dict(zip((f"{prefix}_b", f"{prefix}_h", f"{prefix}_l"), strides, strict=False))
        return made | self.sizes | {"k_blocks": self.k_blocks(given["k"])}


def flat_descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles [rows, columns] of a matrix."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], GLUON[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


def row_descriptor(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """Rows of a float32 matrix."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, columns], layout)


@ByPlan
def bound_to(plan: Plan) -> Bound:
    """The plan's launches."""
    return Bound(plan)
