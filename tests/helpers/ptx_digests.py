"""Digests of the PTX of a sample of GPU kernels, to show that a change of names moves no instruction.

    python tests/helpers/ptx_digests.py --out before.json
    python tests/helpers/ptx_digests.py --against before.json --only wide backward

The names of kernels, comments and line information do not count. Not a test: it compares two states of the code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

sys.path += [str(Path(__file__).parents[1] / "backends" / name) for name in ("triton", "hopper")]

import torch

import aot
import hopper_aot
import test_hopper_aot
import test_hopper_backward
import test_hopper_wide_backward
import test_mla
import test_triton_aot
import test_triton_backward
from assembler import lowered
from tilewise.backends.triton.merge import prepare

TRITON = {
    "D128-causal": (90,), "D72-causal": (80,), "bool mask": (90,), "varlen": (90,), "decode-D128": (90, 100),
    "paged16-D128": (90,), "paged16-int4": (90,), "paged16-fp8_e4m3-groups-of-32": (90,), "int8-D64": (80,),
    "D256-softcap": (90,), "D512": (90,),
}  # fmt: skip
TRITON_BACKWARD = (
    "D64", "D128-causal", "varlen", "additive mask", "dense mask", "D512", "everything", "everything, dense mask",
    "strides", "biases", "few", "bool mask", "f32-D64",
)  # fmt: skip
HOPPER = ("D64-short", "D128-causal", "D512-causal", "varlen", "D72-all", "varlen-all")


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
        made = signature.source(source, function)
        count = sum(key.startswith(f"{self.name} #") for key in self.digests)
        key = f"{self.name} #{count}"
        backend = CUDABackend(GPUTarget("cuda", arch, 32))
        _, _, ptx = lowered(made, backend, backend.parse_options(dict(options) | made.parse_options()))
        self.digests[key] = hashlib.sha256(normal(ptx).encode()).hexdigest()
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


def kernels(recorder: Recorder) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The sample by name, each compiled when it is called."""
    for name, archs in TRITON.items():
        for arch in archs:
            p = test_triton_aot.HOT[name]
            yield f"triton {name} sm_{arch}", lambda p=p, arch=arch: (aot.attend_of(p, arch), *aot.helpers_of(p, arch))
    for name in TRITON_BACKWARD:
        p = (test_triton_backward.HOT | test_triton_backward.OTHERS)[name]
        yield f"triton backward {name}", lambda p=p: aot.backward_of(p, 90)
    for dtype, n in ((torch.bfloat16, 8), (torch.float32, 2), (torch.float16, 3)):
        out, lse = torch.empty(2, 32, 99, 72, dtype=dtype, device="meta"), torch.empty(2, 32, 99, device="meta")
        kernel, _, given = prepare([out] * n, [lse] * n, out, lse)
        yield f"triton merge {n}", lambda kernel=kernel, given=given: aot.compile_kernel(kernel, given, 90)
    problems = {name: p for name, (p, _) in (test_hopper_aot.HOT | test_hopper_aot.MORE).items()}
    for name in HOPPER:
        p = (problems | test_hopper_aot.OTHERS)[name]
        yield f"hopper {name}", lambda p=p: hopper_aot.kernels_of(p)
    narrow = test_hopper_backward
    for n, p in enumerate(narrow.PROBLEMS):
        if n in (0, 1, 2, 4, 5, 6, 7):
            yield f"hopper backward {n} D{p.head_dim}", lambda p=p: narrow.built(narrow.backward, narrow.given(p)[1])
    wide = test_hopper_wide_backward
    problems = dict(enumerate(wide.PROBLEMS)) | {"softcap": replace(wide.PROBLEMS[5], softcap=50.0)}
    for n, p in problems.items():
        bound, tensors = wide.given(p)
        for launch, s in enumerate(bound.specs):
            given = bound.arguments(tensors) | bound.own(tensors, s)
            name = f"hopper wide backward {n} D{p.head_dim} launch {launch}"
            yield name, lambda given=given: wide.built(wide.wide_backward, given)
    latent, made = test_mla.arguments()
    yield "mla decode", lambda: recorder.build(test_mla.latent_decode, made, ("S",))
    constants = latent.combining.constants
    combined = {name: (made | constants)[name] for name in test_mla.combine.arg_names}
    yield "mla combine", lambda: recorder.build(test_mla.combine, combined, tuple(constants))
    for name, options in {"": {"paged": False, "lengths": False}, " pages": {}, " fp8": {"fp8": True}}.items():
        given = test_mla.arguments_by_indices(test_mla.chosen(**options))
        yield f"mla indices{name}", lambda given=given: recorder.build(test_mla.latent_decode, given, ("S",))


def digests(words: list[str]) -> dict[str, str]:
    recorder = Recorder()
    aot.compile_kernel = recorder.compile_kernel  # type: ignore[assignment]
    for module in (hopper_aot, test_hopper_backward, test_hopper_wide_backward, test_mla):
        module.build = recorder.build
    for name, made in kernels(recorder):
        if all(word in name for word in words):
            recorder.name = name
            made()
    return recorder.digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="kernels whose names have all these words")
    given = parser.parse_args()
    made = digests(given.only)
    if given.out:
        given.out.write_text(json.dumps(made, indent=1) + "\n")
    if given.against:
        before = json.loads(given.against.read_text())
        other = [name for name, digest in made.items() if before.get(name) != digest]
        sys.exit(f"not as before: {', '.join(other)}" if other else 0)


if __name__ == "__main__":
    main()
