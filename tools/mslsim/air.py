"""Executes a kernel that Apple's compiler has compiled (AIR): its code is compiled on for this CPU, and threads,
barriers and simdgroups are the simulator's own.

So the same MSL text can be executed twice: read by g++ with the headers in `include/`, and read by Apple's compiler.
What differs is what those headers got wrong. Memory is not watched here: races and bounds are found in the text.
"""

import hashlib
import re
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm

from mslsim import build
from mslsim.library import Library, Options
from mslsim.metallib import Metallib
from mslsim.text import Kernel, Parameter

# What AIR calls, in LLVM's words, by the name of the function without its types.
_INTRINSICS = {
    "normalize_function_constant_predicate.i8": ("i8", "i8 %x", "%b = icmp ne i8 %x, 0; %r = zext i1 %b to i8"),
    "max.s.i32": ("i32", "i32 %x, i32 %y", "%b = icmp sgt i32 %x, %y; %r = select i1 %b, i32 %x, i32 %y"),
    "min.s.i32": ("i32", "i32 %x, i32 %y", "%b = icmp slt i32 %x, %y; %r = select i1 %b, i32 %x, i32 %y"),
    "simd_sum.f32": ("float", "float %x", "%r = call float @mslsim_air_sum(float %x)"),
    "simd_max.f32": ("float", "float %x", "%r = call float @mslsim_air_max(float %x)"),
    "simd_shuffle_xor.f32": (
        "float", "float %x, i16 %m",
        "%w = zext i16 %m to i32; %r = call float @mslsim_air_shuffle_xor(float %x, i32 %w)",
    ),
    "wg.barrier": ("void", "i32 %flags, i32 %scope", "call void @mslsim_air_barrier(i32 %flags, i32 1)"),
    "simdgroup.barrier": ("void", "i32 %flags, i32 %scope", "call void @mslsim_air_barrier(i32 %flags, i32 0)"),
    "fast_exp.f32": ("float", "float %x", "%r = call float @mslsim_air_exp(float %x)"),
    "fast_exp2.f32": ("float", "float %x", "%r = call float @mslsim_air_exp2(float %x)"),
    "log2.f32": ("float", "float %x", "%r = call float @mslsim_air_log2(float %x)"),
    "fmax.f32": ("float", "float %x, float %y", "%r = call float @mslsim_air_fmax(float %x, float %y)"),
}  # fmt: skip
# To nearest even; LLVM calls it by this name too, where it rounds what a product of bfloat numbers gave.
_RUNTIME = """
declare ptr @mslsim_air_buffer(i32)
declare void @mslsim_air_position(ptr, ptr)
declare void @mslsim_air_multiply(ptr, ptr, ptr, ptr) convergent
declare void @mslsim_air_barrier(i32, i32) convergent
declare float @mslsim_air_sum(float) convergent
declare float @mslsim_air_max(float) convergent
declare float @mslsim_air_shuffle_xor(float, i32) convergent
declare float @mslsim_air_exp(float)
declare float @mslsim_air_exp2(float)
declare float @mslsim_air_log2(float)
declare float @mslsim_air_fmax(float, float)
define hidden bfloat @__truncsfbf2(float %x) {
  %bits = bitcast float %x to i32
  %high = lshr i32 %bits, 16
  %odd = and i32 %high, 1
  %half = add i32 %odd, 32767
  %sum = add i32 %bits, %half
  %rounded = lshr i32 %sum, 16
  %nan = fcmp uno float %x, %x
  %quiet = or i32 %high, 64
  %chosen = select i1 %nan, i32 %quiet, i32 %rounded
  %short = trunc i32 %chosen to i16
  %r = bitcast i16 %short to bfloat
  ret bfloat %r
}
"""
_MATRIX = re.compile(r"simdgroup_matrix_8x8_multiply_accumulate\.v64f32\.v64(\w+)\.v64(\w+)\.v64f32")
_TYPES = {"f32": "float", "f16": "half", "bf16": "bfloat"}


