"""The launches of a plan: recorded by its first call with given strides, replayed by address in later ones.

Kernels are compiled for strides and for addresses that are multiples of 16, so calls that have others are recorded or
launched anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from ...core.private import torch as private
from ...core.private.triton import INTERPRETED
from ...core.tensors import FIELDS, Tensors
from .launch_program import LaunchProgram, Recorder, launch_and_record


def is_aligned(addresses: Sequence[int], device: torch.device) -> bool:
    """Whether kernels that were compiled for aligned tensors can be launched for these on the current device."""
    either = 0
    for address in addresses:
        either |= address
    return either & 15 == 0 and private.current_device() == device.index


def key_of(k: torch.Tensor, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What launches of a plan differ in besides addresses: strides, and the number of rows or pages of keys."""
    return (k.shape, *[x.stride() for x in given])


class PlanLauncher:
    """Launches a plan. A subclass has `launch`, which is plain code."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()  # of the tensors that the plan's calls have
        self.present: Any = None  # a function that returns them
        self.programs: dict[Hashable, LaunchProgram] = {}

    def launch(self, r: Recorder, t: Tensors, *states: torch.Tensor) -> None:
        """Launches the kernels of a call through `r`; `states` are those of its tile map in this launch's tiles."""
        raise NotImplementedError

    def states(self, t: Tensors) -> tuple[torch.Tensor, ...]:
        """The states of a call's tile map in this launch's tiles, if it has one."""
        return ()

    def __call__(self, t: Tensors) -> None:
        if self.present is None:
            self.names = tuple(name for name in FIELDS if getattr(t, name) is not None)
            self.present = attrgetter(*self.names)  # last, for other threads
        tensors, states = self.present(t), self.states(t)
        given, key = (*tensors, *states), None
        if not INTERPRETED:
            addresses = [x.data_ptr() for x in tensors]
            if is_aligned(addresses, t.q.device):
                key = key_of(t.k, tensors)
                for x in states:
                    addresses.append(x.data_ptr())
                    key += (x.shape, addresses[-1] & 15)
                if (program := self.programs.get(key)) is not None:
                    program(addresses)
                    return

        def launch(r: Recorder, own: list[torch.Tensor]) -> None:
            names = self.names
            tensors: dict[str, Any] = dict(zip(names, own, strict=False))
            self.launch(r, replace(t, **tensors), *own[len(names) :])

        launch_and_record(launch, given, self.programs, key)


def bind_addresses(launcher: PlanLauncher, t: Tensors) -> Callable[..., None]:
    """A function that launches a plan for tensors that differ from those in `t` only in their addresses, and are all
    aligned if those are.

    It takes tensors in the order of FIELDS; None is skipped.
    """
    index = t.q.device.index
    there = {name: x for name in FIELDS if (x := getattr(t, name)) is not None}
    forms = [(name, x.shape, x.stride()) for name, x in there.items()]
    given = [*there.values()]
    key = None if any(x.data_ptr() & 15 for x in given) else key_of(t.k, given)
    program = launcher.programs.get(key)

    def launch(*tensors: torch.Tensor | None) -> None:
        nonlocal program
        if program is not None and private.current_device() == index:
            program([x.data_ptr() for x in tensors if x is not None])
            return
        given = [x for x in tensors if x is not None]
        views: Any = {form[0]: x.as_strided(*form[1:]) for form, x in zip(forms, given, strict=True)}
        launcher(Tensors(**views))
        program = launcher.programs.get(key)

    return launch
