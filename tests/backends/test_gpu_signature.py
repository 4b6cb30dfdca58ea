"""Kernels' signatures are made from the one declaration of their arguments."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from tilewise.backends.gpu.signature import kernel_of
from tilewise.backends.triton import arguments, fwd_kernel
from tilewise.core.mask_rules import RULE_NUMBERS


def made(function, do_not_specialize):
    return SimpleNamespace(function=function, plain=do_not_specialize)


@kernel_of(["q", "n", "rules"], ["n", "rules"], made)
def body(a, S):
    return a.q + a.n, a.rules, S


def test_a_body_reads_the_arguments_that_its_kernel_takes():
    function, plain = body.function, body.plain
    assert list(inspect.signature(function).parameters) == ["q", "n", *RULE_NUMBERS, "S"]
    assert plain == ["n", *RULE_NUMBERS]
    rules = tuple(range(len(RULE_NUMBERS)))
    assert function(1, 2, *rules, "spec") == (3, rules, "spec")


def test_lines_keep_their_numbers():
    text = Path(__file__).read_text().splitlines()
    assert text[body.function.__code__.co_firstlineno - 1] == "def body(a, S):"


def test_the_forward_kernel_takes_what_is_declared():
    names = [other for name in arguments.NAMES for other in (RULE_NUMBERS if name == "rules" else [name])]
    assert fwd_kernel.fwd_kernel.arg_names == [*names, "S"]