def _matrix(name: str, a: str, b: str) -> str:
    """d = a b + c: a thread holds the first two elements of each, the others are nobody's."""
    lines, args = [], [("a", _TYPES[a]), ("b", _TYPES[b]), ("c", "float")]
    for x, kind in args:
        lines.append(f"%{x}m = alloca [2 x float]")
        for i in range(2):
            wide = f"%{x}{i}"
            lines.append(f"{wide} = extractelement <64 x {kind}> %{x}, i32 {i}")
            if kind != "float":
                lines.append(f"{wide}w = fpext {kind} {wide} to float")
                wide += "w"
            lines.append(f"%{x}p{i} = getelementptr [2 x float], ptr %{x}m, i32 0, i32 {i}")
            lines.append(f"store float {wide}, ptr %{x}p{i}")
    lines += [
        "%om = alloca [2 x float]",
        "call void @mslsim_air_multiply(ptr %am, ptr %bm, ptr %cm, ptr %om)",
        "%o0 = load float, ptr %om",
        "%op = getelementptr [2 x float], ptr %om, i32 0, i32 1",
        "%o1 = load float, ptr %op",
        "%d0 = insertelement <64 x float> poison, float %o0, i32 0",
        "%d1 = insertelement <64 x float> %d0, float %o1, i32 1",
        "ret <64 x float> %d1",
    ]
    parameters = ", ".join(f"<64 x {kind}> %{x}" for x, kind in args)
    return f"define internal <64 x float> @{name}({parameters}) convergent {{\n" + "\n".join(lines) + "\n}\n"


def _defined(m: re.Match[str]) -> str:
    """What stands for the declaration of one of AIR's functions."""
    name = m["name"]
    matrix = _MATRIX.fullmatch(name.removeprefix("air."))
    if matrix:
        return _matrix(name, matrix[1], matrix[2])
    if name.removeprefix("air.") not in _INTRINSICS:
        raise NotImplementedError(f"AIR's {name} is not known to the simulator")
    result, parameters, steps = _INTRINSICS[name.removeprefix("air.")]
    lines = [*steps.split("; "), "ret void" if result == "void" else f"ret {result} %r"]
    attribute = "convergent " if "simd" in name or "barrier" in name else ""
    return f"define internal {result} @{name}({parameters}) {attribute}{{\n" + "\n".join(lines) + "\n}\n"


_DECLARED = re.compile(r"^declare [^@\n]*@(?P<name>air\.[\w.]+)\([^\n]*$", re.MULTILINE)


def kernel_of(ir: str, name: str) -> Kernel:
    """The kernel's parameters, as the compiler wrote them down."""
    nodes = dict(re.findall(r"^(!\d+) = !\{(.*)\}$", ir, re.MULTILINE))
    root = nodes[re.search(r"^!air\.kernel = !\{(!\d+)", ir, re.MULTILINE)[1]]  # type: ignore[index]
    parameters = []
    for node in re.findall(r"!\d+", nodes[re.findall(r"!\d+", root)[1]]):
        text = nodes[node]
        label = re.search(r'"air\.arg_name", !"([^"]*)"', text)
        called = label[1] if label else "?"
        position = re.match(r'i32 \d+, !"air\.(\w+)"', text)
        if '!"air.buffer"' in text:
            index = int(re.search(r'"air\.location_index", i32 (\d+)', text)[1])  # type: ignore[index]
            size = re.search(r'"air\.arg_type_size", i32 (\d+)', text)
            parameters.append(Parameter(called, index=index, unit=int(size[1]) if size else 1,
                                        writable='"air.read_write"' in text or '"air.write"' in text))  # fmt: skip
        elif position:
            parameters.append(Parameter(called, position=position[1]))
        else:
            raise NotImplementedError(f"{name}: the parameter {called} is neither a buffer nor a position")
    return Kernel(name, name, 0, parameters)


def _entry(ir: str, kernel: Kernel) -> str:
    """The function by which the runtime calls the kernel."""
    head = re.search(rf"^define [^@]*@{re.escape(kernel.name)}\((.*)\)[^()]*\{{$", ir, re.MULTILINE)
    types = [re.match(r"\s*(<[^>]*>|\w+)", part)[1] for part in re.split(r",(?![^<]*>)", head[1])]  # type: ignore[index]
    lines, given, texts = [], [], []
    for i, (kind, p) in enumerate(zip(types, kernel.parameters, strict=True)):
        if p.index is not None:
            lines.append(f"%a{i} = call ptr @mslsim_air_buffer(i32 {p.index})")
        else:
            texts.append(f'@mslsim_name_{i} = internal constant [{len(p.position) + 1} x i8] c"{p.position}\\00"')
            lines += [
                f"%m{i} = alloca [4 x i32], align 16",
                f"call void @mslsim_air_position(ptr @mslsim_name_{i}, ptr %m{i})",
                f"%a{i} = load {kind}, ptr %m{i}",
            ]
        given.append(f"{kind} %a{i}")
    call = f"call void @{kernel.name}({', '.join(given)})"
    body = "\n".join([*lines, call, "ret void"])
    return "\n".join(texts) + f"\ndefine void @mslsim_enter_{kernel.name}() {{\n{body}\n}}\n"


