"""A Triton or Gluon kernel, launched through Triton once and by addresses from then on.

A launch by address takes a fraction of the host time of one through Triton, most of all with TMA descriptors.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...core.forks import new_lock
from ...core.private import torch as private
from ...core.private.triton import INTERPRETED, launch_of
from ...core.tensors import FIELDS, Tensors
from .driver import CELLS, EARLY, NO_CONTEXT, CULaunchAttribute, CULaunchConfig, check, driver, tensor_map_driver

if TYPE_CHECKING:
    from .tensor_map import TensorMap

Arguments = dict[str, Any]
# Without fused multiply-adds the same expression gives the same bits in every loop of a kernel.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def stride_arguments(name: str, dims: str, x: torch.Tensor | None, grain: int = 1) -> Arguments:
    """`q_b`, `q_h` and so on: strides of a tensor's first dims in units of `grain`; 0 for an absent tensor."""
    strides = (0,) * len(dims) if x is None else x.stride()
    return {f"{name}_{dim}": stride // grain for dim, stride in zip(dims, strides, strict=False)}


def is_aligned(addresses: Sequence[int], device: torch.device) -> bool:
    """Whether kernels that were compiled for aligned tensors can be launched for these on the current device."""
    either = 0
    for address in addresses:
        either |= address
    return either & 15 == 0 and private.current_device() == device.index


def key_of(k: torch.Tensor, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What launches of a plan differ in besides addresses: strides, and the number of rows or pages of keys."""
    return (k.shape, *[x.stride() for x in given])


class AddressLauncher:
    """Launches of a plan: a call with new strides goes through Triton, others by address.

    A subclass has SOURCES, the names of its kernels' tensors with the fields of `Tensors` in their order, and two
    methods. `compile_and_launch(t, key)` launches through Triton and, with a key, stores in `ready` what later calls
    need. `relaunch(ready, addresses, device)` launches by the addresses of the tensors in `names`, and takes what
    `launch_key` returns after the key.
    """

    SOURCES: ClassVar[dict[str, str]]
    compile_and_launch: Callable[[Tensors, Any], None]
    relaunch: Callable[..., None]

    def __init_subclass__(cls) -> None:
        fields = list(cls.SOURCES.values())
        assert fields == [name for name in FIELDS if name in fields], "`bind_addresses` passes addresses in this order"

    def __init__(self) -> None:
        self.present: Any = None
        self.names: list[str] = []
        self.ready: dict[Any, Any] = {}
        self.lock = new_lock(self, "lock")  # launch parameters are in memory that all threads share

    def __call__(self, t: Tensors) -> None:
        key = None
        if not INTERPRETED:
            if self.present is None:
                self.find_names(t)
                self.present = attrgetter(*[self.SOURCES[name] for name in self.names])  # last, for other threads
            given = self.present(t)
            addresses = [x.data_ptr() for x in given]
            if is_aligned(addresses, t.q.device):
                key, *more = self.launch_key(t, given)
                if (ready := self.ready.get(key)) is not None:
                    self.relaunch(ready, addresses, t.q.device, *more)
                    return
        with nullcontext() if INTERPRETED else torch.cuda.device(t.q.device):
            self.compile_and_launch(t, key)

    def find_names(self, t: Tensors) -> None:
        """Sets `names`, of the tensors that the plan's calls have."""
        self.names = [name for name, source in self.SOURCES.items() if getattr(t, source) is not None]

    def launch_key(self, t: Tensors, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The key of a call in `ready`, None if it always goes through Triton; then more arguments of `relaunch`."""
        return (key_of(t.k, given) if t.tile_map is None else None,)


def bind_addresses(launcher: Any, t: Tensors) -> Callable[..., None]:
    """A function that launches a plan (`launcher`) for tensors that differ from those in `t` only in their addresses,
    and are all aligned if those are.

    It takes tensors in the order of FIELDS; None is skipped.
    """
    device, index = t.q.device, t.q.device.index
    there = {name: getattr(t, name) for name in FIELDS}
    forms = [(name, x.shape, x.stride()) for name, x in there.items() if x is not None]
    given = [x for x in there.values() if x is not None]
    key = None if any(x.data_ptr() & 15 for x in given) else key_of(t.k, given)
    ready = launcher.ready.get(key)

    def launch(*tensors: torch.Tensor | None) -> None:
        nonlocal ready
        addresses = [x.data_ptr() for x in tensors if x is not None]
        if ready is not None and private.current_device() == index:
            launcher.relaunch(ready, addresses, device)
            return
        given = [x for x in tensors if x is not None]
        views: Arguments = {form[0]: x.as_strided(*form[1:]) for form, x in zip(forms, given, strict=True)}
        launcher(Tensors(**views))
        ready = launcher.ready.get(key)

    return launch


class Kernel:
    """A kernel with its compile-time arguments and options."""

    def __init__(self, function: Any, constants: Arguments | None = None, cuda: Any = None, **options: Any) -> None:
        self.function, self.constants, self.cuda = function, constants or {}, cuda
        self.options = OPTIONS | options

    def arguments(self, given: Arguments) -> Arguments:
        """All arguments of the kernel: those in `given`, and compile-time ones."""
        given = given | self.constants
        return {name: given[name] for name in self.function.arg_names}

    def launch(self, grid: tuple[int, int], taken: Arguments) -> Any:
        """Launches through Triton, which compiles if needed; returns the compiled kernel."""
        return self.function[grid](**taken, **({} if INTERPRETED else self.options))

    def compile_and_launch(
        self, grid: tuple[int, int], given: Arguments, maps: dict[Any, TensorMap] | None = None
    ) -> CompiledLaunch | None:
        """Launches through Triton, which compiles if needed, with the kernel's arguments from `given`; returns what
        later launches by address need, or None if there are none.

        `maps`: tensor maps of kernels that are launched together, by name and block; this kernel's are added.
        """
        given = given | self.constants
        taken = {name: given[name] for name in self.function.arg_names}
        if INTERPRETED:
            self.function[grid](**taken)
            return None
        compiled = self.function[grid](**taken, **self.options)
        if torch.version.cuda is None and self.cuda is None:
            return None
        return CompiledLaunch(compiled, grid, taken, self.cuda, {} if maps is None else maps)


class KernelLaunch:
    """A compiled kernel with all arguments in place, to be launched through the driver as Triton does, but without
    inspecting each argument, most of which are compile-time ones.

    `places` says where pointers and tensor maps are: `pointer(tensor)`, `tensor_map(descriptor, form)`.
    """

    def __init__(self, compiled: Any, grid: tuple[int, int], given: Arguments, places: Any) -> None:
        of = launch_of(compiled)
        self.cells: list[Any] = [ctypes.c_uint64(0)]  # the first: two more arguments of every kernel, unused
        forms = iter(of.forms)
        found: list[int] = []
        for name, kind in of.kinds.items():
            if kind[0] == "*":
                found.append(places.pointer(given[name]))
                continue
            if kind.startswith("tensordesc"):
                like = given[name]
                found.append(places.tensor_map(like, next(forms)))
                cells = [*map(ctypes.c_int32, like.shape), *map(ctypes.c_int64, like.strides)]
            else:
                cells = [CELLS[kind](given[name])]
            found += [ctypes.addressof(cell) for cell in cells]
            self.cells += cells
        nothing = ctypes.addressof(self.cells[0])
        self.parameters = (ctypes.c_void_p * (len(found) + 2))(*found, nothing, nothing)
        self.early = CULaunchAttribute(EARLY, 0, 1)
        early = (ctypes.addressof(self.early), 1) if of.early else (None, 0)
        self.config = CULaunchConfig(*grid, 1, 32 * of.warps, 1, 1, of.shared, None, *early)
        self.compiled = compiled  # keeps the code that is launched
        config, parameters = ctypes.addressof(self.config), ctypes.addressof(self.parameters)
        self.arguments = (config, of.function, parameters, None)


class CompiledLaunch:
    """A compiled kernel with all arguments in place except its stream and its pointers.

    It is launched through the driver as Triton does, but without inspecting each argument, most of which are
    compile-time ones. The caller updates the tensor maps, one call at a time.
    """

    def __init__(
        self, compiled: Any, grid: tuple[int, int], given: Arguments, cuda: Any = None,
        maps: dict[Any, TensorMap] | None = None,
    ) -> None:  # fmt: skip
        of = launch_of(compiled)
        kinds = of.kinds
        self.pointers = [name for name, kind in kinds.items() if kind[0] == "*"]
        self.pack = struct.Struct(f"={len(self.pointers)}Q").pack_into
        self.addresses = (ctypes.c_uint64 * len(self.pointers))()
        pointer_at = {name: ctypes.addressof(self.addresses) + 8 * i for i, name in enumerate(self.pointers)}
        described = any(kind.startswith("tensordesc") for kind in kinds.values())
        self.driver = cuda or (tensor_map_driver() if described else driver())
        self.cells: list[Any] = [ctypes.c_uint64(0)]  # the first: two more arguments of every kernel, unused
        self.maps = {} if maps is None else maps
        forms = iter(of.forms)
        places: list[int] = []
        for name, kind in kinds.items():
            if kind[0] == "*":
                places.append(pointer_at[name])
                continue
            if kind.startswith("tensordesc"):
                like = given[name]
                places.append(self.map_of(name, like, next(forms)).at)
                cells = [*map(ctypes.c_int32, like.shape), *map(ctypes.c_int64, like.strides)]
            else:
                cells = [CELLS[kind](given[name])]
            places += [ctypes.addressof(cell) for cell in cells]
            self.cells += cells
        nothing = ctypes.addressof(self.cells[0])
        self.parameters = (ctypes.c_void_p * (len(places) + 2))(*places, nothing, nothing)
        self.early = CULaunchAttribute(EARLY, 0, 1)
        early = (ctypes.addressof(self.early), 1) if of.early else (None, 0)
        self.launch_config = CULaunchConfig(*grid, 1, 32 * of.warps, 1, 1, of.shared, None, *early)
        self.compiled = compiled  # keeps the code that is launched
        config, parameters = ctypes.addressof(self.launch_config), ctypes.addressof(self.parameters)
        self.arguments = (config, of.function, parameters, None)
        self.launch = self.driver.launch
        self.context = self.driver.context()
        self.lock = new_lock(self, "lock")

    def map_of(self, name: str, like: Any, form: dict[str, Any]) -> TensorMap:
        """The tensor map of an argument."""
        from .tensor_map import TensorMap

        key = (name, tuple(form["block_size"]))
        if key not in self.maps:
            self.maps[key] = TensorMap(name, like, form, self.driver)
        return self.maps[key]

    def __call__(self, addresses: Sequence[int], stream: int | None = None) -> None:
        """Launches with these addresses, in the order of `pointers`."""
        if stream is None:
            stream = private.current_stream(private.current_device())
        with self.lock:  # launch parameters are in memory that all threads share
            self.pack(self.addresses, 0, *addresses)
            self.launch_config.stream = stream
            error = self.launch(*self.arguments)
            if error == NO_CONTEXT:  # the first launch of a new thread
                self.driver.set_context(self.context)
                error = self.launch(*self.arguments)
        if error:
            check(error, "launched")
