"""Launches of prefill in float8: V transposed, then the kernel, both through Triton. Full and causal calls of float8 q
[B, H, Lq, D], k and v [B, Hkv, Lk, D], D up to 128, with scales of each row of q and of each head of k and v.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....core.options import Options
from ....core.plan import Plan
from ....validation import calls
from ...gpu.kernel import OPTIONS, stride_arguments
from ...gpu.target import Target
from ..descriptors import strides_of
from ..fwd.config import Config
from ..fwd.launch import FLAGS_AT, Launcher
from ..fwd.spec import Spec
from .kernel import Arguments, fp8_kernel, transpose

KEYS = 128  # of a program of `transpose`


@dataclass(frozen=True)
class Fp8Spec(Spec):
    promote: bool = True  # P V of each tile is added up in float32 outside of the tensor cores


def config_of(BN: int = 128, consumers: int = 2, stages: int = 3) -> Config:
    """The shape of a launch; to be chosen by measurements."""
    regs = (160, 32) if consumers > 2 else (240, 24)
    return Config(BN, consumers, stages, stages, consumer_regs=regs[0], producer_regs=regs[1])


class Fp8:
    """A kernel for calls of these sizes."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float, c: Config, promote: bool,
                 target: Target) -> None:  # fmt: skip
        # The plan of the same call in 16 bits, of tensors without memory.
        rows, keys = (torch.empty(x.shape, dtype=torch.bfloat16, device="meta") for x in (q, k))
        call = calls.dense(rows, keys, keys, Options(causal=causal, scale=scale, return_lse=True, validate=False))
        p = call.problem
        self.bound = Launcher(Plan(p, "hopper", "", (64 * c.consumers, c.BN)), c, target)
        spec = replace(self.bound.spec, guard=False)
        self.spec = Fp8Spec(**{f.name: getattr(spec, f.name) for f in fields(Spec)}, promote=promote)
        self.padded = -(-p.kv_len // KEYS) * KEYS

    def transposed(self, v: torch.Tensor) -> torch.Tensor:
        """Where V is written to."""
        return torch.empty((*v.shape[:2], self.spec.DV, self.padded), dtype=v.dtype, device=v.device)

    def arguments(self, q: torch.Tensor, k: torch.Tensor, vt: torch.Tensor, scales: list[torch.Tensor],
                  out: torch.Tensor, lse: torch.Tensor, counter: torch.Tensor | None) -> dict[str, Any]:  # fmt: skip
        """`scales` of q [B, H, Lq], of k and v [B, Hkv]."""
        s = self.spec
        given: dict[str, Any] = dict.fromkeys(Arguments.NAMES, 0)
        given |= {name: None for name in given if name.isupper()}
        given |= {
            "q": tiles(q, 64, s.chunk_d), "k": tiles(k, s.BN, s.chunk_d), "v": tiles(vt, s.DV, s.BN),
            "o": tiles(out, 64, s.DV), "OUT": out, "LSE": lse, "COUNTER": counter,
            "Q_SCALES": scales[0], "K_SCALES": scales[1], "V_SCALES": scales[2],
        }  # fmt: skip
        given |= stride_arguments("lse", "bhl", lse) | stride_arguments("qs", "bhl", scales[0])
        given |= stride_arguments("ks", "bh", scales[1]) | stride_arguments("vs", "bh", scales[2])
        return given | self.bound.sizes | {"S": s}

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: list[torch.Tensor],
                 out: torch.Tensor, lse: torch.Tensor) -> None:  # fmt: skip
        vt = self.transposed(v)
        self.turn(v, vt)
        counter = None
        if self.bound.dynamic:
            counter = torch.zeros(FLAGS_AT, dtype=torch.int32, device=q.device)
        given = self.arguments(q, k, vt, scales, out, lse, counter)
        fp8_kernel[(self.bound.programs,)](*(given[name] for name in fp8_kernel.arg_names), **OPTIONS)

    def turn(self, v: torch.Tensor, vt: torch.Tensor) -> None:
        batch, heads, keys, width = v.shape
        transpose[(self.padded // KEYS, batch * heads)](
            v.view(torch.uint8), vt.view(torch.uint8), *v.stride()[:3], *vt.stride()[:3], heads, keys, width,
            D=self.spec.DV, KEYS=KEYS,
        )  # fmt: skip


def tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    block = [1, 1, rows, columns]
    kind = gl.float8e4nv if x.dtype == torch.float8_e4m3fn else gl.bfloat16
    strides = [16 if size == 1 else stride for size, stride in zip(x.shape[:-1], strides_of(x), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, gl.NVMMASharedLayout.get_default_for(block, kind))
