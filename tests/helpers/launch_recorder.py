"""Stand-ins for Triton and NVIDIA's driver that record launches, through Triton and by address, in one form that can be
compared.

Every launcher runs for real, on CPU tensors. Triton specialises each kernel for its arguments, but compiles nothing.
The driver reads what it is given. A pointer is recorded as the tensor that it points into, and the offset.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import jit

from tilewise.backends.gpu import kernel, launch_program, semaphores
from tilewise.backends.gpu.driver import CELLS, EARLY, CULaunchAttribute, CULaunchConfig
from tilewise.backends.triton import merge
from tilewise.core.private import torch as private

STREAM = 7
OWN, OTHER = None, 5  # the current device: that of CPU tensors, which have no index, or another one
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
# Element types of tensor maps: as Triton's compiler numbers them, and as the driver does.
ELEMENTS = {torch.float16: (6, 6), torch.float32: (7, 7), torch.bfloat16: (10, 9)}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
INPUT, WORKSPACE, COUNTERS, UNKNOWN = "input", "workspace", "counters", "unknown"
Named = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Place:
    """What a pointer points to: a tensor of the call by name, or memory that the call has allocated or keeps."""

    kind: str
    name: str
    offset: int
    aligned: bool  # to 16 bytes
    address: int = field(compare=False)
    size: int = field(compare=False, default=0)  # of the allocation, in bytes
    room: int = field(compare=False, default=0)  # bytes from the pointer on that a launch through Triton passes

    @property
    def start(self) -> int:
        return self.address - self.offset


@dataclass(frozen=True)
class Map:
    """A tensor map: what it describes, as the driver is told, and the shape and strides that are passed beside it."""

    place: Place
    described: tuple[Any, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class Launch:
    """A launch of a kernel, with its run-time arguments by name."""

    kernel: str
    compiled_for: tuple[Any, ...]  # types, compile-time values, which numbers and pointers are multiples of 16
    options: dict[str, Any]
    grid: tuple[int, ...]
    threads: int
    shared: int
    early: bool
    stream: int
    arguments: dict[str, Any]
    by_address: bool


class Compiled:
    """A kernel as Triton would return it: what it is compiled for, and nothing that runs."""

    def __init__(self, name: str, types: dict[str, Any], given: dict[str, Any], options: dict[str, Any]) -> None:
        self.name, self.options, self.given = name, options, given
        self.compiled_for = tuple(types.items())
        self.kinds = {name: kind for name, (kind, _) in types.items() if kind != "constexpr"}
        described = [given[name] for name, kind in self.kinds.items() if kind.startswith("tensordesc")]
        self.metadata = SimpleNamespace(
            num_ctas=1, global_scratch_size=0, profile_scratch_size=0, launch_cooperative_grid=False,
            launch_pdl=options.get("launch_pdl", False), num_warps=options["num_warps"], shared=100 + len(types),
            tensordesc_meta=[form_of(x) for x in described],
        )  # fmt: skip
        self.src = SimpleNamespace(signature={name: kind for name, (kind, _) in types.items()})

    @property
    def function(self) -> Compiled:
        """What the driver launches."""
        return self


def form_of(like: Any) -> dict[str, Any]:
    """What Triton's compiler says of a descriptor."""
    swizzle = SWIZZLES[like.layout.swizzle_byte_width]
    element = ELEMENTS[like.base.dtype][0]
    form = {"swizzle": swizzle, "elem_size": like.base.element_size(), "elem_type": element, "fp4_padded": False}
    return form | {"block_size": list(like.block_shape)}


def described(like: Any) -> tuple[Any, ...]:
    """A descriptor as Triton hands it to the driver: innermost dim first."""
    size, rank = like.base.element_size(), len(like.shape)
    strides = tuple(n * size for n in reversed(like.strides[:-1]))
    swizzle = SWIZZLES[like.layout.swizzle_byte_width]
    arrays = (tuple(reversed(like.shape)), strides, tuple(reversed(like.block_shape)), (1,) * rank)
    return (ELEMENTS[like.base.dtype][1], *arrays, 0, swizzle, 2, int(like.padding == "nan"))


@cache
def specialiser(function: Any) -> Callable[..., Any]:
    """Triton's own function from a kernel's arguments to what it is compiled for."""
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    bind: Callable[..., Any] = jit.create_function_from_signature(function.signature, function.params, backend)
    return bind


