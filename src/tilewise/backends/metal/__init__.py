"""Kernels in the Metal shading language for Apple GPUs: every option, in any combination.

Executed in a simulator of Metal so far, not on Apple hardware (docs/metal.md).
"""

from __future__ import annotations

import platform

import torch

from ...core.plan import Plan, Unproven
from ...core.problem import Problem, family_of, no_bias_or_tree, no_dropout, no_mods, no_selection, other_formats
from ...core.tensors import Tensors
from . import config, device
from .device import machines as machines
from .params import MOST
from .spec import BK, KINDS

UNMEASURED = Unproven("this backend has run in a simulator only, not on an Apple GPU", taken=True)


def supports(problem: Problem) -> str | None:
    return device.why_not(problem.device.type) or unserved(problem)


def unserved(problem: Problem) -> str | None:
    """What the kernels lack for a problem; None if nothing."""
    p = problem
    reach = p.q_len + p.kv_len + abs(p.rules.numbers()["q_offset"])
    if p.rules.affine:
        return "it has no k_start, k_stride and q_stride"
    if reach > MOST:
        return "positions past 2**30"
    return no_bias_or_tree(p) or no_selection(p) or no_mods(p) or no_dropout(p) or other_formats(p, KINDS)


def family(problem: Problem) -> str:
    return family_of(problem, config.is_decode(problem))


def unproven(problem: Problem) -> Unproven:
    return UNMEASURED


def proof_facts(device_: torch.device) -> dict[str, str] | None:
    """What a proof of these kernels holds for; None where they cannot run."""
    if device_.type != "mps" or device.why_not("mps") is not None:
        return None
    return {"device": torch.backends.mps.get_name(), "driver": f"macOS {platform.mac_ver()[0]}"}


def plan(problem: Problem) -> Plan:
    p = problem
    c = config.config_of(p, device.current().cores)
    rows = p.total_q if p.packed_q else p.batch * p.q_len
    notes = []
    if p.split_size and c.split_tiles == 0:
        notes.append("split_size: keys are read in one pass, which is batch-invariant already")
    if p.v_in_k and not config.reads_once(p, c):
        notes.append("rows with V in K are read twice")
    if c.pack > 1:
        notes.append(f"{c.pack} query heads of a KV head share a tile")
    kernel = "prefill" if not config.is_decode(p) else "split-KV decode" if c.splits > 1 else "decode"
    return Plan(
        p,
        backend="metal",
        kernel=f"{kernel}, {c.kernel}",
        tile=(c.queries, BK),
        splits=c.splits,
        workspace_bytes=4 * rows * p.heads * c.splits * (p.value_dim + 2) if c.splits > 1 else 0,
        notes=tuple(notes),
        detail=c,
    )


def run(plan: Plan, tensors: Tensors) -> None:
    from . import launch

    launch.run(plan, tensors)
