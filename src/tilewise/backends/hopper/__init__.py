"""Gluon kernels for Hopper GPUs (H100, H200), 16-bit tensors: prefill with every option of position and score, a
backward pass, and decode over a latent cache.
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.plan import Deferred, OtherDevice, Plan, Unproven
from ...core.problem import Problem, no_bias_or_tree, no_dropout, no_mods, no_selection
from ...core.tensors import BackwardTensors, Tensors
from ..gpu import coverage, facts
from ..gpu.target import target_of
from .bwd import config as bwd_config
from .bwd.wide import config as wide_config
from .fwd import config
from .mla import config as latent


def supports(problem: Problem) -> str | None:
    if (reason := _machine_refusal(problem)) is not None:
        return reason
    if not _decodes_latent(problem) and (reason := config.refusal(problem)) is not None:
        return f"{reason}, and {latent.refusal(problem)}" if latent.is_latent(problem) else reason
    return coverage.refusal("hopper", family(problem))


def _decodes_latent(problem: Problem) -> bool:
    return latent.is_latent(problem) and latent.refusal(problem) is None


def supports_backward(problem: Problem) -> str | None:
    refused = _machine_refusal(problem) or no_selection(problem) or bwd_config.refusal(problem)
    return refused or coverage.refusal("hopper", family(problem))


def _machine_refusal(problem: Problem) -> str | None:
    if problem.device.type != "cuda" or target_of(problem.device).arch != 90:
        return OtherDevice("runs on Hopper GPUs")
    return no_bias_or_tree(problem) or no_mods(problem) or no_dropout(problem)


def declines(problem: Problem) -> str | None:
    """Why the Triton backend is the better choice, if it is: by measurement, see benchmarks/h200/LOG.md, h200 20."""
    return None if _decodes_latent(problem) else config.slower(problem)


def declines_backward(problem: Problem) -> str | None:
    """Why the Triton backend is the better choice for a backward pass, if it is."""
    return bwd_config.slower(problem)


def family(problem: Problem) -> str:
    if problem.grads:
        return "wide backward" if bwd_config.is_wide(problem) else "backward"
    if not _decodes_latent(problem):
        return "prefill"
    return "latent decode" if problem.selection is None else "latent indices"


def unproven(problem: Problem) -> Unproven | None:
    return coverage.question("hopper", family(problem), target_of(problem.device), taken=False)


def proof_facts(device: torch.device) -> dict[str, str] | None:
    """What a proof of these kernels holds for; None where they cannot run."""
    return facts.facts(device)


def plan(problem: Problem) -> Plan:
    if _decodes_latent(problem):
        cut = latent.config_of(problem, target_of(problem.device))
        return Plan(
            problem,
            backend="hopper",
            kernel=f"latent {'decode' if problem.selection is None else 'attention by key indices'}, warp-specialised",
            tile=latent.TILE,
            splits=cut.splits,
            workspace_bytes=latent.workspace_bytes(cut),
            notes=latent.notes(cut),
            detail=Deferred(_launcher, problem),
        )
    c = config.config_of(problem)
    return Plan(
        problem,
        backend="hopper",
        kernel="prefill, warp-specialised",
        tile=(64 * c.consumers, c.BN),
        notes=config.notes(problem, c),
        detail=Deferred(_launcher, problem),
    )


def plan_backward(problem: Problem) -> Plan:
    p = bwd_config.unstrided(problem)
    if bwd_config.is_wide(p):
        of_queries, of_keys, *_ = wide_config.specs_of(p)
        return Plan(
            problem,
            backend="hopper",
            kernel="backward of wide heads, warp-specialised",
            tile=(of_queries.BO, of_keys.BO),
            workspace_bytes=wide_config.workspace_bytes(p),
            notes=("dQ by a launch of its own",),
            detail=Deferred(_launcher, problem),
        )
    target = target_of(problem.device)
    s = bwd_config.spec_of(p, target)
    return Plan(
        problem,
        backend="hopper",
        kernel="backward, warp-specialised",
        tile=(s.BM, bwd_config.BN),
        splits=bwd_config.splits_of(p, target),
        workspace_bytes=bwd_config.workspace_bytes(p, s, target),
        notes=bwd_config.notes(p, target),
        detail=Deferred(_launcher, problem),
    )


def run(plan: Plan, tensors: Tensors) -> None:
    plan.detail()(tensors)


def bind(plan: Plan, tensors: Tensors) -> Any:
    from ..gpu.launcher import bind_addresses

    return bind_addresses(plan.detail(), tensors)


def run_backward(plan: Plan, tensors: BackwardTensors) -> None:
    plan.detail()(tensors)


def _launcher(problem: Problem) -> Any:
    """Launch modules are imported by the first call, since they import Triton."""
    if problem.grads:
        from .bwd import launch as backward

        return backward.launcher_of(problem)
    if _decodes_latent(problem):
        from .mla import launch as decode

        return decode.launcher_of(problem)
    from .fwd import launch

    return launch.launcher_of(problem)
