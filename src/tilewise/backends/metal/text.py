"""The MSL source of a kernel: includes, then, in a namespace, types, options and constants, and files of `kernels/`.

A kernel's file ends with the body of its entry. Its signature is generated here from the list of the buffers that its
options need: for torch a `kernel void` whose buffers are bound by position; MLX generates its own from the same names.
There are no function constants and no headers but Metal's, since `torch.mps.compile_shader` takes neither.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache, cached_property, lru_cache
from pathlib import Path

from ...core.mask_rules import OFFSET_KINDS
from ...core.storage import LEVEL_WORDS
from .params import FLOATS, INTS, STRIDES
from .spec import KINDS, SIMDGROUPS, THREADS, Operand, Options, Spec

LANES = 32
ENTRY = "//: entry\n"
FIRST = "using namespace tilewise;\n"
INCLUDES = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
PLACES = (
    "uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]",
    "uint thread_index_in_threadgroup [[thread_index_in_threadgroup]]",
    "uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]",
    "uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]",
)
PARAMETERS = {"ints": "constant int*", "strides": "constant long*", "floats": "constant float*"}
Types = dict[str, str]


@dataclass(frozen=True)
class Source:
    """A kernel's source, and its buffers in the order in which they are bound, with their types: parameters come in
    between.
    """

    kernel: str
    inputs: Types
    outputs: Types
    header: str  # all but its entry
    body: str

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.inputs, *PARAMETERS, *self.outputs)

    @cached_property
    def torch(self) -> str:
        """The whole text, with a signature for `torch.mps.compile_shader`."""
        declared = {name: f"device const {of}*" for name, of in self.inputs.items()} | PARAMETERS
        declared |= {name: f"device {of}*" for name, of in self.outputs.items()}
        listed = [f"{of} {name} [[buffer({i})]]" for i, (name, of) in enumerate(declared.items())]
        signature = ",\n    ".join([*listed, *PLACES])
        return f"{self.header}\nkernel void {self.kernel}(\n    {signature}) {{\n{self.body}}}\n"

    def __hash__(self) -> int:
        return hash((self.header, self.body))


@cache
def _file(name: str) -> tuple[str, str]:
    """A file's functions and the body of its entry, if it has one."""
    text = (Path(__file__).parent / "kernels" / f"{name}.metal").read_text(encoding="ascii")
    functions, _, body = text.partition(ENTRY)
    return functions, body


@lru_cache(maxsize=1024)
def attention(spec: Spec) -> Source:
    """An attention kernel."""
    o, keys, values = spec.options, spec.keys, spec.values
    wanted = {
        "q": spec.q_type, "k": keys.type, "v": values.type,
        "k_scales": keys.scale_type * (keys.kind != "PLAIN"), "v_scales": values.scale_type * (values.kind != "PLAIN"),
        "mask": "uint8_t" * (o.mask > 0), "states": "uint8_t" * o.states, "slopes": "float" * o.slopes,
        "sinks": "float" * (o.sinks and not o.splits), "lengths": "int" * o.lengths,
        "offsets": "int" * (o.offset == OFFSET_KINDS["rows"]), "cu_q": "int" * o.packed, "cu_k": "int" * o.varlen,
        "table": "int" * (o.page > 0),
    }  # fmt: skip
    types = {
        "TQ": spec.q_type, "TK": keys.type, "TV": values.type, "TKS": keys.scale_type, "TVS": values.scale_type,
        "Step": "long" if o.far else "int",
    }  # fmt: skip
    constants = _constants(o) | _operand("K", keys, o.wide) | _operand("V", values, o.wide)
    constants |= {"DP": keys.columns, "DVP": values.columns, "HEAD_DIM": keys.width, "VALUE_DIM": values.width}
    if spec.kernel == "tiled":
        columns = SIMDGROUPS // spec.sg_rows
        types |= {"QT": spec.q_type, "KT": keys.tile, "VT": values.tile}
        constants |= {"DC": keys.slice(8), "DVC": values.slice(8 * columns)}
        constants |= {"SG_ROWS": spec.sg_rows, "SG_COLS": columns}
        wide = o.wide and spec.q_type != "float"
        constants |= {"Q_WIDE": wide and keys.width % 8 == 0, "OUT_WIDE": wide and values.width % 2 == 0}
    else:
        constants |= {"ROWS": spec.rows, "V_IN_K": spec.v_in_k}
    outputs = {"partial": "float", "partial_ml": "float"}
    if not o.splits:
        outputs = {"out": spec.q_type} | ({"lse": "float"} if o.lse else {})
    inputs = {name: of for name, of in wanted.items() if of}
    return _source(spec.kernel, ("rows", "elements"), inputs, outputs, types, constants, THREADS)


