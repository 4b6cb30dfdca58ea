"""Ahead-of-time compilation of the Gluon kernels that a problem needs, on a machine without a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from aot import Signature, tensors_of
from assembler import Assembled, assembled, disassembled
from tilewise.backends.gpu.block_sparsity import list_blocks
from tilewise.backends.gpu.kernel import OPTIONS
from tilewise.backends.gpu.launch_program import Workspaces
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.gpu.varlen_order import rank_sequences
from tilewise.backends.hopper.fwd import config
from tilewise.backends.hopper.fwd.kernel import fwd_kernel
from tilewise.backends.hopper.fwd.launch import ORDER_RUN, Launcher
from tilewise.core.problem import Problem


@dataclass
class Built(Assembled):
    spec: Any = None
    dynamic: bool = False

    @property
    def barrier_places(self) -> list[int]:
        """Where in shared memory mbarriers are set up."""
        found = re.findall(r"SYNCS\.EXCH\.64 URZ, \[UR\d+(?:\+0x([0-9a-f]+))?\]", self.sass)
        return sorted(int(coord or "0", 16) for coord in found)

    @property
    def loops(self) -> list[list[str]]:
        """The loops that multiply matrices, without those around them."""
        code, spans = disassembled(self.sass)
        # Behind the end of the code lie repeated waits, which go back into it.
        spans = [
            (a, b) for a, b in spans
            if any("HGMMA" in x for x in code[a:b]) and not any("EXIT" in x for x in code[a:b])
        ]  # fmt: skip
        inner = [s for s in spans if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
        return [code[a:b] for a, b in inner]


def build(
    function: Any, given: dict[str, Any], constants: tuple[str, ...], ptxas: str = "", options: Any = OPTIONS
) -> Built:
    """Compiles as a launch with these arguments would, with one of Triton's two ptxas."""
    source = GluonASTSource if function.is_gluon() else ASTSource
    made = assembled(Signature.of(function, given, constants).source(source, function), 90, options, ptxas)
    assert not (dead := dead_barriers(made.ttgir)), f"barriers that nobody waits at: {dead}"
    return Built(**vars(made))


def dead_barriers(ttgir: str) -> list[str]:
    """mbarriers that are set up and not used. The compiler lays them over what partitions start from and over memory of
    reductions: such a kernel hung, or erred, while other processes used the GPU (h200 27).
    """
    places: dict[str, str] = {}  # of each name
    dead: list[str] = []
    for line in ttgir.splitlines():
        if made := re.search(r"(%\w+) = ttg\.local_alloc .*xi64", line):
            places[made[1]] = made[1]
            dead.append(made[1])
        elif (part := re.search(r"(%\w+) = ttg\.memdesc_index (%\w+)", line)) and part[2] in places:
            places[part[1]] = places[part[2]]
        elif "ttng.init_barrier" not in line:
            used = {places.get(name) for name in re.findall(r"%\w+", line)}
            dead = [place for place in dead if place not in used]
    return dead


def kernels_of(problem: Problem, ptxas: str = "") -> dict[str, Built]:
    """Every kernel of a problem: prefill, and where it needs them fix-up and order."""
    c = config.config_of(problem)
    bound = Launcher(problem, c, nvidia(90))
    ints = torch.empty(1, dtype=torch.int32, device="meta")
    lists = (ints, ints, (0, 0, 1, 64)) if bound.spec.blocks else (None, None, (0, 0, 0, 0))
    tensors = tensors_of(problem)
    given = bound.arguments(tensors, bound.memory(Workspaces(torch.device("meta"))), lists)
    found = {"prefill": build(fwd_kernel, given, ("S",), ptxas, bound.attention.options)}
    found["prefill"].spec, found["prefill"].dynamic = bound.spec, bound.dynamic
    if bound.spec.guard:
        found["fixup"] = build(fwd_kernel, bound.fixup_arguments(tensors, given), ("S",), ptxas)
    if problem.packed_q:
        found["order"] = build(rank_sequences, given | {"BM": bound.spec.BM, "RUN": ORDER_RUN}, ("BM", "RUN"), ptxas)
    if bound.lister is not None:
        arguments = bound.lister.arguments(tensors) | {"LIST": ints, "RANK": ints} | bound.lister.kernel.constants
        found["lists"] = build(list_blocks, arguments, tuple(bound.lister.kernel.constants), ptxas)
    return found
