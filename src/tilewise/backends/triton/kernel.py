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


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Triton has no bool in memory, and not every GPU has float8: both are read as bytes."""
    return x.view(torch.uint8) if x.dtype in (torch.bool, torch.float8_e4m3fn) else x


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
    """A compiled kernel with all arguments in place but for its stream and its pointers."""

    def __init__(self, compiled: Any, grid: tuple[int, int], order: list[Any]) -> None:
        run = compiled.run
        # Triton's own launch, less its look at every argument.
        self.launch = run.launch
        head = [
            *grid, 1, None, compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
            compiled.packed_metadata, None, None, None,
        ]  # fmt: skip
        self.stream = head.index(None)
        self.pointers = [len(head) + i for i, x in enumerate(order) if isinstance(x, torch.Tensor)]
        self.arguments = head + [None if isinstance(x, torch.Tensor) else x for x in order]

    def __call__(self, addresses: Sequence[int]) -> None:
        arguments = self.arguments.copy()
        for i, address in zip(self.pointers, addresses, strict=True):
            arguments[i] = address
        arguments[self.stream] = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        self.launch(*arguments)
