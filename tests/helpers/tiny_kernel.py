"""A CPU kernel that takes no time to compile, and what is seen of compiling it."""

import numpy as np
import pytest

from tilewise.backends.cpu import object_code
from tilewise.backends.cpu.codegen.load_store import get_i64, put_i64


def adding(adds):
    def tiny(address):
        put_i64(address, get_i64(address) + adds)

    return tiny


def run_tiny(kernel):
    """What it makes of 41."""
    number = np.array([41])
    kernel.entry(number.ctypes.data)
    return int(number[0])


def no_compiler(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("compiled again")

    monkeypatch.setattr(object_code, "compile_linked", refuse)


def said():
    """The warnings of this package that a block raises."""
    return pytest.warns(RuntimeWarning, match="tilewise: ")
