"""`compile_shader`, with the rules of torch.mps.compile_shader, over tensors on the CPU."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from mslsim import arguments, build
from mslsim.arguments import Memory
from mslsim.faults import Fault, Report, fault
from mslsim.text import Kernel, Parameter
from mslsim.unwritten import marks


@dataclass
class Options:
    """How kernels of a library are executed. `seed` changes the order of groups, simdgroups and lanes; 0 is the natural
    one. Change them between calls as you like: nothing is compiled again."""

    seed: int = 0
    hostile_layout: bool = False
    races: bool = True
    workers: int = 1
    max_threads: int = 1024
    shared_limit: int = 32768


class _Region(ctypes.Structure):
    _fields_ = (
        ("host", ctypes.c_void_p),
        ("bytes", ctypes.c_ulong),
        ("phase", ctypes.c_ulong),
        ("unit", ctypes.c_uint),
        ("writable", ctypes.c_uint),
        ("written", ctypes.c_void_p),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (("region", ctypes.c_int), ("offset", ctypes.c_ulong))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("regions", ctypes.POINTER(_Region)),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("region_count", ctypes.c_uint),
        ("buffer_count", ctypes.c_uint),
        ("threads", ctypes.c_uint * 3),
        ("group", ctypes.c_uint * 3),
        ("seed", ctypes.c_ulong),
        ("workers", ctypes.c_uint),
        ("hostile_layout", ctypes.c_uint),
        ("races", ctypes.c_uint),
        ("shared_limit", ctypes.c_uint),
    )


@dataclass
class _Span:
    """Memory of the host that becomes one region of the device's: of one buffer, or of several that overlap."""

    start: int
    end: int
    phase: int
    unit: int
    writable: bool
    members: list[int]


def _regions(memories: list[Memory], kernel: Kernel) -> list[_Span]:
    """One for each buffer, except that a buffer which is written shares its own with those that overlap it."""
    described = {p.index: p for p in kernel.parameters if p.index is not None}
    spans: list[_Span] = []
    for i, m in enumerate(memories):
        p = described.get(i)
        unit = min(4, (p.unit & -p.unit) or 1) if p else 1
        new = _Span(m.address, m.address + m.bytes, m.phase, unit, bool(p and p.writable), [i])
        for old in [s for s in spans if s.start < new.end and new.start < s.end and (s.writable or new.writable)]:
            spans.remove(old)
            first = old if old.start < new.start else new
            new = _Span(
                first.start,
                max(old.end, new.end),
                first.phase,
                min(old.unit, new.unit),
                True,
                sorted(old.members + new.members),
            )
        spans.append(new)
    return spans


def _sizes(what: str, value: int | Sequence[int]) -> list[int]:
    sizes = [value] if isinstance(value, int) else [int(v) for v in value]
    if not 1 <= len(sizes) <= 3:
        raise RuntimeError(f"{what}: wanted one to three numbers, got {value}")
    if min(sizes) < 1:
        raise RuntimeError(f"{what}: {value} is empty")
    return sizes


class KernelFunction:
    """A kernel of a library, to be called."""

    def __init__(self, library: "Library", kernel: Kernel) -> None:
        self._library, self._kernel = library, kernel

    @property
    def max_threads_per_threadgroup(self) -> int:
        return min(self._library.options.max_threads, self._kernel.max_threads or 1024)

    @property
    def thread_execution_width(self) -> int:
        return 32

    @property
    def static_thread_group_memory_length(self) -> int:
        return self._kernel.shared_bytes

    def __call__(
        self,
        *args: Any,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: str | Mapping[int, str] | None = None,
    ) -> None:
        kernel = self._kernel
        memories = [arguments.of(i, x, arg_casts) for i, x in enumerate(args)]
        for p in kernel.parameters:
            if p.index is not None and p.index >= len(memories):
                raise Fault(
                    f"{kernel.name}, line {kernel.line}: unbound: buffer({p.index}) {p.name} gets no argument, "
                    f"there are {len(memories)}",
                    "unbound",
                    kernel.line,
                )
        if threads is None:
            threads = next((m.numel for m in memories if m.numel is not None), None)
            if threads is None:
                raise RuntimeError("threads: not given, and no tensor to take the number from")
        grid = _sizes("threads", threads)
        most = self.max_threads_per_threadgroup
        group = _sizes(
            "group_size", group_size if group_size is not None else [min(most, grid[0])] + [1] * (len(grid) - 1)
        )
        if len(group) != len(grid):
            raise RuntimeError(f"group_size: {group} has another rank than threads, {grid}")
        if prod(group) > most:
            raise ValueError(f"group_size: {group} are {prod(group)} threads, more than {most} of {kernel.name}")
        self._library._launch(kernel, memories, grid, group)


class Library:
    """What compile_shader gives: its kernels are attributes."""

    def __init__(self, source: str, options: Options, defines: tuple[str, ...]) -> None:
        self.options = options
        self._source = source
        self._code, self._path, kernels = build.build(source, defines)
        self._kernels = {k.name: k for k in kernels}

    def __dir__(self) -> list[str]:
        return list(self._kernels)

    def __getattr__(self, name: str) -> KernelFunction:
        if name.startswith("_") or name not in self._kernels:
            raise AttributeError(f"no kernel {name!r}; there are {', '.join(self.__dict__.get('_kernels', {}))}")
        return KernelFunction(self, self._kernels[name])

    def _launch(self, kernel: Kernel, memories: list[Memory], grid: list[int], group: list[int]) -> None:
        spans = _regions(memories, kernel)
        regions = (_Region * max(1, len(spans)))()
        buffers = (_Buffer * max(1, len(memories)))()
        kept = []
        for r, s in enumerate(spans):
            written = marks(s.start, s.end)
            kept.append(written)
            pointer = written.ctypes.data if written is not None else None
            regions[r] = _Region(s.start, s.end - s.start, s.phase, s.unit, s.writable, pointer)
            for i in s.members:
                buffers[i] = _Buffer(r, memories[i].address - s.start)
        o = self.options
        pad = [1] * (3 - len(grid))
        launch = _Launch(
            ctypes.cast(getattr(self._code, f"mslsim_enter_{kernel.name}"), ctypes.c_void_p),
            regions,
            buffers,
            len(spans),
            len(memories),
            (ctypes.c_uint * 3)(*grid, *pad),
            (ctypes.c_uint * 3)(*group, *pad),
            o.seed,
            o.workers,
            o.hostile_layout,
            o.races,
            o.shared_limit,
        )
        report = Report()
        if build.runtime()[1].mslsim_launch(ctypes.byref(launch), ctypes.byref(report)):
            described = {p.index: p for p in kernel.parameters}
            known = [[described[i] for i in s.members if i in described] for s in spans]
            raise fault(report, self._source, self._path, kernel, [_named(k) for k in known])


def _named(buffers: list[Parameter]) -> tuple[str, int]:
    """Of a region: the buffers in it, and the bytes of an element."""
    return " = ".join(f"{p.name} (buffer {p.index})" for p in buffers), max([p.unit for p in buffers], default=0) or 1


def compile_shader(
    source: str,
    *,
    seed: int = 0,
    hostile_layout: bool = False,
    races: bool = True,
    workers: int = 1,
    max_threads: int = 1024,
    shared_limit: int = 32768,
    mixed_matrices: bool = False,
) -> Library:
    """The library of an MSL text. `mixed_matrices` lets simdgroup matrices of several types be multiplied."""
    options = Options(seed, hostile_layout, races, workers, max_threads, shared_limit)
    return Library(source, options, ("MSLSIM_MIXED_MATRICES",) if mixed_matrices else ())
