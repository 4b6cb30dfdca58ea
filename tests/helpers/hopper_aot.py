"""Ahead-of-time compilation of the Gluon kernels that a problem needs, on a machine without a GPU."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_key, get_cache_manager

from aot import TOOLS, Signature, tensors_of
from tilewise.backends.gpu.block_lists import BlockLister
from tilewise.backends.gpu.block_sparsity import list_blocks
from tilewise.backends.gpu.kernel import OPTIONS
from tilewise.backends.gpu.target import nvidia
from tilewise.backends.gpu.varlen_order import rank_sequences
from tilewise.backends.hopper.fwd import config
from tilewise.backends.hopper.fwd.kernel import fwd_kernel
from tilewise.backends.hopper.fwd.launch import ORDER_RUN, Launcher
from tilewise.core.plan import Plan
from tilewise.core.problem import Problem


@dataclass
class Built:
    shared: int
    report: str  # what ptxas says
    sass: str
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
        labels: dict[str, int] = {}
        code: list[str] = []
        for line in self.sass.splitlines():
            if label := re.match(r"^(\.L_x_\d+):", line):
                labels[label[1]] = len(code)
            elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
                code.append(instruction[1])
        spans = []
        for i, instruction in enumerate(code):
            back = re.search(r"BRA.*?(\.L_x_\d+)", instruction)
            if back and labels.get(back[1], i + 1) <= i:
                spans.append((labels[back[1]], i + 1))
        # Behind the end of the code lie repeated waits, which go back into it.
        spans = [
            (a, b) for a, b in spans
            if any("GMMA" in x for x in code[a:b]) and not any("EXIT" in x for x in code[a:b])
        ]  # fmt: skip
        inner = [s for s in spans if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
        return [code[a:b] for a, b in inner]


def ptx_of(source: Any, backend: CUDABackend, options: Any) -> tuple[str, int]:
    """A kernel's PTX, by all stages of the compiler but the last, and its bytes of shared memory."""
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation = backend.get_codegen_implementation(options)
    module = source.make_ir(backend.target, options, implementation, backend.get_module_map(), context)
    found = {"target": backend.target, **options.__dict__}
    for name in ("ttir", "ttgir", "llir", "ptx"):
        if name in stages:
            module = stages[name](module, found)
    return str(module), found["shared"]


def build(
    function: Any, given: dict[str, Any], constants: tuple[str, ...], ptxas: str = "ptxas", options: Any = OPTIONS
) -> Built:
    """Compiles as a launch with these arguments would, with one of Triton's two ptxas; kept beside Triton's own."""
    signature = Signature.of(function, given, constants)
    kind = GluonASTSource if function.is_gluon() else ASTSource
    source = kind(function, signature.types, signature.constants, signature.attributes)
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    parsed = backend.parse_options(dict(options) | source.parse_options())
    key = get_cache_key(source, backend, parsed, {"report of": ptxas})
    kept = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if (file := kept.get_file("built.json")) is None:
        ptx, shared = ptx_of(source, backend, parsed)
        file = kept.put(json.dumps([shared, *assembled(ptx, ptxas)]), "built.json", binary=False)
    return Built(*json.loads(Path(file).read_text()))


def assembled(text: str, ptxas: str) -> tuple[str, str]:
    """What ptxas says of PTX, and the instructions that it makes."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx, tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        ptx.write(text)
        ptx.flush()
        command = [TOOLS / ptxas, "-v", "--fmad=false", "--gpu-name=sm_90a", ptx.name, "-o", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin.name], capture_output=True, text=True, check=True).stdout
    return report, sass


def kernels_of(problem: Problem, ptxas: str = "ptxas") -> dict[str, Built]:
    """Every kernel of a problem: prefill, and where it needs them fix-up and order."""
    c = config.config_of(problem)
    bound = Launcher(Plan(problem, "hopper", "", (64 * c.consumers, c.BN)), c, nvidia(90))
    ints = torch.empty(1, dtype=torch.int32, device="meta")
    lists = (ints, ints, (0, 0, 1, 64)) if bound.spec.listed else (None, None, (0, 0, 0, 0))
    tensors = tensors_of(problem)
    given = bound.arguments(tensors, bound.memory(torch.device("meta")), lists)
    found = {"prefill": build(fwd_kernel, given, ("S",), ptxas, bound.attention.options)}
    found["prefill"].spec, found["prefill"].dynamic = bound.spec, bound.dynamic
    if bound.spec.guard:
        found["fixup"] = build(fwd_kernel, bound.fixup_arguments(tensors, given), ("S",), ptxas)
    if problem.packed_q:
        found["order"] = build(rank_sequences, given | {"BM": bound.spec.BM, "RUN": ORDER_RUN}, ("BM", "RUN"), ptxas)
    if isinstance(bound.lister, BlockLister):
        arguments = bound.lister.arguments(tensors) | {"LIST": ints, "RANK": ints} | bound.lister.kernel.constants
        found["lists"] = build(list_blocks, arguments, tuple(bound.lister.kernel.constants), ptxas)
    return found
