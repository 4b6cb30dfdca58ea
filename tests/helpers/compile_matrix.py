"""The compile matrix: kernels that the planner chooses, compiled for GPUs that are not here.

A case is a problem with a name, or a cache write, a merge or a call of Hopper's own kernels. `entries` gives the
kernels that a case launches on a target; `report` compiles one and says what it takes: shared memory, registers,
spills, and which matrix instruction. `tools/matrix.py` goes through all.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from triton import compiler as triton_compiler

sys.path.append(str(Path(__file__).parents[1] / "backends/triton"))

import gluon_cases
import test_triton_aot
import test_triton_backward
from aot import ARCHS, Signature, forward_kernels, kernels_for
from assembler import assembled, of_amd, of_nvidia, program_of
from hopper_aot import GluonASTSource
from problem_space import draw
from test_triton_kv_write import appended
from test_triton_merge import merged
from tilewise.backends import triton
from tilewise.backends.gpu.kernel import OPTIONS, Kernel
from tilewise.backends.gpu.target import AMD, Target, amd, nvidia, planning_for
from tilewise.core.problem import Problem

Row = dict[str, Any]
Launch = tuple[Any, ...]
TARGETS = {f"sm_{arch}": nvidia(arch) for arch in ARCHS} | {gfx: amd(gfx) for gfx in AMD}
# One of each kind, the commonest: compiled for every target before any other.
FIRST = (
    "D128-causal", "decode-D128", "paged16-D128", "backward D128-causal", "D64-causal", "append bf16", "merge 8",
    "hopper D128-causal", "hopper backward 6, D128", "hopper backward 0, D256 wide", "hopper latent", "paged16-int8",
    "D256-causal", "varlen", "bool mask", "f32-D128", "paged16-fp8_e4m3", "paged16-int4", "backward D64-causal",
    "chosen-paged64-latent",
)  # fmt: skip
MAIN = (
    "fwd_kernel", "key_gradients", "query_gradients", "append", "merge_kernel", "backward", "wide_backward",
    "latent_decode",
)  # fmt: skip
OPERANDS = ("q", "k", "v", "dout", "keys", "values")
WRITES = ("bf16", "fp8_e4m3", "int8", "int4", "fp8_latent")
MERGES = {"merge 8": (torch.bfloat16, 128, 8), "merge 2": (torch.float32, 256, 2), "merge 3": (torch.float16, 576, 3)}
REPORT = "report.json"  # in Triton's cache, by the digest of a program
DRAWN = 20  # problems of the whole space, and as many backward passes: a sample that a run gets through


@cache
def cases() -> dict[str, Problem | None]:
    """Every case, the commonest first; writes, merges and Hopper's own have no problem."""
    found: dict[str, Problem | None] = {**test_triton_aot.HOT, **test_triton_aot.OTHERS}
    found |= {f"backward {n}": p for n, p in (test_triton_backward.HOT | test_triton_backward.OTHERS).items()}
    found |= dict.fromkeys([f"append {name}" for name in WRITES])
    found |= dict.fromkeys(MERGES)
    found |= dict.fromkeys(gluon_cases.cases())
    for seed in range(DRAWN):
        found[f"drawn {seed}"] = draw(random.Random(seed), indices=True)
    for seed, p in enumerate(test_triton_backward.drawn(0, DRAWN)):
        found[f"backward drawn {seed}"] = p
    return {name: found[name] for name in (*FIRST, *(n for n in found if n not in FIRST))}


def refusal(case: str, target: str) -> str | None:
    """Why the Triton backend does not serve a case on a target, if it does not."""
    p = cases()[case]
    if case.startswith("hopper"):
        return None if TARGETS[target].arch == 90 else "runs on Hopper GPUs"
    if p is None:
        return TARGETS[target].refusal
    with planning_for(TARGETS[target]):
        return triton.supports_backward(p) if p.grads else triton.supports(p)


def entries(case: str, target: str) -> Iterator[tuple[str, str, Kernel, dict[str, Any]]]:
    """Key, name, kernel and arguments of what a case launches; equal keys are equal kernels."""
    p, device = cases()[case], TARGETS[target]
    made: Iterator[tuple[Kernel, dict[str, Any]]]
    if p is not None:
        made = kernels_for(p, device) if p.grads else forward_kernels(p, device)
    elif case.startswith("hopper"):
        made = iter(gluon_cases.cases()[case]())
    else:
        kind, _, what = case.partition(" ")
        made = appended(what) if kind == "append" else merged(*MERGES[case])
    for kernel, given in made:
        name = "gluon " * is_gluon(kernel) + kernel.function.__name__ + " fixup" * is_fixup(kernel)
        yield key_of(kernel, given, target), name, kernel, given


