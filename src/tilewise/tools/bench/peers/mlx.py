"""MLX on a CPU: `mlx.core.fast.scaled_dot_product_attention`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from ...workloads import Inputs, Workload
from .candidate import Candidate, dense_mask, limit, not_installed, refuse
from .sdpa import needs_mask

NAME = "MLX"


def missing() -> str | None:
    return not_installed("mlx.core")


def candidates(case: Workload, x: Inputs) -> Iterator[Candidate]:
    refuse(NAME, GPU_here=x.q.device.type != "cpu", page_tables=case.page_size, packed_sequences=case.packed)
    refuse(NAME, softcap=case.softcap, sinks_here=case.sinks, ALiBi_here=case.alibi, added_masks_here=case.added)
    refuse(NAME, other_dtypes_here=x.q.dtype != torch.float32)
    mx: Any = importlib.import_module("mlx.core")
    q, k, v = (mx.array(y.numpy()) for y in (x.q, x.k, x.v))
    mask: Any = "causal" if case.causal and case.q_len > 1 else None
    if needs_mask(case, x):
        limit(NAME, "its mask", case.batch * case.q_len * case.kv_len, x.q.device)
        mask = mx.array(dense_mask(case, x).numpy())
    scale = case.head_dim**-0.5 if case.scale is None else case.scale

    def run() -> torch.Tensor:
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, stream=mx.cpu)
        mx.eval(out)
        return torch.utils.dlpack.from_dlpack(out)

    yield Candidate(NAME, run)
