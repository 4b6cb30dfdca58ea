"""From tensors to the three launches of a backward pass on Hopper."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...gpu.kernel import OPTIONS as OPTIONS
from ..descriptors import descriptor
from .kernel import backward
from .prepost import postprocess, preprocess
from .spec import BackwardSpec

BN = 128  # keys of a program


GLUON = {torch.float32: gl.float32, torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def flat_descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles [rows, columns] of a matrix."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], GLUON[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


def arguments(
    q: Any, k: Any, v: Any, dout: Any, dk: Any, dv: Any, spaces: Any, q_offset: int, scale: float, swizzle: int,
    s: BackwardSpec,
) -> dict[str, Any]:  # fmt: skip
    """The kernel's arguments. q, dout [B, H, Lq, D], k, v, dk, dv [B, Hkv, Lk, D]; `spaces` of `workspaces`."""
    acc, stats, semaphores, counter = spaces
    _, H, Lq, D = q.shape
    Hkv, Lk = k.shape[1:3]
    return {
        "q": descriptor(q, s.BM, D, s.dtype),
        "k": descriptor(k, 64, D, s.dtype),
        "v": descriptor(v, 64, D, s.dtype),
        "do": descriptor(dout, s.BM, D, s.dtype),
        "dk": descriptor(dk, 64, D, s.dtype),
        "dv": descriptor(dv, 64, D, s.dtype),
        "dq": flat_descriptor(acc, 128, 32),
        "stats": flat_descriptor(stats, s.BM, 32),
        "SEMAPHORES": semaphores,
        "COUNTER": counter,
        "heads": H,
        "group": H // Hkv,
        "q_len": Lq,
        "kv_len": Lk,
        "q_blocks": -(-Lq // s.BM),
        "k_blocks": -(-Lk // BN),
        "q_offset": q_offset,
        "swizzle": swizzle,
        "scale": scale,
        "S": s,
    }


HOP = 3.0  # microseconds from one program's reduction of a block to the next one's
PROCESSORS = 132
STEP_FLOPS = 4.9e6  # of a processor in a microsecond, at 650 TFLOPS


def planes_at_once(q: Any, k: Any, s: BackwardSpec) -> int:
    """How many planes are interleaved: programs start one after the other, those of one plane at least HOP apart.

    Long causal calls take four times as many: their programs differ in length (h200/LOG.md, backward #4).
    """
    B, H, Lq, D = q.shape
    Hkv, Lk = k.shape[1:3]
    steps = -(-Lq // s.BM) * (H // Hkv) * (0.5 if s.causal else 1)
    work = steps * s.BM * BN * D * 10 / STEP_FLOPS
    more = 1 if Lk <= 1024 else 4 if s.causal else 2
    return max(1, min(B * Hkv, round(HOP * PROCESSORS / work + 0.5) * more))


def workspaces(q: Any, s: BackwardSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    B, H, Lq, D = q.shape
    blocks = B * H * -(-Lq // s.BM)
    floats, ints = {"dtype": torch.float32, "device": q.device}, {"dtype": torch.int32, "device": q.device}
    return (
        torch.empty(blocks * s.BM * D // 32, 32, **floats),
        torch.empty(blocks * s.BM, 32, dtype=q.dtype, device=q.device),
        torch.empty(blocks, **ints), torch.empty(1, **ints),
    )  # fmt: skip


def before(out: Any, dout: Any, lse: Any, scale: float, spaces: Any, s: BackwardSpec) -> None:
    B, H, Lq, D = out.shape
    acc, stats, semaphores, counter = spaces
    q_blocks = -(-Lq // s.BM)
    preprocess[(q_blocks, B * H)](
        out, dout, lse, None, stats, acc, semaphores, counter, *out.stride()[:3], *dout.stride()[:3], *lse.stride(),
        H, Lq, q_blocks, D, scale, BM=s.BM, DV=D, D=D, HAS_DLSE=False,
        CLEARS=not s.deterministic, num_warps=4,
    )  # fmt: skip


def after(spaces: Any, dq: Any, scale: float, s: BackwardSpec) -> None:
    B, H, Lq, D = dq.shape
    q_blocks = -(-Lq // s.BM)
    postprocess[(q_blocks, B * H)](
        spaces[0], spaces[2], dq, *dq.stride()[:3], H, Lq, q_blocks, D, scale, BM=s.BM, D=D,
        ORDERED=s.deterministic, num_warps=4,
    )  # fmt: skip


def run(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, scale: float, q_offset: int, s: BackwardSpec,
    swizzle: int = 0,
) -> Any:  # fmt: skip
    spaces = workspaces(q, s)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    before(out, dout, lse, scale, spaces, s)
    given = arguments(q, k, v, dout, dk, dv, spaces, q_offset, scale, swizzle or planes_at_once(q, k, s), s)
    backward[(given["k_blocks"] * q.shape[0] * k.shape[1],)](**given, **OPTIONS)
    after(spaces, dq, scale, s)
    return dq, dk, dv
