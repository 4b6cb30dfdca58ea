"""Calls whose kernels are Hopper's own, by name, and the kernels that they launch with their arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[1] / "backends/hopper"))

import hopper_aot
import test_hopper_aot
import test_hopper_backward
import test_hopper_wide_backward
import test_mla
from tilewise.backends.gpu.kernel import OPTIONS, Kernel
from tilewise.core.problem import Problem

Launches = list[tuple[Kernel, dict[str, Any]]]


def prefill(p: Problem) -> Launches:
    """What `hopper_aot` would compile."""
    found: Launches = []

    def build(function: Any, given: Any, constants: Any, ptxas: str = "", options: Any = OPTIONS) -> Any:
        found.append((Kernel(function, {name: given[name] for name in constants}, **options), given))
        return SimpleNamespace()

    with patch.object(hopper_aot, "build", build):
        hopper_aot.kernels_of(p)
    return found


def backward(p: Problem) -> Launches:
    _, given = test_hopper_backward.given(p)
    return [(Kernel(test_hopper_backward.backward, {"S": given["S"]}), given)]


def wide_backward(p: Problem) -> Launches:
    bound, tensors = test_hopper_wide_backward.given(p)
    made = [bound.arguments(tensors) | bound.own(tensors, s) for s in bound.specs]
    return [(Kernel(test_hopper_wide_backward.wide_backward, {"S": given["S"]}), given) for given in made]


def latent(given: dict[str, Any]) -> Launches:
    return [(Kernel(test_mla.latent_decode, {"S": given["S"]}), given)]


def cases() -> dict[str, Callable[[], Launches]]:
    """The commonest first."""
    named = {name: p for name, (p, _) in (test_hopper_aot.HOT | test_hopper_aot.MORE).items()} | test_hopper_aot.OTHERS
    found: dict[str, Callable[[], Launches]] = {f"hopper {n}": lambda p=p: prefill(p) for n, p in named.items()}
    for n, p in enumerate(test_hopper_backward.PROBLEMS):
        found[f"hopper backward {n}, D{p.head_dim}"] = lambda p=p: backward(p)
    for n, p in enumerate(test_hopper_wide_backward.PROBLEMS):
        found[f"hopper backward {n}, D{p.head_dim} wide"] = lambda p=p: wide_backward(p)
    found["hopper latent"] = lambda: latent(test_mla.arguments()[1])
    found["hopper latent few rows"] = lambda: latent(test_mla.arguments(heads=16)[1])
    for name, options in {"": {"paged": False, "lengths": False}, " pages": {}, " fp8": {"fp8": True}}.items():
        by = options
        found[f"hopper latent indices{name}"] = lambda by=by: latent(
            test_mla.arguments_by_indices(test_mla.chosen(**by))
        )
    return found
