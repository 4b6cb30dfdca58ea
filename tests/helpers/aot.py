"""Ahead-of-time compilation of the Triton kernels that a problem needs, on a machine without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton._C.libtriton import ir, passes
from triton._C.libtriton import nvidia as nvidia_passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptx_version_from_options
from triton.compiler import ASTSource

import triton
from assembler import Assembled, assembled, kept_of, stages_of
from tilewise.backends.gpu.kernel import OPTIONS, Kernel
from tilewise.backends.gpu.launch_program import Workspaces
from tilewise.backends.gpu.target import Target, nvidia
from tilewise.backends.triton.bwd import config as bwd_config
from tilewise.backends.triton.bwd.dense_mask import masked_problem
from tilewise.backends.triton.bwd.launch import Backward, fixup_of
from tilewise.backends.triton.config import config_of
from tilewise.backends.triton.launch import Launcher
from tilewise.backends.triton.mod_lists_launch import ModLister
from tilewise.core.expression.mods import DTYPES
from tilewise.core.problem import Problem, captured_number
from tilewise.core.storage import StorageFormat
from tilewise.core.tensors import BackwardTensors, Tensors

TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32",
    torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8", torch.float64: "*fp64", torch.int64: "*i64",
}  # fmt: skip
ARCHS = (80, 86, 89, 90, 100, 103, 120, 121)
SHARED = {arch: nvidia(arch).shared_memory for arch in ARCHS}  # bytes that a program may have


def tensors_of(p: Problem) -> Tensors:
    """Tensors of a problem without memory: strides and types are all that compilation sees."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def stored(width: int, fmt: StorageFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
        if p.form == "paged":
            rows = (4096, p.page_size, p.kv_heads)
        else:
            rows = (1 if p.form == "varlen" else p.batch, p.kv_len, p.kv_heads)
        data = empty(*rows, fmt.columns(width), dtype=fmt.dtype).transpose(1, 2)
        if not fmt.scales(width):
            return data, None
        return data, empty(*rows, fmt.scales(width), dtype=torch.float32).transpose(1, 2)

    q_rows = (1, p.total_q) if p.packed_q else (p.batch, p.q_len)
    q = empty(*q_rows, p.heads, p.head_dim, dtype=p.q_dtype).transpose(1, 2)
    out = empty(*q_rows, p.heads, p.value_dim, dtype=p.q_dtype).transpose(1, 2)
    k, k_scales = stored(p.head_dim, p.k_format)
    v, v_scales = stored(p.value_dim, p.v_format)
    t = Tensors(q, k, v, out, k_scales=k_scales, v_scales=v_scales)
    if p.return_lse:
        t.lse = empty(q_rows[0], p.heads, q_rows[1], dtype=torch.float32)
    if p.mask is not None:
        sizes = (p.batch, p.heads, p.q_len, p.kv_len)
        own = [1 if free else n for n, free in zip(sizes, p.mask.broadcast, strict=True)]
        t.mask = empty(*own, dtype=p.mask.dtype).expand(sizes)
    t.alibi_slopes = empty(p.batch, p.heads, dtype=torch.float32) if p.alibi else None
    t.dropout_seed = empty(1, dtype=torch.int64) if p.dropout_p else None
    t.sinks = empty(p.heads, dtype=torch.float32) if p.sinks else None
    t.tree_mask = empty(p.batch, p.q_len, p.q_len, dtype=torch.bool) if p.tree else None
    t.positions = empty(p.batch, p.q_len) if p.positions else None
    t.q_bias = empty(q_rows[0], p.heads, q_rows[1], dtype=torch.float32) if p.q_bias else None
    k_rows = (1 if p.form == "varlen" else p.batch, p.heads, p.kv_len)
    t.k_bias = empty(*k_rows, dtype=torch.float32) if p.k_bias else None
    if p.selection is not None:
        rows = p.total_q if p.packed_q else -(-p.q_len // p.selection.block)
        heads = p.kv_heads if p.selection.by_head else 1
        t.key_indices = empty(q_rows[0], heads, rows, p.selection.count).expand(-1, p.kv_heads, -1, -1)
    t.kv_lengths = empty(p.batch) if p.rules.kv_lengths else None
    t.q_offset = empty(p.batch) if p.rules.q_offset == "rows" else None
    t.places = empty(p.batch, 3) if p.rules.affine == "rows" else None
    if p.mods is not None:
        t.captured = tuple(empty(*[99] * rank, dtype=DTYPES[dtype]) for dtype, rank in p.mods.tensors)
    t.cu_seqlens_q = empty(p.batch + 1) if p.packed_q else None
    t.cu_seqlens_k = empty(p.batch + 1) if p.form == "varlen" else None
    t.block_table = empty(p.batch, max(1, p.kv_len // max(1, p.page_size))) if p.form == "paged" else None
    return t


@dataclass
class Signature:
    """What a launch with these arguments would have a kernel compiled for, every pointer aligned."""

    types: dict[str, str]
    constants: dict[tuple[int], Any]
    attributes: dict[tuple[int], Any]

    @classmethod
    def of(cls, function: Any, given: dict[str, Any], constants: Collection[str]) -> Signature:
        made = cls({}, {}, {})
        plain = {p.name for p in function.params if p.do_not_specialize}
        aligned = [["tt.divisibility", 16]]
        for i, name in enumerate(function.arg_names):
            value = given[name]
            if name in constants or value is None or (type(value) is int and value == 1 and name not in plain):
                made.types[name], made.constants[(i,)] = "constexpr", value
            elif hasattr(value, "block_shape"):
                element = TYPES[value.base.dtype][1:]
                made.types[name] = f"tensordesc<{element}{list(value.block_shape)},{value.layout!r}>"
            elif isinstance(value, torch.Tensor):
                made.types[name], made.attributes[(i,)] = TYPES[value.dtype], aligned
            elif isinstance(value, float):
                made.types[name] = "fp32"
            else:
                made.types[name] = "i32" if abs(value) < 2**31 else "i64"
                if value % 16 == 0 and name not in plain:
                    made.attributes[(i,)] = aligned
        return made

    def source(self, kind: type[ASTSource], function: Any) -> ASTSource:
        return kind(fn=function, signature=self.types, constexprs=self.constants, attrs=self.attributes)

    def compiled(self, source: type[ASTSource], function: Any, arch: int | GPUTarget, options: Any) -> Any:
        made = self.source(source, function)
        target = arch if isinstance(arch, GPUTarget) else GPUTarget("cuda", arch, 32)
        return triton.compile(made, target=target, options=options)

    def shared(self, function: Any, arch: int, options: Any) -> int:
        """Bytes of shared memory, as the compiler allocates them half-way: a second where a whole build takes ten."""
        return int(self.half_way(function, arch, options, "shared", allocated))

    def ttgir(self, function: Any, arch: int, options: Any) -> str:
        """The kernel with its layouts, half-way too."""
        return self.half_way(function, arch, options, "ttgir", lambda module, *_: module)

    def half_way(self, function: Any, arch: int, options: Any, name: str, read: Callable[[Any, int, Any], Any]) -> str:
        """What `read` makes of the lowered module; kept beside Triton's own."""
        made = self.source(ASTSource, function)
        backend = CUDABackend(GPUTarget("cuda", arch, 32))
        given = backend.parse_options(options | made.parse_options())
        kept = kept_of(made, backend, given, "half-way")
        if (file := kept.get_file(name)) is None:
            module = next(module for stage, module in stages_of(made, backend, given, {}) if stage == "ttgir")
            file = kept.put(str(read(module, arch, given)), name, binary=False)
        return Path(file).read_text()


def allocated(module: Any, arch: int, given: Any) -> int:
    """Bytes of shared memory of a lowered module."""
    manager = ir.pass_manager(module.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    version = get_ptx_version_from_options(given, arch)
    nvidia_passes.passes.ttgpuir.add_allocate_shared_memory_nv(manager, arch, version)
    manager.run(module, "shared memory")
    return int(module.get_int_attr("ttg.shared"))


def compile_kernel(kernel: Kernel, arguments: dict[str, Any], arch: int) -> Assembled:
    signature = Signature.of(kernel.function, arguments | kernel.constants, kernel.constants)
    return assembled(signature.source(ASTSource, kernel.function), arch, OPTIONS | kernel.options)


def half_way(kernel: Kernel, arguments: dict[str, Any], arch: int) -> tuple[str, int]:
    """The kernel with its layouts, and its bytes of shared memory."""
    signature = Signature.of(kernel.function, arguments | kernel.constants, kernel.constants)
    options = OPTIONS | kernel.options
    return signature.ttgir(kernel.function, arch, options), signature.shared(kernel.function, arch, options)


def memory_of(bound: Launcher, ints: torch.Tensor, floats: torch.Tensor, inside: bool = False) -> tuple[Any, Any]:
    """What a call would set aside for a kernel: workspaces, and a mask's lists. `inside`: it combines splits too."""
    spec = bound.spec
    used = (spec.split, spec.split, inside, spec.guard == "flag", spec.ordered)
    memory = tuple(x if there else None for x, there in zip((floats, floats, ints, ints, ints), used, strict=True))
    return memory, (ints, ints, (0, 0, 1, 64)) if spec.listed else (None, None, (0, 0, 0, 0))


def forward_kernels(problem: Problem, target: Target, config: Any = None) -> Iterator[tuple[Kernel, dict[str, Any]]]:
    """The kernels of a call with their arguments: attention, its fix-up, then those of splits, order and a mask."""
    c = config or config_of(problem, target)
    bound = Launcher(problem, c, target)
    t = tensors_of(problem)
    ints = torch.empty(1, dtype=torch.int32, device="meta")
    floats = torch.empty(1, dtype=torch.float32, device="meta")
    kernel, fixup_kernel, arguments = bound.attention(t, *memory_of(bound, ints, floats))
    yield kernel, arguments
    if fixup_kernel is not None:
        yield fixup_kernel, arguments
    if bound.spec.split:
        yield bound.combiner, bound.combine_arguments(t, floats, floats)
    if bound.combines_inside:
        inside, _, arguments = bound.attention(t, *memory_of(bound, ints, floats, inside=True))
        yield inside, arguments
    if bound.orderer is not None:
        yield bound.orderer.kernel, bound.orderer.arguments(t, ints)
    if isinstance(bound.lister, ModLister):
        yield bound.lister.kernel(t), bound.lister.arguments(t) | {"LIST": ints, "RANK": ints}
    elif bound.lister is not None:
        assert t.mask is not None
        kernel, given = bound.lister.classifier(t.mask)
        yield kernel, given | {"LIST": ints, "RANK": ints, "heads": 1, "tiles": 64, "n": 64}
        states = torch.empty(1, dtype=torch.uint8, device="meta")
        yield bound.lister.compact, {"STATES": states, "LIST": ints, "RANK": ints, "n": 64}


def shared_of(problem: Problem, arch: int, fixup: bool = True) -> int:
    """Bytes of shared memory that the attention kernels of a problem take; compiled half-way."""
    kernels = ((k, given) for k, given in forward_kernels(problem, nvidia(arch)) if k.function.__name__ == "fwd_kernel")
    found = []
    for kernel, given in itertools.islice(kernels, 1 + fixup):
        signature = Signature.of(kernel.function, given | kernel.constants, kernel.constants)
        found.append(signature.shared(kernel.function, arch, OPTIONS | kernel.options))
    return max(found)


def attend_of(problem: Problem, arch: int, config: Any = None) -> Assembled:
    """The attention kernel of a problem, with the launch that the heuristics choose or with another."""
    return compile_kernel(*next(forward_kernels(problem, nvidia(arch), config)), arch)


def helpers_of(problem: Problem, arch: int) -> Iterator[Assembled]:
    """The kernels beside the attention kernel: the fix-up, and those of a mask or of splits."""
    for kernel, given in itertools.islice(forward_kernels(problem, nvidia(arch)), 1, None):
        yield compile_kernel(kernel, given, arch)


def backward_tensors_of(p: Problem) -> BackwardTensors:
    """Tensors of a backward pass without memory."""

    def like(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device="meta")

    t = tensors_of(p)
    b = BackwardTensors(t, like(t.out), floats(*t.out.shape[:-1]) if p.dlse else None)
    for name in {"q", "k", "v"} & set(p.grads):
        setattr(b, f"d{name}", like(getattr(t, name)))
    if "mask" in p.grads:
        b.dmask = floats(*(1 if one else n for n, one in zip(t.mask.shape, p.mask.broadcast, strict=True)))
        b.dmask = b.dmask if any(p.mask.broadcast) else b.dmask.to(p.mask.dtype)
    b.dcaptured = {n: floats(*t.captured[n].shape) for n in map(captured_number, p.grads) if n is not None}
    b.dsinks = floats(p.heads) if "sinks" in p.grads else None
    b.dalibi_slopes = floats(p.batch, p.heads) if "alibi_slopes" in p.grads else None
    for name in set(p.grads) & {"q_bias", "k_bias"}:
        setattr(b, f"d{name}", floats(*getattr(t, name).shape))
    return b


def kernels_for(p: Problem, target: Target, config: Any = None) -> Iterator[tuple[Kernel, dict[str, Any]]]:
    """The kernels of a backward pass on a device, each followed by its fix-up, with their arguments."""
    config = config or bwd_config.config(masked_problem(p), target)
    backward = Backward(p, config, target)
    t = backward.with_mask(backward_tensors_of(p))
    ints = torch.empty(1, dtype=torch.int32, device="meta")
    lists = dict.fromkeys(backward.listers, (ints, ints, (0, 0, 1, 64)))
    memory = backward.memory(t, Workspaces(t.dout.device)) | {"DSINKS": t.dsinks}
    for kernel, _, given in backward.launches(t, memory, lists, backward.load_sums(t)):
        yield kernel, given
        if (fixup := fixup_of(kernel)) is not None:
            yield fixup, given


def backward_kernels(p: Problem, arch: int, config: Any = None) -> Iterator[tuple[str, Kernel, dict[str, Any]]]:
    """The same by name, on NVIDIA's GPUs."""
    for kernel, given in kernels_for(p, nvidia(arch), config):
        fixup = getattr(kernel.constants["S"], "guard", "") == "fixup"
        yield kernel.function.__name__ + " fixup" * fixup, kernel, given


def backward_of(p: Problem, arch: int, config: Any = None) -> dict[str, Assembled]:
    """The kernels of a backward pass, compiled; dK and dV, if apart, under one name."""
    return {name: compile_kernel(kernel, given, arch) for name, kernel, given in backward_kernels(p, arch, config)}


def backward_shared(p: Problem, arch: int) -> int:
    """Bytes of shared memory that the largest kernel of a backward pass takes."""
    most = 0
    for _, kernel, given in backward_kernels(p, arch):
        signature = Signature.of(kernel.function, given | kernel.constants, kernel.constants)
        most = max(most, signature.shared(kernel.function, arch, OPTIONS | kernel.options))
    return most
