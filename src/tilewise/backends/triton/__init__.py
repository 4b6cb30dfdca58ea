"""Triton kernels for any NVIDIA GPU from Ampere on: every option, in any combination."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from ...core.plan import OtherDevice, Plan
from ...core.problem import Problem
from ...core.tensors import Tensors
from ..gpu.target import target_of, triton_refusal
from . import config, tuned

LEAST_TRITON = (3, 6)  # older versions cannot compile every kernel


def supports(problem: Problem) -> str | None:
    if problem.device.type != "cuda":
        if problem.device.type != "cpu" or not _interpreted():
            return OtherDevice("runs on GPUs")
        if torch.bfloat16 in (problem.q_dtype, problem.k_dtype, problem.v_dtype):
            return "Triton's interpreter has no bfloat16 products"
    if refusal := triton_refusal(LEAST_TRITON):
        return refusal
    target = target_of(problem.device)
    if target.ptx and target.arch < 80:
        return "needs compute capability 8.0 (Ampere) or newer"
    from .dequant import KINDS

    return problem.unread(KINDS)


def plan(problem: Problem) -> Plan:
    c = tuned.config_of(problem, target_of(problem.device))
    rows = problem.total_q if problem.packed_q else problem.batch * problem.q_len
    notes = []
    if problem.split_size and c.split_tiles == 0:
        notes.append("split_size: keys are walked in one pass, which is batch-invariant already")
    if c.slices > 1:
        notes.append(f"{c.slices} programs share the value columns of a tile")
    if c.pack > 1:
        notes.append(f"{c.pack} query heads of a KV head share a tile")
    return Plan(
        problem,
        backend="triton",
        kernel="split-KV decode" if c.splits > 1 else "decode" if config.is_decode(problem) else "prefill",
        tile=(c.BM // c.pack, c.BK),
        splits=c.splits,
        workspace_bytes=4 * rows * problem.heads * c.splits * (problem.value_dim + 2) if c.splits > 1 else 0,
        notes=tuple(notes),
    )


def run(plan: Plan, tensors: Tensors) -> None:
    _launch().bound_to(plan)(tensors)


def bind(plan: Plan, tensors: Tensors) -> Any:
    return _launch().bind(plan, tensors)


@cache
def _launch() -> Any:
    """The launches, imported with the first call, and Triton with them."""
    from . import launch

    return launch


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
