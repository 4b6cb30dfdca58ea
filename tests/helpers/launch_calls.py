"""Calls of the GPU backends over CPU tensors, as `launch_recorder.py` records them: forward, backward, cache writes and
merges in one form, and the same call with its tensors at other addresses or with other strides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from launch_recorder import COUNTERS, GPU, LaunchRecorder, Named, Place, differences
from launch_recorder import Launch as Recorded
from tilewise.backends.gpu.target import nvidia, planning_for
from tilewise.backends.triton.kv_write import Append
from tilewise.backends.triton.merge import merge_into
from tilewise.core.kv_store import RowFormat, WriteSlots
from tilewise.core.options import Options
from tilewise.core.tensors import FIELDS, BackwardTensors, Tensors
from tilewise.testing.case import Case, make
from tilewise.validation.backward import backward as checked_backward
from tilewise.validation.backward import differentiable

GRADIENTS = tuple(f.name for f in fields(BackwardTensors) if f.name not in ("forward", "dcaptured"))
Launch = Callable[[Named], None]


@dataclass
class Repeated:
    """A call that can be repeated. `new` makes its launcher, which has launched nothing yet; `bindable` one with the
    function that binds it, as the call cache does.
    """

    tensors: Named
    new: Callable[[], Launch]
    bindable: Callable[[], tuple[Launch, Callable[[], Launch]]] | None = None
    fixed: tuple[str, ...] = ()  # tensors that belong to the launcher
    dims: int = 4  # leading dims that may have other strides


def names_of(t: Tensors) -> Named:
    """The tensors of a call that are there, by name, and the states of its tile map."""
    found = {name: getattr(t, name) for name in FIELDS} | {"states": t.tile_map.states if t.tile_map else None}
    return {name: x for name, x in found.items() if x is not None}


def tensors_of(t: Tensors, named: Named) -> Tensors:
    """The same call with these tensors."""
    tile_map = None if t.tile_map is None else replace(t.tile_map, states=named["states"])
    return Tensors(**{name: named.get(name) for name in FIELDS}, tile_map=tile_map)  # type: ignore[arg-type]


def forward(case: Case, backend: Any) -> Repeated | str:
    """A forward call; or why the backend does not serve it."""
    call = make(case).checked(return_lse=True)
    p, t = replace(call.problem, device=GPU), call.tensors
    if p.is_empty:
        return "nothing to compute"
    if t.k_shared is not None:
        return "keys are joined before the call"
    with planning_for(nvidia(90)):
        if (refused := backend.supports(p)) is not None:
            return str(refused)

    def planned(plan: Any = backend.plan) -> Any:
        with planning_for(nvidia(90)):
            return plan(p)

    def launcher(own: Any) -> Launch:
        return within(lambda named: backend.run(own, tensors_of(t, named)))

    def bindable() -> tuple[Launch, Callable[[], Launch]]:
        own = planned()

        def bind() -> Launch:
            with planning_for(nvidia(90)):
                launch = backend.bind(own, t)
            return within(lambda named: launch(*(named.get(name) for name in FIELDS)))

        return launcher(own), bind

    bound = bindable if t.tile_map is None else None
    return Repeated(names_of(t), lambda: launcher(planned()), bound)


def backward(case: Case, backend: Any) -> Repeated | str:
    """A backward pass, with every gradient that the call has; or why the backend does not serve it."""
    inputs = make(case, sized=True)
    call = inputs.checked(return_lse=True)
    if call.problem.is_empty:
        return "nothing to compute"
    assert call.lse is not None
    call.out.zero_()
    call.lse.zero_()
    options = Options(layout=inputs.options.get("layout", "bhld"))
    dout, dlse = torch.zeros_like(call.out), torch.zeros(call.out.shape[:-1])
    made = checked_backward(call, options, call.lse, dout, dlse, differentiable(call.problem))
    p, b = replace(made.problem, device=GPU), made.tensors
    with planning_for(nvidia(90)):
        if (refused := backend.supports_backward(p)) is not None:
            return str(refused)

    def new() -> Launch:
        with planning_for(nvidia(90)):
            own = backend.plan_backward(p)

        def launch(named: Named) -> None:
            gradients: Any = {name: named.get(name) for name in GRADIENTS}
            backend.run_backward(own, BackwardTensors(tensors_of(b.forward, named), **gradients))

        return within(launch)

    given = {name: getattr(b, name) for name in GRADIENTS if getattr(b, name) is not None}
    return Repeated(names_of(b.forward) | given, new)


def append(dtype: str, *, packed: bool, paged: bool, inside: bool = False) -> Repeated:
    """New rows of five sequences into a cache; `inside`: V is in K."""
    rows = (9, 2, 16) if paged else (5, 2, 64)
    k, v = (RowFormat.of("dtype", dtype, 32, width).empty(*rows, device=torch.device("cpu")) for width in (128, 64))
    v = k.first(v.format) if inside else v
    shape = (1, 2, 55) if packed else (5, 2, 11)
    tensors = {"k": torch.zeros(*shape, 128), "v": torch.zeros(*shape, 64)}
    tensors |= {"starts": torch.zeros(5, dtype=torch.int32), "cu": 11 * torch.arange(6, dtype=torch.int32)}
    tensors |= {"table": torch.zeros(5, 9, dtype=torch.int32)} if paged else {}
    stores = {"k_store": k.data, "v_store": v.data, "k_scales": k.scales, "v_scales": v.scales}
    kept = {name: x for name, x in stores.items() if x is not None}  # one writer writes to one cache

    def new() -> Launch:
        writer = Append(k, v, rows[2])

        def launch(named: Named) -> None:
            writer(named["k"], named["v"], WriteSlots(named["starts"], named["cu"], 55, packed, named.get("table")))

        return launch

    return Repeated(tensors | kept, new, fixed=tuple(kept))


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


def merged(parts: int, total: bool) -> Repeated:
    """A merge of partial results, or with `total` their sum."""
    names = [f"{name}{i}" for name in ("out", "lse")[: 2 - total] for i in range(parts)] + ["out", "lse"][: 2 - total]
    tensors = {name: torch.zeros(2, 3, 11, *((40,) if name.startswith("out") else ())) for name in names}

    def launch(named: Named) -> None:
        found = {name: x.as_subclass(OnGpu) for name, x in named.items()}
        outs, lses = ([found[f"{name}{i}"] for i in range(parts) if f"{name}{i}" in found] for name in ("out", "lse"))
        assert merge_into(outs, lses, found["out"], found.get("lse"))

    return Repeated(tensors, lambda: launch, dims=1)


def within(launch: Launch) -> Launch:
    """A launch as on an H200."""

    def run(named: Named) -> None:
        with planning_for(nvidia(90)):
            launch(named)

    return run


def moved(call: Repeated, tensors: Named | None = None) -> Named:
    """The call's tensors, or these, at other addresses. Views of one memory, as V in K, stay views of one memory."""
    copies: dict[int, Any] = {}

    def copy(x: torch.Tensor) -> torch.Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in copies:
            copies[memory.data_ptr()] = memory.clone()
        own = copies[memory.data_ptr()]
        return torch.empty(0, dtype=x.dtype).set_(own, x.storage_offset(), x.shape, x.stride())

    given = call.tensors if tensors is None else tensors
    return {name: x if name in call.fixed else copy(x) for name, x in given.items()}