def memory_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Allocations(TorchDispatchMode):
    """Keeps every tensor with memory of its own that is made, so that no address is used twice in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {memory_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and memory_of(x) not in given:
                self.made[memory_of(x)] = x
        return result


class NoThread:
    """In the place of a thread: runs at once, in this one. A hundred starts of threads take a second."""

    def __init__(self, target: Callable[[], None]) -> None:
        self.target = target

    def start(self) -> None:
        self.target()

    def join(self) -> None:
        pass


class LaunchRecorder:
    """The driver, and Triton: both record. `recorder` (a fixture of the tests) puts it in their place."""

    def __init__(self) -> None:
        self.device: int | None = OWN
        self.capturing = False
        self.launches: list[Launch] = []
        self.inputs: list[tuple[int, int, str]] = []  # start, end and name of each memory
        self.allocations = Allocations()
        self.counters: list[list[torch.Tensor]] = []  # sets of equal size, one after the other
        self.maps: dict[int, tuple[int, tuple[Any, ...]]] = {}

    def forget(self) -> None:
        """Before another plan's calls: their memory is gone."""
        self.counters.clear()
        self.maps.clear()

    def record(self, call: Callable[[Named], None], tensors: Named) -> list[Launch]:
        """The launches of a call with these tensors."""
        self.launches, self.allocations, self.inputs = [], Allocations(), []
        for name, x in tensors.items():
            memory = x.untyped_storage()
            if memory.nbytes():
                self.inputs.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes(), name))
        with self.allocations:
            call(tensors)
        return self.launches

    def through_triton(self, call: Callable[[Named], None], tensors: Named) -> list[Launch]:
        """The launches of a call on another device than the current one, none of which are by address."""
        self.device = OTHER
        try:
            launches = self.record(call, tensors)
        finally:
            self.device = OWN
        assert not any(x.by_address for x in launches)
        return launches

    @contextmanager
    def capture(self) -> Iterator[None]:
        """As while a CUDA graph is captured."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def place_of(self, address: int, room: int = 0) -> Place:
        aligned = address % 16 == 0
        for start, end, name in self.inputs:
            if start <= address < end:
                return Place(INPUT, name, address - start, aligned, address, end - start)
        for sets in self.counters:
            start, size = sets[0].data_ptr(), sets[0].nbytes
            if start <= address < start + size * len(sets):
                return Place(COUNTERS, "", (address - start) % size, aligned, address, size, room)
        for x in self.allocations.made.values():
            start, size = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
            if start <= address < start + size:
                return Place(WORKSPACE, "", address - start, aligned, address, size, room)
        return Place(UNKNOWN, "", address, aligned, address)

    # Triton

    def launch_through_triton(self, function: Any, grid: tuple[int, int], given: dict[str, Any]) -> Compiled:
        taken, kinds, options = specialiser(function)(**given)
        types = dict(zip(taken, kinds, strict=True))
        name = f"{function.fn.__module__}.{function.fn.__name__}".removeprefix("tilewise.backends.")
        compiled = Compiled(name, types, taken, options)
        arguments = {name: self.argument(kind, taken[name]) for name, kind in compiled.kinds.items()}
        self.add(compiled, (*grid, 1), STREAM, arguments, by_address=False)
        return compiled

    def argument(self, kind: str, value: Any) -> Any:
        if kind[0] == "*":
            span = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True)) + 1
            return self.place_of(value.data_ptr(), span * value.element_size())
        if kind.startswith("tensordesc"):
            like = value.base
            place = self.place_of(like.data_ptr(), like.nbytes)
            return Map(place, described(value), tuple(value.shape), tuple(value.strides))
        return CELLS[kind](value).value

    def add(
        self, compiled: Compiled, grid: tuple[int, ...], stream: int, arguments: dict[str, Any], *, by_address: bool,
        how: tuple[int, int, bool] | None = None,
    ) -> None:  # fmt: skip
        meta = compiled.metadata
        threads, shared, early = how or (32 * meta.num_warps, meta.shared, meta.launch_pdl)
        launch = Launch(
            compiled.name, compiled.compiled_for, compiled.options, grid, threads, shared, early, stream, arguments,
            by_address,
        )  # fmt: skip
        self.launches.append(launch)

    # The driver

    def context(self) -> int:
        return 42

    def set_context(self, context: int) -> int:
        raise AssertionError("no launch has failed")

    def encode(
        self, at: int, element: int, rank: int, address: int, dims: int, strides: int, box: int, steps: int, *rest: int
    ) -> int:
        arrays = ((dims, "Q", rank), (strides, "Q", rank - 1), (box, "I", rank), (steps, "I", rank))
        read = [struct.unpack(f"={n}{kind}", ctypes.string_at(x, n * struct.calcsize(kind))) for x, kind, n in arrays]
        self.maps[at] = address, (element, *read, *rest)
        return 0

    def move(self, at: int, address: int) -> int:
        self.maps[at] = address, self.maps[at][1]
        return 0

    def launch(self, how: int, compiled: Compiled, parameters: int, extra: Any) -> int:
        config = CULaunchConfig.from_address(how)
        places = iter(ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[: self.count(compiled)])
        arguments: dict[str, Any] = {}
        for name, kind in compiled.kinds.items():
            if kind[0] == "*":
                arguments[name] = self.place_of(ctypes.c_uint64.from_address(next(places)).value)
            elif kind.startswith("tensordesc"):
                address, form = self.maps[next(places)]
                rank = len(form[1])
                shape = tuple(ctypes.c_int32.from_address(next(places)).value for _ in range(rank))
                strides = tuple(ctypes.c_int64.from_address(next(places)).value for _ in range(rank))
                arguments[name] = Map(self.place_of(address), form, shape, strides)
            else:
                arguments[name] = CELLS[kind].from_address(next(places)).value
        assert [ctypes.c_uint64.from_address(x).value for x in places] == [0, 0], (
            "scratch memory, of which there is none"
        )
        assert (config.threads_y, config.threads_z, extra) == (1, 1, None)
        early = False
        if config.count:
            attribute = CULaunchAttribute.from_address(config.attributes)
            early = (config.count, attribute.name, attribute.value) == (1, EARLY, 1)
        grid = (config.x, config.y, config.z)
        how_ = (config.threads, config.shared, early)
        self.add(compiled, grid, config.stream, arguments, by_address=True, how=how_)
        return 0

    @staticmethod
    def count(compiled: Compiled) -> int:
        """Arguments of a kernel as the driver counts them."""
        described = [name for name, kind in compiled.kinds.items() if kind.startswith("tensordesc")]
        return len(compiled.kinds) + sum(2 * len(compiled.given[name].shape) for name in described) + 2


def differences(want: Sequence[Launch], got: Sequence[Launch]) -> list[str]:
    """What a call's launches have wrong, beside those of the same call through Triton."""
    order = [[x.kernel for x in launches] for launches in (want, got)]
    if order[0] != order[1]:
        return [f"kernels {order[1]}, not {order[0]}"]
    found, workspaces = [], []
    for a, b in zip(want, got, strict=True):
        for name in ("compiled_for", "options", "grid", "threads", "shared", "early", "stream"):
            x, y = getattr(a, name), getattr(b, name)
            if x != y:
                found.append(f"{a.kernel}: {name} {y}, not {x}")
        if list(a.arguments) != list(b.arguments):
            found.append(f"{a.kernel}: arguments {list(b.arguments)}, not {list(a.arguments)}")
            continue
        for name, x in a.arguments.items():
            y, label = b.arguments[name], f"{a.kernel}: {name}"
            if isinstance(x, Map):
                for part in ("described", "shape", "strides"):
                    if getattr(x, part) != getattr(y, part):
                        found.append(f"{label} {part} {getattr(y, part)}, not {getattr(x, part)}")
                x, y = x.place, y.place
            if isinstance(x, Place) and x.kind == y.kind != INPUT:
                workspaces.append((label, x, y))
            elif x != y:
                found.append(f"{label} is {y}, not {x}")
    return found + misplaced(workspaces)


