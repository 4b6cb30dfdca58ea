"""A Triton kernel, launched through Triton once and by addresses from then on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

Arguments = dict[str, Any]
INTERPRETED = triton.knobs.runtime.interpret
# Without fused multiply-adds the same expression gives the same bits in every loop of a kernel.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


class Kernel:
    """A Triton kernel with its compile-time arguments."""

    def __init__(self, function: Any, constants: Arguments, **options: Any) -> None:
        self.function, self.constants, self.options = function, constants, OPTIONS | options

    def first(self, grid: tuple[int, int], given: Arguments) -> Ready | None:
        """Launches through Triton, which compiles if it must; returns what later launches need."""
        if INTERPRETED:
            self.function[grid](**given, **self.constants)
            return None
        compiled = self.function[grid](**given, **self.constants, **self.options)
        order = [(given | self.constants)[name] for name in self.function.arg_names]
        return Ready(compiled, grid, order)


class Ready:
    """A compiled kernel with all arguments in place but for its pointers."""

    def __init__(self, compiled: Any, grid: tuple[int, int], order: list[Any]) -> None:
        run = compiled.run
        # Triton's own launch, less its look at every argument.
        self.launch = run.launch
        self.head = (*grid, 1)
        self.kernel = (
            compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata,
            None, None, None,
        )  # fmt: skip
        self.pointers = [i for i, x in enumerate(order) if isinstance(x, torch.Tensor)]
        self.rest = order[len(self.pointers) and self.pointers[-1] + 1 :]
        self.front: list[Any] = [None] * (len(order) - len(self.rest))

    def __call__(self, addresses: Sequence[int]) -> None:
        front = self.front.copy()
        for i, address in zip(self.pointers, addresses, strict=True):
            front[i] = address
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        self.launch(*self.head, stream, *self.kernel, *front, *self.rest)
