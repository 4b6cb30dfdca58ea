"""Digests of the PTX of a sample of GPU kernels, to show that a change of names moves no instruction.

    python tests/helpers/ptx_digests.py --out before.json
    python tests/helpers/ptx_digests.py --against before.json

The names of kernels, comments and line information do not count. Not a test: it compares two states of the code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget, Language
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

sys.path += [str(Path(__file__).parents[1] / "backends" / name) for name in ("triton", "hopper")]

import aot
import hopper_aot
import test_hopper_aot
import test_hopper_backward
import test_mla
import test_triton_aot

TRITON = {
    "D128-causal": (90,), "D72-causal": (80,), "bool mask": (90,), "varlen": (90,), "decode-D128": (90, 100),
    "paged16-D128": (90,), "paged16-int4": (90,), "paged16-fp8_e4m3-groups-of-32": (90,), "int8-D64": (80,),
    "D256-softcap": (90,), "D512": (90,),
}  # fmt: skip
HOPPER = ("D64-short", "D128-causal", "D512-causal", "varlen")
HOPPER_OTHERS = ("additive mask", "D72-all", "varlen-all")


def ptx_of(source: Any, arch: int, options: Any) -> str:
    """A kernel's PTX: all stages of the compiler but the last."""
    target = GPUTarget("cuda", arch, 32)
    backend = CUDABackend(target)
    given = backend.parse_options(dict(options) | source.parse_options())
    language = Language.TRITON if type(source) is ASTSource else Language.GLUON
    stages: dict[str, Any] = {}
    backend.add_stages(stages, given, language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation = backend.get_codegen_implementation(given)
    module = source.make_ir(target, given, implementation, backend.get_module_map(), context)
    found = {"target": target, **given.__dict__}
    for name, stage in stages.items():
        module = stage(module, found)
        if name == "ptx":
            return str(module)
    raise AssertionError("no stage makes PTX")


def normal(ptx: str) -> str:
    """PTX without names, comments and line information."""
    name = re.search(r"\.entry\s+(\w+)", ptx)
    assert name is not None
    ptx = ptx.split(".section\t.debug")[0].replace(name[1], "kernel")
    lines = [re.sub(r"//.*", "", line).strip() for line in ptx.splitlines()]
    skipped = (".loc", ".file", ".section", "$L__func", "$L__tmp")
    return "\n".join(line for line in lines if line and not line.startswith(skipped))


class Recorder:
    """Stands in for the compiler of `aot.py` and `hopper_aot.py`."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.name = ""

    def add(self, source: type[ASTSource], function: Any, signature: aot.Signature, arch: int, options: Any) -> None:
        made = source(
            fn=function, signature=signature.types, constexprs=signature.constants, attrs=signature.attributes
        )
        count = sum(key.startswith(f"{self.name} #") for key in self.digests)
        key = f"{self.name} #{count}"
        self.digests[key] = hashlib.sha256(normal(ptx_of(made, arch, options)).encode()).hexdigest()
        print(key, self.digests[key][:16], flush=True)

    def compile_kernel(self, kernel: Any, arguments: dict[str, Any], arch: int) -> Any:
        signature = aot.Signature.of(kernel.function, arguments | kernel.constants, kernel.constants)
        self.add(ASTSource, kernel.function, signature, arch, aot.OPTIONS | kernel.options)
        return SimpleNamespace()

    def build(
        self, function: Any, given: Any, constants: Any, ptxas: str = "", options: Any = hopper_aot.OPTIONS
    ) -> Any:
        source = hopper_aot.GluonASTSource if function.is_gluon() else ASTSource
        self.add(source, function, aot.Signature.of(function, given, constants), 90, options)
        return SimpleNamespace()


def digests(quick: bool) -> dict[str, str]:
    recorder = Recorder()
    aot.compile_kernel = recorder.compile_kernel  # type: ignore[assignment]
    hopper_aot.build = recorder.build  # type: ignore[assignment]
    for name, archs in TRITON.items():
        for arch in archs[: 1 if quick else 2]:
            recorder.name = f"triton {name} sm_{arch}"
            aot.attend_of(test_triton_aot.HOT[name], arch)
            list(aot.helpers_of(test_triton_aot.HOT[name], arch))
        if quick and name == "varlen":
            break
    problems = {name: p for name, (p, _) in (test_hopper_aot.HOT | test_hopper_aot.MORE).items()}
    for name in HOPPER[: 2 if quick else None]:
        recorder.name = f"hopper {name}"
        hopper_aot.kernels_of(problems[name])
    for name in HOPPER_OTHERS[: 1 if quick else None]:
        recorder.name = f"hopper {name}"
        hopper_aot.kernels_of(test_hopper_aot.OTHERS[name])
    for s in (test_hopper_backward.SPECS[0], test_hopper_backward.SPECS[-2]):
        recorder.name = f"backward D{s.D} causal={s.causal}"
        recorder.build(test_hopper_backward.backward, test_hopper_backward.given(s), ("S",))
    recorder.name = "mla"
    latent, made = test_mla.arguments()
    recorder.build(test_mla.latent_decode, made, ("S",))
    constants = latent.combining.constants
    recorder.build(
        test_mla.combine, {name: (made | constants)[name] for name in test_mla.combine.arg_names}, tuple(constants)
    )
    return recorder.digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--quick", action="store_true", help="a third of the sample")
    given = parser.parse_args()
    made = digests(given.quick)
    if given.out:
        given.out.write_text(json.dumps(made, indent=1) + "\n")
    if given.against:
        before = json.loads(given.against.read_text())
        other = [name for name, digest in made.items() if before.get(name) != digest]
        sys.exit(f"not as before: {', '.join(other)}" if other else 0)


if __name__ == "__main__":
    main()
