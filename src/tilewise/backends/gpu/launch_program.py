"""Launches are recorded once and replayed by address.

A launcher is plain code: it gets workspaces from a `Recorder` and launches kernels through it. The first call of a key
runs this code through Triton, which compiles. The recorder notes the kernels, grids and numbers, and of each pointer
which tensor of the call, workspace or counters it points into, and where. Later calls do not run the code: a
`LaunchProgram` puts their addresses in the places of the first ones and launches the same kernels through the driver.
This takes a fraction of the host time of launches through Triton, most of all with TMA descriptors.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ...core.forks import new_lock
from ...core.private import torch as private
from ...core.private.triton import INTERPRETED, launch_of
from ...core.storage import as_bytes
from .driver import NO_CONTEXT, check, driver, tensor_map_driver
from .kernel import Arguments, Kernel, KernelLaunch
from .semaphores import Semaphores, capturing

ALIGNMENT = 128  # of workspaces, in bytes
MOST = 1024  # programs of a launcher; they are cleared when it has more


class Origin(NamedTuple):
    """What a pointer points to: a tensor of the call or memory that it takes, by index, and how many bytes into it."""

    source: int
    offset: int


class Workspaces:
    """Memory for the launches of one call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def empty_like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def counters(self, semaphores: Semaphores) -> torch.Tensor:
        return semaphores.take(self.device)


class Recorder(Workspaces):
    """Launches through Triton and, if `recording`, notes what a `LaunchProgram` repeats.

    `tensors` are those of the call, as the launcher has to use them. Each has a storage of its own, which its views
    share: the same memory may be several tensors of a call, and others in the next one.
    """

    def __init__(self, given: Sequence[torch.Tensor], recording: bool, captured: bool) -> None:
        super().__init__(given[0].device)
        self.recording, self.in_capture = recording, captured
        self.asked = False  # whether the launches depend on `captured`
        self.tensors = [alias(x) for x in given] if recording else [*given]
        self.starts = {id_of(x): (source, x.data_ptr(), 0) for source, x in enumerate(self.tensors)}
        self.held: list[torch.Tensor] = []  # a storage that is gone could lend its id to another one
        self.semaphores: list[Semaphores] = []
        self.workspace_bytes = 0
        self.launches: list[tuple[Any, tuple[int, int], Arguments]] = []

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph is captured, whose launches run with the same memory each time."""
        self.asked = True
        return self.in_capture

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.workspace(super().empty(*shape, dtype=dtype))

    def empty_like(self, x: torch.Tensor) -> torch.Tensor:
        return self.workspace(super().empty_like(x))

    def workspace(self, made: torch.Tensor) -> torch.Tensor:
        """Notes a workspace. In a program all of them are parts of one allocation."""
        at = -(-self.workspace_bytes // ALIGNMENT) * ALIGNMENT
        self.workspace_bytes = at + max(1, made.untyped_storage().nbytes())
        self.held.append(made)
        self.starts[id_of(made)] = (-1, made.data_ptr(), at)
        return made

    def counters(self, semaphores: Semaphores) -> torch.Tensor:
        taken = super().counters(semaphores)
        self.starts[id_of(taken)] = (len(self.tensors) + len(self.semaphores), taken.data_ptr(), 0)
        self.held.append(taken)
        self.semaphores.append(semaphores)
        return taken

    def launch(self, kernel: Kernel, grid: tuple[int, int], given: Arguments) -> None:
        """Launches a kernel with its arguments from `given`."""
        taken = kernel.arguments(given)
        compiled = kernel.launch(grid, taken)
        if self.recording:
            self.launches.append((compiled, grid, taken))

    def origin(self, x: torch.Tensor) -> Origin:
        if (known := self.starts.get(id_of(x))) is None:
            raise RuntimeError("a kernel is launched on memory that is neither a tensor of the call nor a workspace")
        source, start, offset = known
        sources = len(self.tensors) + len(self.semaphores)
        return Origin(sources if source < 0 else source, x.data_ptr() - start + offset)


def alias(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor with a storage of its own."""
    own = torch.utils.dlpack.from_dlpack(as_bytes(x.detach()))
    return own.as_strided(x.shape, x.stride()).view(x.dtype)  # DLPack changes strides of dims of size 1


def id_of(x: torch.Tensor) -> int:
    """A number that the views of a tensor share with it."""
    return private.storage_of(x)