def _with_constants(ir: str, constants: dict[int, int]) -> str:
    """Function constants take their values; one without a value is 0."""
    return re.sub(
        r"^(@\S+\.MTL_FC_INIT_(\d+)_\w+ = internal )(?:unnamed_addr )?externally_initialized constant (\w+) undef",
        lambda m: f"{m[1]}constant {m[3]} {int(constants.get(int(m[2]), 0))}",
        ir,
        flags=re.MULTILINE,
    )


def to_host(ir: str, name: str, constants: dict[int, int], machine: llvm.TargetMachine) -> str:
    """AIR as LLVM code for this CPU."""
    kernel = kernel_of(ir, name)
    ir = re.sub(r"^target (datalayout|triple) = .*$", "", ir, flags=re.MULTILINE)
    ir = re.sub(
        r"^(?:@llvm\.compiler\.used|!air\.\w+|!llvm\.module\.flags|!llvm\.ident) = .*$", "", ir, flags=re.MULTILINE
    )
    ir = re.sub(r"ptr addrspace\(\d\)", "ptr", ir)
    ir = re.sub(r"addrspace\(\d\) ", "", ir)
    ir = _with_constants(ir, constants)
    ir = re.sub(r',? section "[^"]*"', "", ir)
    ir = re.sub(r"fptrunc float (%\w+) to bfloat", r"call bfloat @__truncsfbf2(float \1)", ir)
    if re.search(r"fptrunc <\d+ x float> %\w+ to <\d+ x bfloat>", ir):
        raise NotImplementedError(f"{name}: vectors of bfloat are not known to the simulator")
    ir = ir.replace('"frame-pointer"="all"', "")  # of another CPU's ABI
    entry = _entry(ir, kernel)
    ir = _DECLARED.sub(_defined, ir)
    return f'target triple = "{machine.triple}"\ntarget datalayout = "{machine.target_data}"\n{ir}\n{_RUNTIME}{entry}'


@cache
def _machine() -> llvm.TargetMachine:
    """This CPU without FMA: g++ does not contract either."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu="x86-64-v2", features="+f16c,+avx", opt=2, reloc="pic")


def _object(source: str) -> bytes:
    module = llvm.parse_assembly(source)
    module.verify()
    machine = _machine()
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))


class AirLibrary(Library):
    """A kernel of a compiled library; called as one of a text is."""

    def __init__(self, library: Metallib, name: str, constants: dict[int, int] | None = None) -> None:
        ir = str(llvm.parse_bitcode(library.bitcode(name)))
        kernel = kernel_of(ir, name)
        self.options = Options(races=False)
        self._source = ir
        self._path = _built(ir, name, tuple(sorted((constants or {}).items())))
        self._code = _loaded(self._path)
        self._kernels = {name: kernel}


@cache
def _loaded(path: Path):  # type: ignore[no-untyped-def]
    import ctypes

    return ctypes.CDLL(str(path))


def _built(ir: str, name: str, constants: tuple[tuple[int, int], ...]) -> Path:
    runtime_path, _ = build.runtime()
    key = hashlib.sha256(build._identity() + repr((constants, ir)).encode()).hexdigest()[:32]
    path = build.cache_folder() / f"air-{key}.so"

    def make(out: Path) -> None:
        made = out.with_suffix(".o")
        made.write_bytes(_object(to_host(ir, name, dict(constants), _machine())))
        try:
            build._run(["-shared", str(made), str(runtime_path), f"-Wl,-rpath,{runtime_path.parent}", "-o", str(out)])
        finally:
            made.unlink(missing_ok=True)

    build._kept(path, make)
    return path