def placed(x: torch.Tensor, strides: list[int], offset: int = 0) -> torch.Tensor:
    """The values of a tensor with other strides, from element `offset` of its memory on."""
    span = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True)) + 1
    made = torch.zeros(span + offset, dtype=x.dtype).as_strided(x.shape, strides, offset)
    own = tuple(slice(None if stride else 1) for stride in strides)  # of broadcast dims one element
    made[own].copy_(x[own])
    return made


def alone(call: Repeated) -> Named:
    """The call's tensors that share their memory with no other one."""
    memory = {name: x.untyped_storage().data_ptr() for name, x in call.tensors.items()}
    shared = [*memory.values()]
    return {name: call.tensors[name] for name, at in memory.items() if shared.count(at) == 1 and name not in call.fixed}


def restrided(call: Repeated) -> dict[str, Named]:
    """The call's tensors, one of them with twice its strides, by the name of that one."""
    found = {}
    for name, x in alone(call).items():
        dims = min(call.dims, x.ndim - 1)
        strides = [stride * 2 if i < dims else stride for i, stride in enumerate(x.stride())]
        if name != "states" and strides != list(x.stride()):  # states are copied where they are not contiguous
            found[name] = call.tensors | {name: placed(x, strides)}
    return found


def lengthened(call: Repeated) -> Named | None:
    """The call's tensors with one more row of packed keys, or one more page, which are not in its plan, and the same
    strides. None where the keys of the call are others.
    """
    dim = 2 if "cu_seqlens_k" in call.tensors else 0 if "block_table" in call.tensors else None
    names = {"k", "v", "k_scales", "v_scales", "k_bias", "dk", "dv", "dk_bias"} & set(call.tensors)
    if dim is None or not names <= set(alone(call)) or "k_bias" in names:
        return None

    def longer(x: torch.Tensor) -> torch.Tensor:
        shape = [n + (i == dim) for i, n in enumerate(x.shape)]
        span = sum((n - 1) * stride for n, stride in zip(shape, x.stride(), strict=True)) + 1
        return torch.zeros(span, dtype=x.dtype).as_strided(shape, x.stride())

    return call.tensors | {name: longer(call.tensors[name]) for name in names}


