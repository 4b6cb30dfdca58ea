"""Kernels compiled for NVIDIA's GPUs without one, once, with what ptxas says of them; kept beside Triton's own."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.cache import get_cache_key, get_cache_manager

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# Architectures that the nvdisasm of Triton 3.6 does not know, and the one of the same family that it reads them as.
READ_AS = {103: 100, 121: 120}
FLAGS = 48  # where an ELF file has its flags; their second byte is the architecture


@dataclass
class Assembled:
    shared: int  # bytes that a program takes
    ttgir: str
    ptx: str
    report: str  # what ptxas says
    arch: int
    kept: Any  # Triton's cache, what was made of this kernel

    @property
    def registers(self) -> int:
        return max(int(n) for n in re.findall(r"Used (\d+) registers", self.report))

    @property
    def spills(self) -> int:
        """Bytes of spill stores."""
        return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", self.report))

    @property
    def frame(self) -> int:
        """Bytes of local memory: without any, nothing can be spilled."""
        return sum(int(n) for n in re.findall(r"(\d+) bytes stack frame", self.report))

    @cached_property
    def sass(self) -> str:
        """Disassembled. It takes longer than ptxas does: only if asked for."""
        if (file := self.kept.get_file("kernel.sass")) is None:
            code = bytearray(Path(self.kept.get_file("kernel.cubin")).read_bytes())
            if self.arch in READ_AS:
                assert code[FLAGS + 1] == self.arch
                code[FLAGS + 1] = READ_AS[self.arch]
            with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
                cubin.write(code)
                cubin.flush()
                command = [TOOLS / "nvdisasm", "-c", cubin.name]
                text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            file = self.kept.put(text, "kernel.sass", binary=False)
        return Path(file).read_text()


def lowered(source: Any, backend: CUDABackend, options: Any) -> tuple[int, str, str]:
    """A kernel's bytes of shared memory, its TTGIR and its PTX: by all stages of the compiler but the last."""
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation = backend.get_codegen_implementation(options)
    module = source.make_ir(backend.target, options, implementation, backend.get_module_map(), context)
    found, texts = {"target": backend.target, **options.__dict__}, {}
    for name, stage in stages.items():
        if name != "cubin":
            module = stage(module, found)
            texts[name] = str(module)
    return found["shared"], texts["ttgir"], texts["ptx"]


def kept_of(source: Any, backend: CUDABackend, options: Any, tool: str) -> Any:
    """Triton's cache of what a tool has made of a kernel."""
    key = get_cache_key(source, backend, options, {"told by": tool})
    return get_cache_manager(hashlib.sha256(key.encode()).hexdigest())


def assembled(source: Any, arch: int, options: Any, ptxas: str = "") -> Assembled:
    """A kernel by Triton's ptxas for an architecture, or by another of the two."""
    backend = CUDABackend(GPUTarget("cuda", arch, 32))
    parsed = backend.parse_options(dict(options) | source.parse_options())
    tool = ptxas or ("ptxas-blackwell" if arch >= 100 else "ptxas")
    kept = kept_of(source, backend, parsed, tool)
    if (file := kept.get_file("assembly.json")) is None:
        shared, ttgir, ptx = lowered(source, backend, parsed)
        report, cubin = assemble(ptx, arch, tool)
        kept.put(cubin, "kernel.cubin")
        file = kept.put(json.dumps([shared, ttgir, ptx, report]), "assembly.json", binary=False)
    return Assembled(*json.loads(Path(file).read_text()), arch, kept)


def assemble(text: str, arch: int, tool: str) -> tuple[str, bytes]:
    """What ptxas says of a kernel, and its cubin."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx, tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        ptx.write(text)
        ptx.flush()
        name = f"sm_{arch}{'a' * (arch >= 90)}"
        # The same settings as the kernel's own build.
        command = [TOOLS / tool, "-v", "--fmad=false", f"--gpu-name={name}", ptx.name, "-o", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return report, Path(cubin.name).read_bytes()


def disassembled(sass: str) -> tuple[list[str], list[tuple[int, int]]]:
    """The instructions of a kernel, and from where to where its loops go."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
    return code, loops_of(code, labels, r"BRA.*?(\.L_x_\d+)")


def loops_of(code: list[str], labels: dict[str, int], branch: str) -> list[tuple[int, int]]:
    """Loops: from the target of a branch backwards to the branch."""
    spans = []
    for i, instruction in enumerate(code):
        back = re.search(branch, instruction)
        if back and labels.get(back[1], i + 1) <= i:
            spans.append((labels[back[1]], i + 1))
    return spans