def misplaced(workspaces: Sequence[tuple[str, Place, Place]]) -> list[str]:
    """Workspaces at wrong places. What is one workspace through Triton is one by address: at the same offset, if both
    allocations have the same size, else with enough room that no other one overlaps.
    """
    found = []
    there, back, room = {}, {}, {}
    for label, x, y in workspaces:
        if UNKNOWN in (x.kind, y.kind):
            found.append(f"{label} is in no memory of the call")
        if there.setdefault(x.address, y.address) != y.address or back.setdefault(y.address, x.address) != x.address:
            found.append(f"{label} is another workspace")
        if x.aligned != y.aligned or (x.size == y.size and x.offset != y.offset):
            found.append(f"{label} is at offset {y.offset}, not {x.offset}")
        if y.offset + x.room > y.size:
            found.append(f"{label} has {y.size - y.offset} bytes, not {x.room}")
        room[x.address] = max(room.get(x.address, 0), x.room)
    for label, x, y in workspaces:
        for other, u, w in workspaces:
            if x.start != u.start and y.address <= w.address < y.address + room[x.address]:
                found.append(f"{label} overlaps {other}")
    return found


def install(monkeypatch: pytest.MonkeyPatch) -> LaunchRecorder:
    """A recorder in the place of Triton's launches and of the driver, with launchers of its own."""
    made = LaunchRecorder()

    def getitem(function: Any, grid: tuple[int, int]) -> Callable[..., Compiled]:
        return lambda **given: made.launch_through_triton(function, grid, given)

    take, zeros = semaphores.Semaphores.take, semaphores.Semaphores.zeros

    def kept_zeros(self: Any, sets: int, device: torch.device) -> list[torch.Tensor]:
        counters = zeros(self, sets, CPU)
        made.counters.append(counters)
        return counters

    assert not kernel.INTERPRETED
    monkeypatch.setattr(jit.KernelInterface, "__getitem__", getitem)
    monkeypatch.setattr(launch_program, "driver", lambda: made)
    monkeypatch.setattr(launch_program, "tensor_map_driver", lambda: made)
    monkeypatch.setattr(semaphores.Semaphores, "take", lambda self, device: take(self, GPU))
    monkeypatch.setattr(semaphores.Semaphores, "zeros", kept_zeros)
    monkeypatch.setattr(semaphores, "_kept", [])
    monkeypatch.setattr(semaphores, "Thread", NoThread)
    monkeypatch.setattr(merge, "_programs", {})
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(private, "current_device", lambda: made.device)
    monkeypatch.setattr(private, "current_stream", lambda index=None: STREAM)
    monkeypatch.setattr(private, "is_capturing", lambda: made.capturing)
    return made
