"""The launches of a plan: recorded by its first call with given strides, replayed by address in later ones.

Kernels are compiled for strides and for addresses that are multiples of 16, so calls that have others are recorded or
launched anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import torch

from ...core.private import torch as private
from ...core.private.triton import INTERPRETED
from ...core.tensors import FIELDS, BackwardTensors, Tensors
from .launch_program import LaunchProgram, Recorder, launch_and_record

FORWARD = "forward."
BACKWARD_FIELDS = (
    *(FORWARD + name for name in FIELDS),
    *(f.name for f in fields(BackwardTensors) if f.name not in ("forward", "dcaptured")),
)
Q, K = FIELDS.index("q"), FIELDS.index("k")  # every call has them


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
    """Launches a plan of a call or of a backward pass. A subclass has `launch`, which is plain code."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()  # of the tensors that the plan's calls have
        self.present: Any = None  # a function that returns them
        self.recorded: dict[Hashable, LaunchProgram] = {}

    def launch(self, r: Recorder, t: Any, *more: torch.Tensor) -> None:
        """Launches the kernels of a call through `r`."""
        raise NotImplementedError

    def __call__(self, t: Any) -> None:
        """Launches a call; `t` are its `Tensors` or `BackwardTensors`."""
        self.run(t)

    def run(self, t: Any, *more: torch.Tensor) -> None:
        """Launches a call; `more` are tensors that were made for it."""
        if self.present is None:
            names = FIELDS if isinstance(t, Tensors) else BACKWARD_FIELDS
            self.names = tuple(name for name in names if attrgetter(name)(t) is not None)
            self.present = attrgetter(*self.names)  # last, for other threads
        captured = captured_of(t)
        given, key = (*self.present(t), *captured), None
        if not INTERPRETED:
            addresses = [*map(torch.Tensor.data_ptr, given)]
            if is_aligned(addresses, given[Q].device):
                key = key_of(given[K], given)
                for x in captured:
                    key += (x.shape,)
                for x in more:
                    addresses.append(x.data_ptr())
                    key += (x.shape, addresses[-1] & 15)
                if (program := self.recorded.get(key)) is not None:
                    program(addresses)
                    return

        def launch(r: Recorder, own: list[torch.Tensor]) -> None:
            count, end = len(self.names), len(given)
            named = dict(zip(self.names, own[:count], strict=True))
            self.launch(r, with_tensors(t, named, own[count:end]), *own[end:])

        launch_and_record(launch, (*given, *more), self.recorded, key)


def captured_of(t: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that the functions of a call capture, and in a backward pass their gradients."""
    return t.captured if isinstance(t, Tensors) else (*t.forward.captured, *t.dcaptured.values())


def readable(captured: Sequence[torch.Tensor], r: Recorder) -> tuple[torch.Tensor, ...]:
    """Captured tensors, with an element in the place of each empty one: hidden cells read it."""
    return tuple(x if x.numel() else r.empty(*[1] * x.ndim, dtype=x.dtype) for x in captured)


def with_tensors(t: Any, tensors: dict[str, Any], captured: Sequence[torch.Tensor]) -> Any:
    """The same call with these tensors, `captured` in the order of `captured_of`."""
    if isinstance(t, Tensors):
        return replace(t, **tensors, captured=tuple(captured))
    forward = {name.removeprefix(FORWARD): x for name, x in tensors.items() if name.startswith(FORWARD)}
    own = {name: x for name, x in tensors.items() if not name.startswith(FORWARD)}
    count = len(t.forward.captured)
    forward["captured"] = tuple(captured[:count])
    own["dcaptured"] = dict(zip(t.dcaptured, captured[count:], strict=True))
    return replace(t, forward=replace(t.forward, **forward), **own)


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
    program = launcher.recorded.get(key)

    def launch(*tensors: torch.Tensor | None) -> None:
        nonlocal program
        if program is not None and private.current_device() == index:
            program([x.data_ptr() for x in tensors if x is not None])
            return
        given = [x for x in tensors if x is not None]
        views: Any = {form[0]: x.as_strided(*form[1:]) for form, x in zip(forms, given, strict=True)}
        launcher(Tensors(**views))
        program = launcher.recorded.get(key)

    return launch
