"""Executes Metal kernels on the CPU and finds their mistakes. See README.md."""

from mslsim.build import why_not
from mslsim.faults import Fault
from mslsim.library import KernelFunction, Library, Options, compile_shader
from mslsim.mutants import Barrier, barriers, mutate
from mslsim.unwritten import unwritten

__all__ = [
    "Barrier",
    "Fault",
    "KernelFunction",
    "Library",
    "Options",
    "barriers",
    "compile_shader",
    "mutate",
    "unwritten",
    "why_not",
]
