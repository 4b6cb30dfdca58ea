"""The oracle as a backend: any call on any device, in float64, with memory that grows as Lq * Lk."""

from __future__ import annotations

from ...core.plan import Plan
from ...core.problem import Problem
from ...core.tensors import BackwardTensors, Statistics, Tensors, sequences
from ...reference import attend, gradients, statistics


def takes_shared(problem: Problem) -> bool:
    """`k_shared` is joined to K sequence by sequence."""
    return True


def supports(problem: Problem) -> str | None:
    return "float64 is not on this device" if problem.device.type == "mps" else None


def plan(problem: Problem) -> Plan:
    cells = problem.heads * problem.q_len * problem.kv_len
    return Plan(
        problem=problem,
        backend="reference",
        kernel="dense float64",
        tile=(max(1, problem.q_len), max(1, problem.kv_len)),
        workspace_bytes=3 * 8 * cells,  # scores, probabilities and a temporary
        notes=("the oracle: slow, for checking",),
    )


def run(plan: Plan, tensors: Tensors) -> None:
    tensors.out.zero_()
    if tensors.lse is not None:
        tensors.lse.fill_(-float("inf"))
    for seq in sequences(plan.problem, tensors):
        result = attend(seq)
        seq.out.copy_(result.out)
        if seq.lse is not None:
            seq.lse.copy_(result.lse)


def run_statistics(plan: Plan, tensors: Tensors, wanted: Statistics) -> None:
    wanted.clear()
    for seq in sequences(plan.problem, tensors):
        own = wanted.of(seq)
        for name, x in statistics(attend(seq), own.first_query(seq), own.indices).items():
            if (to := getattr(own, name)) is not None:
                to.copy_(x)


supports_backward, plan_backward, plan_statistics = supports, plan, plan


def run_backward(plan: Plan, tensors: BackwardTensors) -> None:
    found = gradients(plan.problem, tensors.forward, tensors.dout, tensors.dlse)
    for name, gradient in tensors.gradients().items():
        gradient.copy_(found[name])
