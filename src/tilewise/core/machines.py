"""Other machines that calls can be planned for. Each backend lists its own (`machines`); the planner collects them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from .plan import Plan
from .problem import Problem

# The planner's `choose` on this machine: of a problem, a backend's name or None, and threads
Choose = Callable[[Problem, "str | None", "int | None"], Plan]


@dataclass(frozen=True)
class Machine:
    """Another machine. `choose` wraps the planner's `choose`, so that it decides as it would there."""

    about: str
    device: str  # the torch device type of its tensors
    choose: Callable[[Choose, Problem, str | None, int | None], Plan]


def within(context: Callable[[], AbstractContextManager[None]]) -> Callable[..., Plan]:
    """A `Machine.choose` that runs the planner's in a context in which backends see the other machine."""

    def choose(own: Choose, problem: Problem, backend: str | None, threads: int | None) -> Plan:
        with context():
            return own(problem, backend, threads)

    return choose
