"""Mistakes that the simulator finds, in words."""

import ctypes
from pathlib import Path

from mslsim.build import lines_of
from mslsim.text import Kernel

# In the order of runtime/memory.h.
KINDS = (
    "none race uninitialised bounds divergence unbound size read_only pointer uniform partial arithmetic "
    "alignment setup"
).split()
_IS_LINE = 0x80000000
_TOGETHER = 0x8000


class Fault(RuntimeError):
    """A mistake in a kernel: its `kind`, the `line` of the text, and of a race the `other_line`."""

    def __init__(self, text: str, kind: str, line: int = 0, other_line: int = 0) -> None:
        super().__init__(text)
        self.kind, self.line, self.other_line = kind, line, other_line


class Report(ctypes.Structure):
    """As in runtime/memory.h."""

    _fields_ = (
        ("fault", ctypes.c_int),
        ("memory", ctypes.c_int),
        ("slot", ctypes.c_int),
        ("write", ctypes.c_int),
        ("where", ctypes.c_uint),
        ("other_where", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("size", ctypes.c_ulong),
        ("extent", ctypes.c_ulong),
        ("thread", ctypes.c_uint),
        ("other_thread", ctypes.c_uint),
        ("group", ctypes.c_uint * 3),
        ("linear_group", ctypes.c_uint),
        ("other_group", ctypes.c_uint),
        ("other_write", ctypes.c_int),
        ("unit", ctypes.c_uint),
        ("name", ctypes.c_char * 64),
        ("text", ctypes.c_char * 256),
    )


def _lines(report: Report, library: Path) -> tuple[int, int]:
    places = [report.where, report.other_where]
    offsets = [p for p in places if p and not p & _IS_LINE]
    found = dict(zip(offsets, lines_of(library, offsets), strict=True)) if offsets else {}
    here, there = (p & ~_IS_LINE if p & _IS_LINE else found.get(p, 0) for p in places)
    return here, there


def _who(thread: int) -> str:
    return f"simdgroup {thread & ~_TOGETHER}" if thread & _TOGETHER else f"thread {thread}"


def fault(report: Report, source: str, library: Path, kernel: Kernel, regions: list[tuple[str, int]]) -> Fault:
    """`regions` of device memory: their names and the bytes of an element."""
    line, other_line = _lines(report, library)
    kind = KINDS[report.fault]
    rows = source.splitlines()

    def quoted(number: int) -> str:
        return f"line {number} `{rows[number - 1].strip()}`" if 0 < number <= len(rows) else "a line unknown"

    memory, unit = "", 1
    if report.memory:
        name, unit = (report.name.decode(), report.unit) if report.memory == 1 else regions[report.slot]
        memory = f"{name}[{report.offset // unit}{'' if report.size <= unit else ' ...'}]"
    verb = "writes" if report.write else "reads"
    text = report.text.decode()
    who = f"thread {report.thread} of group {tuple(report.group)}"
    if kind == "race":
        what = "wrote" if report.other_write else "read"
        between = "no barrier with its mem_flags between them"
        other = _who(report.other_thread)
        if report.other_group != report.linear_group:
            other, between = f"{other} of another group", "groups have no order"
        detail = f"{verb} {memory}, which {other} {what} at {quoted(other_line)}: {between}"
    elif kind == "uninitialised":
        detail = f"reads {memory}, which nothing has written"
    elif kind == "bounds" and memory:
        detail = f"{verb} {memory}, which has {report.extent // unit} elements"
    elif kind == "read_only":
        detail = f"writes {memory}, which the kernel has as constant"
    elif kind == "pointer":
        detail = f"{verb} through a pointer into no memory of the kernel's ({text})"
    else:
        detail = text
    return Fault(f"{kernel.name}, {quoted(line)}: {kind}: {detail} ({who})", kind, line, other_line)
