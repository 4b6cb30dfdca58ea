"""Kernels compiled for NVIDIA's GPUs without one, once, with what ptxas says of them; kept beside Triton's own."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from triton._C.libtriton import ir
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.compiler.compiler import make_backend
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


def stages_of(source: Any, backend: BaseBackend, options: Any, found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the compiler makes of a kernel, stage by stage, with the stage's name; into `found` what it says of it."""
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation = backend.get_codegen_implementation(options)
    module = source.make_ir(backend.target, options, implementation, backend.get_module_map(), context)
    found |= {"target": backend.target, **options.__dict__}
    for name, stage in stages.items():
        module = stage(module, found)
        yield name, module


def lowered(source: Any, backend: CUDABackend, options: Any) -> tuple[int, str, str]:
    """A kernel's bytes of shared memory, its TTGIR and its PTX: by all stages of the compiler but the last."""
    found: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for name, module in stages_of(source, backend, options, found):
        texts[name] = str(module)
        if name == "ptx":
            break
    return found["shared"], texts["ttgir"], texts["ptx"]


def program_of(source: Any, target: GPUTarget, options: Any) -> str:
    """A kernel as the compiler reads it, functions inlined and constants known, without the names that values have:
    kernels of the same program have the same machine code.
    """
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options) | source.parse_options())
    _, module = next(stages_of(source, backend, parsed, {}))
    numbers: dict[str, str] = {}
    text = re.sub(r"%[\w$.-]+", lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), module.str_nodebug())
    return f"{triton.__version__} {target} {sorted(options.items())}\n{text}"


def kept_of(source: Any, backend: CUDABackend, options: Any, tool: str) -> Any:
    """Triton's cache of what a tool has made of a kernel."""
    key = get_cache_key(source, backend, options, {"told by": tool})
    return get_cache_manager(hashlib.sha256(key.encode()).hexdigest())


def assembled(source: Any, arch: int, options: Any, ptxas: str = "") -> Assembled:
    """A kernel by Triton's ptxas for an architecture, or by another of the two."""
    backend = CUDABackend(GPUTarget("cuda", arch, 32))
    parsed = backend.parse_options(dict(options) | source.parse_options())
    tool = ptxas or Path(get_ptxas(arch).path).name
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


def of_amd(text: str) -> dict[str, Any]:
    """Registers, spills and the matrix instruction by the assembly."""

    def number(name: str) -> int:
        return max(map(int, re.findall(rf"\.{name}:\s+(\d+)", text)), default=0)

    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"^(\.LBB\w+):", line):
            labels[label[1]] = len(code)
        elif re.match(r"^\t[a-z]\w+", line):
            code.append(line.strip())
    spans = multiplying(code, loops_of(code, labels, r"^s_c?branch\w*\s+(\.LBB\w+)"), "^v_(mfma|wmma)")
    products = [name for name in ("v_mfma", "v_wmma") if f"\t{name}" in text]
    return {
        "registers": number("vgpr_count"), "spills": number("vgpr_spill_count"),
        "loop_spills": most(code, spans, r"^scratch_(load|store)|^buffer_(load|store).*Folded"),
        "instruction": "".join(products).removeprefix("v_"),
    }  # fmt: skip


def of_nvidia(made: Assembled) -> dict[str, Any]:
    """The same by what ptxas says and, where it has spilled, by the disassembled code."""
    in_loops = local_in_loops(made) if made.frame else 0
    return {
        "registers": made.registers, "spills": made.spills // 4, "loop_spills": in_loops,
        "instruction": products_of(made.ptx),
    }  # fmt: skip


def local_in_loops(made: Assembled) -> int:
    """The most reads and writes of local memory in any one loop."""
    code, spans = disassembled(made.sass)
    # Behind the end of the code lie repeated waits, which go back into it.
    spans = [(a, b) for a, b in spans if not any("EXIT" in x for x in code[a:b])]
    return most(code, multiplying(code, spans, "MMA"), r"\b(STL|LDL)")


def products_of(ptx: str) -> str:
    kinds = {"wgmma": "wgmma.mma", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
    return next((name for name, word in kinds.items() if word in ptx), "")


def multiplying(code: list[str], spans: list[tuple[int, int]], product: str) -> list[tuple[int, int]]:
    """The innermost of the loops that multiply matrices; of all, if none does."""
    spans = [(a, b) for a, b in spans if any(re.search(product, x) for x in code[a:b])] or spans
    return [s for s in spans if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in spans)]


def most(code: list[str], spans: list[tuple[int, int]], pattern: str) -> int:
    """The most instructions of a kind in any one loop."""
    return max((sum(bool(re.search(pattern, x)) for x in code[a:b]) for a, b in spans), default=0)
