"""Machines that calls are planned for without having them. Backends name theirs (`machines`), the planner asks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from .plan import Plan
from .problem import Problem

# The planner's choice, on the machine that it runs on: problem, a backend by name or None, threads
Choose = Callable[[Problem, "str | None", "int | None"], Plan]


@dataclass(frozen=True)
class Machine:
    """One of them. `choose` makes the choice as that machine would, of a problem whose device it has."""

    about: str
    device: str  # the type of its tensors' device
    choose: Callable[[Choose, Problem, str | None, int | None], Plan]


def within(context: Callable[[], AbstractContextManager[None]]) -> Callable[..., Plan]:
    """For `Machine.choose`: the planner's own choice in a context in which backends see the other machine."""

    def choose(own: Choose, problem: Problem, backend: str | None, threads: int | None) -> Plan:
        with context():
            return own(problem, backend, threads)

    return choose
