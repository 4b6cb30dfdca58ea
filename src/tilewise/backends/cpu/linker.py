"""Loads a kernel's object file into this process by LLVM's loader: nothing is compiled, and Numba is not needed.

An object file defines the kernel as a C function by its name, and `<name>.entry`, which Python calls.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import llvmlite.binding as llvm

from .isa import machine

ENTRY = ".entry"
METH_FASTCALL = 0x0080  # of Python's stable ABI: (self, arguments, their number)


class Kernel(NamedTuple):
    """A compiled function: its C address, and a Python callable that converts its own arguments.

    ctypes would convert them one by one: see cpu 14 in benchmarks/cpu/LOG.md.
    """

    address: int
    entry: Any


class MethodDef(ctypes.Structure):
    """Python's `PyMethodDef`."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


@cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def load(code: bytes) -> Any:
    """An engine with the code of an object file, which is freed with it."""
    _initialize()
    triple = llvm.get_process_triple()
    target = llvm.Target.from_triple(triple).create_target_machine(codemodel="jitdefault", jit=True)
    empty = llvm.parse_assembly("")
    empty.triple = triple
    # On AArch64 sections must be close to each other, which llvmlite's memory manager ensures.
    engine = llvm.create_mcjit_compiler(empty, target, use_lmm=machine() == "aarch64")
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def link(code: bytes, name: str) -> Kernel:
    """Loads an object file in an engine of its own, which is freed with the entry."""
    engine = load(code)
    method = MethodDef(name.encode(), engine.get_function_address(name + ENTRY), METH_FASTCALL, None)
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
        ("PyCFunction_NewEx", ctypes.pythonapi)
    )
    return Kernel(engine.get_function_address(name), new(ctypes.addressof(method), (engine, method), None))