def shifted(call: Repeated, name: str) -> Named:
    """The call's tensors, one of them an element past an aligned address."""
    x = call.tensors[name]
    return call.tensors | {name: placed(x, list(x.stride()), 1)}


def is_repeated(call: Repeated) -> bool:
    """Whether the call is repeated by address."""
    return not any(x.data_ptr() % 16 for x in call.tensors.values())


def counters_of(launches: list[Recorded]) -> set[int]:
    """The counters that launches have, by their addresses."""
    return {x.start for launch in launches for x in launch.arguments.values() if is_counter(x)}


def is_counter(x: Any) -> bool:
    return isinstance(x, Place) and x.kind == COUNTERS


class Comparison:
    """What is wrong with a call's launches, by the way in which it was launched. They are compared with those of a new
    launcher, through Triton.
    """

    def __init__(self, recorder: LaunchRecorder, call: Repeated) -> None:
        recorder.forget()
        self.recorder, self.call = recorder, call
        self.by_address = is_repeated(call)
        self.wrong: dict[str, list[str]] = {}

    def add(self, way: str, found: list[str]) -> None:
        if found:
            self.wrong[way] = found

    def first(self, way: str, launch: Launch, tensors: Named) -> list[Recorded]:
        """A call that is launched through Triton. After it comes what only a graph capture will need."""
        want = self.recorder.through_triton(self.call.new(), tensors)
        got = self.recorder.record(launch, tensors)
        found = differences(want, got[: len(want)])
        if others := got[len(want) :]:
            with self.recorder.capture():
                captured = self.recorder.through_triton(self.call.new(), tensors)
            found += [f"for captures: {x}" for x in differences(captured, others)]
        self.add(way, found)
        return got

    def again(self, way: str, launch: Launch, tensors: Named) -> list[Recorded]:
        """A call that is launched by address, if any is."""
        want = self.recorder.through_triton(self.call.new(), tensors)
        got = self.recorder.record(launch, tensors)
        found = differences(want, got)
        if {x.by_address for x in got} != {self.by_address}:
            found.append("launched through Triton" if self.by_address else "launched by address")
        self.add(way, found)
        return got


def repeats(recorder: LaunchRecorder, call: Repeated) -> dict[str, list[str]]:
    """What is wrong with each way in which a call is repeated: at other addresses, in a graph capture, bound."""
    found, there = Comparison(recorder, call), moved(call)
    launch = call.new()
    found.first("first", launch, call.tensors)
    again = found.again("again", launch, there)
    with recorder.capture():
        captured = [found.again(f"captured {n}", launch, moved(call)) for n in (1, 2)]
    last = found.again("after captures", launch, call.tensors)
    sets = [counters_of(launches) for launches in (again, *captured)]
    found.add("counters", ["captured calls share them"] * (sum(map(len, sets)) != len(set().union(*sets))))
    found.add("counters of a stream", ["they are others"] * (sets[0] != counters_of(last)))
    if call.bindable is not None:
        launch, bind = call.bindable()
        early = bind()
        found.first("bound, first", early, call.tensors)
        for way, bound in (("bound", early), ("bound later", bind()), ("beside bound", launch)):
            found.again(way, bound, there)
        with recorder.capture():
            found.again("bound, captured", early, there)
    return found.wrong


def changes(recorder: LaunchRecorder, call: Repeated) -> dict[str, list[str]]:
    """What is wrong with calls of the same plan whose tensors have other strides, or more keys, and with the first call
    after them.
    """
    found = Comparison(recorder, call)
    launch = call.new()
    recorder.record(launch, call.tensors)
    more = lengthened(call)
    for name, tensors in (restrided(call) | ({} if more is None else {"more keys": more})).items():
        got = found.first(name, launch, tensors)
        if name in ("q", "more keys"):
            if name == "q" and any(x.by_address for x in got):
                found.add("q, first", ["launched by address"])
            found.again(f"{name}, again", launch, moved(call, tensors))
    found.again("first again", launch, moved(call))
    return found.wrong


def misaligned(recorder: LaunchRecorder, call: Repeated, name: str) -> dict[str, list[str]]:
    """What is wrong with a call one of whose tensors is not aligned, after one in which all are, and with the next."""
    found = Comparison(recorder, call)
    launch = call.new()
    recorder.record(launch, call.tensors)
    got = found.first(name, launch, shifted(call, name))
    if name != "states" and any(x.by_address for x in got):  # states may be copied to the launch's tiles
        found.add(f"{name}, first", ["launched by address"])
    found.again("first again", launch, moved(call))
    return found.wrong
