"""Kernels compiled for NVIDIA's GPUs without one, once, with what ptxas says of them; kept beside Triton's own."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.cache import get_cache_key, get_cache_manager

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
NOT_DISASSEMBLED = (103, 121)  # by the nvdisasm that Triton 3.6 brings


class Assembled(NamedTuple):
    shared: int
    ttgir: str
    ptx: str
    report: str  # what ptxas says
    sass: str  # "" for those that Triton's nvdisasm does not know
    code: str  # the cubin, in base64

    @property
    def cubin(self) -> bytes:
        return base64.b64decode(self.code)


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


def assembled(source: Any, arch: int, options: Any, ptxas: str = "") -> Assembled:
    """A kernel by Triton's ptxas for an architecture, or by another of the two."""
    backend = CUDABackend(GPUTarget("cuda", arch, 32))
    parsed = backend.parse_options(dict(options) | source.parse_options())
    tool = ptxas or ("ptxas-blackwell" if arch >= 100 else "ptxas")
    key = get_cache_key(source, backend, parsed, {"told by": tool})
    kept = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if (file := kept.get_file("assembled.json")) is None:
        made = lowered(source, backend, parsed)
        text = json.dumps([*made, *assemble(made[2], arch, tool)])
        file = kept.put(text, "assembled.json", binary=False)
    return Assembled(*json.loads(Path(file).read_text()))


def assemble(text: str, arch: int, tool: str) -> tuple[str, str, str]:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx, tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        ptx.write(text)
        ptx.flush()
        name = f"sm_{arch}{'a' * (arch >= 90)}"
        # The same settings as the kernel's own build.
        command = [TOOLS / tool, "-v", "--fmad=false", f"--gpu-name={name}", ptx.name, "-o", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [TOOLS / "nvdisasm", "-c", cubin.name]
        known = arch not in NOT_DISASSEMBLED
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout if known else ""
        return report, sass, base64.b64encode(Path(cubin.name).read_bytes()).decode()
