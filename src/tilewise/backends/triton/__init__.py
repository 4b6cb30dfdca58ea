"""Triton kernels for NVIDIA's GPUs from Ampere on and for AMD's: every option, in any combination."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...core.kv_store import Store, Writer
from ...core.machines import Machine
from ...core.mod_gradients import loads_of
from ...core.plan import Deferred, OtherDevice, Plan, Unproven
from ...core.problem import (
    CascadeProblem,
    Problem,
    WriteProblem,
    family_of,
    no_alibi_by_tree,
    no_dropout_by_tree,
    no_mods_by_tree,
    other_formats,
)
from ...core.storage import LATENT
from ...core.tensors import BackwardTensors, Tensors
from ..gpu import coverage, facts
from ..gpu.target import gpu_machines, target_of
from . import config, operands, tuned
from .bwd import dense_mask

KINDS = ("f32", "f16", "bf16", "int8", "int4", "codebook4", "fp8_e4m3", "fp8_latent")  # storage that can be read


def supports(problem: Problem) -> str | None:
    wide = max(problem.head_dim, problem.value_dim)
    refused = _supports(problem) or no_alibi_by_tree(problem) or no_mods_by_tree(problem)
    refused = refused or no_dropout_by_tree(problem)
    refused = refused or target_of(problem.device).too_wide(wide, backward=bool(problem.grads))
    return refused or coverage.refusal("triton", family(problem))


def _supports(problem: Problem) -> str | None:
    if problem.device.type == "cpu" and _interpreted():
        if torch.bfloat16 in (problem.q_dtype, problem.k_dtype, problem.v_dtype):
            return "Triton's interpreter has no bfloat16 products"
        return coverage.refusal("triton", "prefill") or _other_formats(problem)
    if reason := serves(problem.device) or _other_formats(problem):
        return reason
    formats = problem.k_format.name, problem.v_format.name
    return target_of(problem.device).lacks_registers(operands.is_float32(problem), formats)


def supports_write(problem: WriteProblem) -> str | None:
    return serves(problem.device) or _other_formats(problem)


def serves(device: torch.device) -> str | None:
    if device.type != "cuda":
        return OtherDevice("runs on GPUs")
    return coverage.refusal("triton", "prefill") or target_of(device).refusal


def _other_formats(problem: Problem | WriteProblem) -> str | None:
    if reason := other_formats(problem, KINDS):
        return reason
    if isinstance(problem, Problem) and problem.v_format.scales_in_row and problem.value_dim != LATENT:
        return f"v in {problem.v_format} must have {LATENT} columns here, not {problem.value_dim}"
    return None


def family(problem: Problem) -> str:
    return family_of(problem, config.is_decode(problem))


def unproven(problem: Problem) -> Unproven | None:
    return coverage.question("triton", family(problem), target_of(problem.device), taken=True)


def proof_facts(device: torch.device) -> dict[str, str] | None:
    """What a proof of these kernels holds for; None where they cannot run."""
    return facts.facts(device)


def plan(problem: Problem) -> Plan:
    c = tuned.config_of(problem, target_of(problem.device))
    rows = problem.total_q if problem.packed_q else problem.batch * problem.q_len
    notes = []
    if problem.split_size and c.split_tiles == 0:
        notes.append("split_size: keys are read in one pass, which is batch-invariant already")
    if c.slices > 1:
        notes.append(f"{c.slices} programs share the value columns of a tile")
    if problem.v_in_k and not config.spec(problem, c, target_of(problem.device)).v_in_k:
        notes.append("rows with V in K are read twice")
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
        detail=Deferred(_launcher, problem),
    )


def run(plan: Plan, tensors: Tensors) -> None:
    plan.detail()(tensors)


def bind(plan: Plan, tensors: Tensors) -> Any:
    from ..gpu.launcher import bind_addresses

    if plan.problem.mods is not None:  # captured tensors may have other sizes
        return None
    return bind_addresses(plan.detail(), tensors)


def cascade_gain(problem: CascadeProblem, rows: np.ndarray, tokens: int) -> float:
    return config.cascade_gain(problem, rows, tokens)


def writer(k: Store, v: Store, wrap: int) -> Writer:
    from .kv_write import Append

    return Append(k, v, wrap)


def merge_into(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor, lse: Any) -> bool:
    from .merge import merge_into

    return merge_into(outs, lses, out, lse)


def supports_backward(problem: Problem) -> str | None:
    p = problem
    if any(x.axis == "cells" for x in loads_of(p)):
        return "it has no gradient of a captured tensor whose index is not made of b, h and q, k or q - k"
    return supports(p) or dense_mask.refusal(p)


def plan_backward(problem: Problem) -> Plan:
    from .bwd import config as bwd_config

    p, c = problem, bwd_config.config(dense_mask.masked_problem(problem), target_of(problem.device))
    rows = (p.total_q if p.packed_q else p.batch * p.q_len) * p.heads
    size = dense_mask.size_of(p)
    notes = (f"indices or positions as a dense mask of {size / 2**20:.1f} MiB",) if size else ()
    return Plan(
        p, backend="triton", kernel="dK and dV apart, dQ" if c.apart else "dK and dV, dQ",
        tile=(c.queries.BQ, c.queries.BK), notes=notes,
        workspace_bytes=4 * rows * (2 if "alibi_slopes" in p.grads else 1) + size, detail=Deferred(_launcher, p),
    )  # fmt: skip


def run_backward(plan: Plan, tensors: BackwardTensors) -> None:
    plan.detail()(tensors)


def machines() -> dict[str, Machine]:
    return gpu_machines()


def _launcher(problem: Problem) -> Any:
    """Launch modules are imported by the first call, since they import Triton."""
    if problem.grads:
        from .bwd import launch as backward

        return backward.launcher_of(problem)
    from . import launch

    return launch.launcher_of(problem)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
