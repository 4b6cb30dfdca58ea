"""Executes Metal kernels on the CPU and finds their mistakes. See README.md."""

from mslsim.build import why_not
from mslsim.faults import Fault
from mslsim.library import KernelFunction, Library, Options, compile_shader
from mslsim.unwritten import unwritten

__all__ = ["Fault", "KernelFunction", "Library", "Options", "compile_shader", "unwritten", "why_not"]