@lru_cache(maxsize=64)
def combine(q_type: str, o: Options) -> Source:
    """The kernel that combines splits."""
    inputs = {"partial": "float", "partial_ml": "float"}
    inputs |= {"sinks": "float"} if o.sinks else {}
    inputs |= {"cu_q": "int"} if o.packed else {}
    outputs = {"out": q_type} | ({"lse": "float"} if o.lse else {})
    return _source("combine", (), inputs, outputs, {"TQ": q_type}, _constants(o), LANES)


@cache
def classification(mask: int) -> Source:
    """The kernel that classifies a mask's tiles."""
    constants = _constants(Options(mask=mask))
    return _source("classify", (), {"mask": "uint8_t"}, {"states": "uint8_t"}, {}, constants, LANES)


def _constants(options: Options) -> dict[str, object]:
    kinds: dict[str, object] = {name: number for number, name in enumerate(dict.fromkeys(KINDS.values()))}
    kinds |= dict(zip(("LEVELS_LOW", "LEVELS_HIGH"), map("{:#x}u".format, LEVEL_WORDS), strict=True))
    kinds |= {f"OFFSET_{kind.upper()}": number for kind, number in OFFSET_KINDS.items()}
    return kinds | {field.name.upper(): getattr(options, field.name) for field in fields(options)}


def _operand(name: str, x: Operand, wide: bool) -> dict[str, object]:
    """What the text knows of K or V. Non-finite numbers of 16 bits are found by their exponents, two at a time."""
    exponent = {"half": 0x7C00, "bfloat": 0x7F80}.get(x.type, 0)
    lowest = exponent & -exponent
    return {
        f"{name}_KIND": x.kind,
        f"{name}_GROUP": x.group,
        f"{name}_SCALED": x.kind != "PLAIN",
        f"{name}_WIDE": wide and exponent > 0 and x.width % 8 == 0,
        f"{name}_EXPONENTS": f"{exponent << 16 | exponent:#x}u",
        f"{name}_LOWEST_BITS": f"{lowest << 16 | lowest:#x}u",
    }


def _source(
    kernel: str,
    files: tuple[str, ...],
    inputs: Types,
    outputs: Types,
    types: Types,
    constants: dict[str, object],
    threads: int,
) -> Source:
    # After the includes: a macro of one letter before them would break Metal's own headers.
    lines = [INCLUDES.rstrip(), "namespace tilewise {"]
    lines += [f"typedef {of} {name};" for name, of in types.items()]
    lines += [f"#define {name} {int(value) if isinstance(value, bool) else value}" for name, value in constants.items()]
    members = [f"  device const {of}* {name};" for name, of in inputs.items()]
    members += [f"  device {of}* {name};" for name, of in outputs.items()]
    lines += [_params(), "struct Tensors {", *members, "};", ""]
    functions = "".join(_file(name)[0] for name in ("common", *files, kernel))
    # Metal's compiler keeps to the registers of 1024 threads unless it is told. The last line: MLX's entry follows it.
    limit = f"[[max_total_threads_per_threadgroup({threads})]]"
    body = _file(kernel)[1]
    assert body.startswith(FIRST)
    bound = f"{FIRST}const Tensors t = {{{', '.join((*inputs, *outputs))}}};\n{body.removeprefix(FIRST)}"
    return Source(kernel, inputs, outputs, "\n".join(lines) + functions + f"}} // namespace tilewise\n{limit}", bound)


@cache
def _params() -> str:
    """The parameter struct and its reader, from the same names that the host packs by (params.py)."""
    kinds = (("int", INTS, "ints"), ("long", STRIDES, "strides"), ("float", FLOATS, "floats"))
    members = "".join(f"  {kind} {name};\n" for kind, names, _ in kinds for name in names)
    reads = "".join(f"  p.{name} = {source}[{i}];\n" for _, names, source in kinds for i, name in enumerate(names))
    return (
        f"struct Params {{\n{members}}};\n"
        "template <class I, class L, class F> inline Params read_params(I ints, L strides, F floats) {\n"
        f"  Params p;\n{reads}  return p;\n}}"
    )