def commonest(case: str, target: str) -> Iterator[tuple[str, str, Kernel, dict[str, Any]]]:
    """The kernels that the time of a case goes into, one of each."""
    seen = set()
    for entry in entries(case, target):
        name = entry[1].removeprefix("gluon ")
        if name in MAIN and name not in seen:
            seen.add(name)
            yield entry


class Item(NamedTuple):
    """A kernel of the list: the `number`-th of a case on a target."""

    case: str
    target: str
    number: int
    key: str


def items() -> list[Item]:
    """The list, each kernel once: the most important of the commonest cases, then whatever the planner chooses by a
    launch of its own (tile, warps, stages, types), then the other kernels of all cases with a name. Calls drawn at
    random come last, for launches that no other has.
    """
    found: dict[str, list[tuple[Item, bool, Launch]]] = {}
    for case in cases():
        served = [target for target in TARGETS if refusal(case, target) is None]
        found[case] = []
        for target in served:
            first = {entry[0] for entry in commonest(case, target)} if case in FIRST else set()
            for number, (key, name, kernel, _) in enumerate(entries(case, target)):
                found[case].append((Item(case, target, number, key), key in first, launch_of(name, kernel)))
    every = [each for listed in found.values() for each in listed]
    launches: set[tuple[str, Launch]] = set()
    kept: dict[str, Item] = {}
    for item, is_first, launch in every:
        if is_first:
            kept.setdefault(item.key, item)
            launches.add((item.target, launch))
    for item, _, launch in every:
        if (item.target, launch) not in launches and launch[0].removeprefix("gluon ") in MAIN:
            launches.add((item.target, launch))
            kept.setdefault(item.key, item)
    for item, *_ in every:
        if "drawn" not in item.case:
            kept.setdefault(item.key, item)
    return sorted(kept.values(), key=lambda item: "drawn" in item.case)


def launch_of(name: str, kernel: Kernel) -> Launch:
    """What the planner chooses of a launch, and the types of what is multiplied."""
    s = kernel.constants.get("S")
    kinds = [(op.kind, op.work) for op in (getattr(s, part, None) for part in OPERANDS) if hasattr(op, "work")]
    return name, tile_of(kernel), getattr(s, "slices", 1), *kinds


def is_gluon(kernel: Kernel) -> bool:
    return bool(kernel.function.is_gluon())


def is_fixup(kernel: Kernel) -> bool:
    s = kernel.constants.get("S")
    return getattr(s, "guard", "") == "fixup" or getattr(s, "fixup", False)


def key_of(kernel: Kernel, given: dict[str, Any], target: str) -> str:
    """All that a binary depends on: the sources, what they are compiled for, Triton's own version."""
    signature = Signature.of(kernel.function, given | kernel.constants, kernel.constants)
    function = kernel.function
    words = [target, function.__name__, sources_of(function.__module__), kernel.options]
    words += [signature.types, signature.constants, signature.attributes]
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]


@cache
def sources_of(module: str) -> str:
    """A digest of a kernel's module and of the modules with kernels that it imports, directly or not.

    Not Triton's own, which depends on what a process has looked at before.
    """
    found: set[str] = set()
    left = [module]
    while left:
        name = left.pop()
        text = Path(str(sys.modules[name].__file__)).read_text()
        if name not in found and "jit" in text:
            found.add(name)
            for dots, rest in re.findall(r"^from (\.+)([\w.]*) import", text, re.MULTILINE):
                left.append(".".join(name.split(".")[: -len(dots)]) + f".{rest}".rstrip("."))
    trees = (without_docstrings(Path(str(sys.modules[name].__file__)).read_text()) for name in sorted(found))
    return hashlib.sha256("".join(trees).encode()).hexdigest()