class LaunchProgram:
    """The launches of a call, as they were recorded: a later call has other addresses, and nothing else is different.

    The pointers of all kernels are in one array: the addresses of the call's tensors, counters and workspace, then
    `derived` ones, which are some bytes past one of the first.
    """

    def __init__(self, recorded: Recorder, captured: LaunchProgram | None = None) -> None:
        self.device, self.semaphores, self.captured = recorded.device, recorded.semaphores, captured
        self.workspace_bytes = recorded.workspace_bytes
        self.derived: list[Origin] = []
        self.sources = len(recorded.tensors) + len(self.semaphores)
        first = self.sources + (self.workspace_bytes > 0)
        kinds = [kind for compiled, _, _ in recorded.launches for kind in launch_of(compiled).kinds.values()]
        described = any(kind.startswith("tensordesc") for kind in kinds)
        self.driver = tensor_map_driver() if described else driver()
        self.memory = (ctypes.c_uint64 * (first + len(kinds)))()
        places = Places(recorded, self.memory, self.derived, first, self.driver)
        self.kernels = [KernelLaunch(*launch, places) for launch in recorded.launches]
        self.maps = [*places.maps.values()]
        self.pack = struct.Struct(f"={first + len(self.derived)}Q").pack_into
        self.launches = [kernel.arguments for kernel in self.kernels]
        self.launch, self.context = self.driver.launch, self.driver.context()
        self.stream: int | None = None
        self.lock = new_lock(self, "lock")  # launch parameters are in memory that all threads share

    def __call__(self, addresses: list[int]) -> None:
        """Launches with the call's tensors at these addresses, all of them aligned, on the current device."""
        if self.captured is not None and private.is_capturing():
            self.captured(addresses)
            return
        device = self.device
        stream = private.current_stream(device.index)
        for semaphores in self.semaphores:
            addresses.append(semaphores.address(stream, device))
        if self.workspace_bytes:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device)  # until all are queued
            addresses.append(workspace.data_ptr())
        for source, offset in self.derived:
            addresses.append(addresses[source] + offset)
        with self.lock:
            self.pack(self.memory, 0, *addresses)
            for move, at in self.maps:
                move(addresses[at])
            if stream != self.stream:
                self.stream = stream
                for kernel in self.kernels:
                    kernel.config.stream = stream
            for arguments in self.launches:
                if error := self.launch(*arguments):
                    self.launch_in_context(error, arguments)

    def launch_in_context(self, error: int, arguments: Any) -> None:
        """Launches a kernel again if that was the first launch of a new thread, which has no context."""
        if error == NO_CONTEXT:
            self.driver.set_context(self.context)
            error = self.launch(*arguments)
        check(error, "launched")


class Places:
    """Where a program's kernels find their pointers and tensor maps."""

    def __init__(self, recorded: Recorder, memory: Any, derived: list[Origin], first: int, cuda: Any) -> None:
        self.recorded, self.derived, self.first, self.driver = recorded, derived, first, cuda
        self.start = ctypes.addressof(memory)
        self.maps: dict[Hashable, tuple[Callable[[int], None], int]] = {}
        self.made: dict[Hashable, Any] = {}

    def index(self, x: torch.Tensor) -> int:
        """The index of a tensor's address in the program's memory."""
        origin = self.recorded.origin(x)
        if not origin.offset:
            return origin.source
        if origin not in self.derived:
            self.derived.append(origin)
        return self.first + self.derived.index(origin)

    def pointer(self, x: torch.Tensor) -> int:
        return self.start + 8 * self.index(x)

    def tensor_map(self, like: Any, form: dict[str, Any]) -> int:
        """The place of a tensor's map. Kernels share maps that describe the same."""
        from .tensor_map import TensorMap

        at = self.index(like.base)
        key = (at, tuple(like.shape), tuple(like.strides), *(str(x) for x in form.items()))
        if key not in self.made:
            made = self.made[key] = TensorMap(like, form, self.driver)
            self.maps[key] = made.move, at
        place: int = self.made[key].at
        return place


def launch_and_record(
    launch: Callable[[Recorder, list[torch.Tensor]], None],
    given: Sequence[torch.Tensor],
    programs: dict[Any, LaunchProgram],
    key: Hashable | None,
) -> None:
    """Runs a launcher's code on the tensors `given`. With `key`, what later calls repeat is put into `programs`: not
    during a graph capture, and not on AMD's GPUs, whose driver is another one.
    """
    with nullcontext() if INTERPRETED else torch.cuda.device(given[0].device):
        captured = not INTERPRETED and capturing()
        recording = key is not None and not captured and torch.version.cuda is not None
        recorder = Recorder(given, recording, captured)
        launch(recorder, recorder.tensors)
        if not recording:
            return
        apart = None
        if recorder.asked:  # so that a graph capture finds it compiled
            other = Recorder(given, recording, captured=True)
            launch(other, other.tensors)
            apart = LaunchProgram(other)
        if len(programs) >= MOST:
            programs.clear()
        programs[key] = LaunchProgram(recorder, apart)