def without_docstrings(text: str) -> str:
    """A module's code alone: comments and docstrings make no other kernel."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def source_of(kernel: Kernel, given: dict[str, Any], target: str) -> tuple[ASTSource, GPUTarget, dict[str, Any]]:
    """What Triton compiles, for which GPU and how."""
    device = TARGETS[target]
    signature = Signature.of(kernel.function, given | kernel.constants, kernel.constants)
    kind = GluonASTSource if is_gluon(kernel) else ASTSource
    gpu = GPUTarget("hip", device.gfx, device.wave) if device.amd else GPUTarget("cuda", device.arch, 32)
    return signature.source(kind, kernel.function), gpu, OPTIONS | kernel.options


def program_digest(kernel: Kernel, given: dict[str, Any], target: str) -> str:
    """Of the program that a kernel is: what changes in its sources may leave as it was."""
    return hashlib.sha256(program_of(*source_of(kernel, given, target)).encode()).hexdigest()[:16]


def report(kernel: Kernel, given: dict[str, Any], target: str) -> Row:
    """A kernel, compiled: what it takes of a processor of the target."""
    source, gpu, options = source_of(kernel, given, target)
    if TARGETS[target].amd:
        built = triton_compiler.compile(source, target=gpu, options=options)
        return {"shared": built.metadata.shared, **of_amd(built.asm["amdgcn"])}
    made = assembled(source, gpu.arch, options)
    return {"shared": made.shared, **of_nvidia(made)}


def tile_of(kernel: Kernel) -> str:
    """The launch in words."""
    s = kernel.constants.get("S")
    rows = getattr(s, "BM", getattr(s, "BQ", 0))
    keys = getattr(s, "BK", getattr(s, "BN", 0))
    words = [f"{rows}x{keys}"] if rows and keys else []
    warps = kernel.options["num_warps"]
    return " ".join([*words, f"{warps} warp{'s' * (warps > 1)}", f"{kernel.options.get('num_stages', 1)} stages"])


def expected(kernel: Kernel, target: str) -> str:
    """The matrix instruction of a kernel's 16-bit products; "" where none is known to be."""
    device: Target = TARGETS[target]
    s = kernel.constants.get("S")
    if is_gluon(kernel):
        return "wgmma"
    if kernel.function.__name__ not in ("fwd_kernel", "key_gradients", "query_gradients"):
        return ""
    works = {getattr(s, name).work for name in ("keys", "values", "k", "v") if hasattr(s, name)}
    if s.guard == "fixup" or "f32" in works:
        return ""
    if device.amd:
        return "wmma" if device.rdna else "mfma"
    rows = getattr(s, "BM", 0)
    if device.warpgroup_mma and rows >= 64:
        return "wgmma" if device.arch == 90 else "tcgen05"
    return "mma" if rows else ""


def wrong(row: Row) -> str | None:
    """What is wrong with a compiled kernel, if something is."""
    if "error" in row:
        return f"does not compile: {row['error']}"
    limit = TARGETS[row["target"]].shared_memory
    if row["shared"] > limit:
        return f"{row['shared']} bytes of shared memory, {limit} are there"
    # A fix-up runs for tiles with NaN or Inf under hidden cells; its programs mostly end at once.
    if row["loop_spills"] and not row["kernel"].endswith("fixup"):
        return f"{row['loop_spills']} spills in a loop"
    if row["wanted"] and row["wanted"] != row["instruction"]:
        return f"{row['instruction'] or 'no matrix instruction'} in place of {row['wanted']}"
    return None


def kept_report(program: str) -> Row | None:
    """What was said of a program when it was compiled, by any name."""
    file = get_cache_manager(program).get_file(REPORT)
    return None if file is None else json.loads(Path(file).read_text())


def keep(row: Row) -> None:
    """A program is not compiled again once its row is kept."""
    if "program" in row and "error" not in row:
        said = {name: row[name] for name in ("shared", "registers", "spills", "loop_spills", "instruction", "seconds")}
        get_cache_manager(row["program"]).put(json.dumps(said), REPORT, binary=False)


def compiled(item: Item) -> Row:
    """The row of a kernel; a failure to compile is one too."""
    key, name, kernel, given = next(islice(entries(item.case, item.target), item.number, None))
    if key != item.key:
        raise LookupError(f"another kernel than was listed, of {item}: the sources have changed meanwhile")
    row = {**item._asdict(), "kernel": name, "tile": tile_of(kernel), "wanted": expected(kernel, item.target)}
    try:
        row["program"] = program_digest(kernel, given, item.target)
        if (said := kept_report(row["program"])) is None:
            begun = time.monotonic()
            said = report(kernel, given, item.target)
            said["seconds"] = round(time.monotonic() - begun, 1)
            keep(row | said)
        return row | said
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
