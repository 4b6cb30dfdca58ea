"""The MSL source of a kernel: includes, then types and constants, then the files of `kernels/`.

A kernel's file ends with the body of its entry. Its signature is generated here from the list of its buffers: for torch
a `kernel void` whose buffers are bound by position; MLX generates its own from the same names. There are no function
constants and no headers but Metal's, since `torch.mps.compile_shader` takes neither.
"""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from ...core.mask_rules import OFFSET_KINDS
from ...core.storage import LEVEL_WORDS
from .params import FLOATS, INTS, STRIDES
from .spec import KINDS, SIMDGROUPS, Spec

ENTRY = "//: entry\n"
INCLUDES = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
PLACES = (
    "uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]",
    "uint thread_index_in_threadgroup [[thread_index_in_threadgroup]]",
    "uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]",
    "uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]]",
)
PARAMETERS = ("ints", "strides", "floats")


class Buffers(NamedTuple):
    """A kernel's buffers in the order in which they are bound, with their types; the parameters come in between."""

    inputs: dict[str, str]
    outputs: dict[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.inputs, *PARAMETERS, *self.outputs)


_ATTEND = Buffers(
    {
        "q": "TQ", "k": "TK", "v": "TV", "k_scales": "TKS", "v_scales": "TVS", "mask": "uint8_t", "states": "uint8_t",
        "slopes": "float", "sinks": "float", "lengths": "int", "offsets": "int", "cu_q": "int", "cu_k": "int",
        "table": "int",
    },
    {"out": "TQ", "lse": "float", "partial": "float", "partial_ml": "float"},
)  # fmt: skip
BUFFERS = {
    "tiled": _ATTEND,
    "vector": _ATTEND,
    "combine": Buffers(
        {"partial": "float", "partial_ml": "float", "sinks": "float", "cu_q": "int"}, {"out": "TQ", "lse": "float"}
    ),
    "classify": Buffers({"mask": "uint8_t"}, {"states": "uint8_t"}),
}


@cache
def _file(name: str) -> tuple[str, str]:
    """A file's functions and the body of its entry, if it has one."""
    text = (Path(__file__).parent / "kernels" / f"{name}.metal").read_text(encoding="ascii")
    functions, _, body = text.partition(ENTRY)
    return functions, body


@lru_cache(maxsize=1024)
def attention(spec: Spec) -> str:
    """The source of an attention kernel, for torch."""
    return _for_torch(spec.kernel, header(spec))


@lru_cache(maxsize=64)
def combine(q_type: str) -> str:
    """The source of the kernel that combines splits."""
    return _for_torch("combine", combine_header(q_type))


@cache
def classification() -> str:
    """The source of the kernel that classifies a mask's tiles."""
    return _for_torch("classify", classification_header())


def header(spec: Spec) -> str:
    """The source of an attention kernel without its entry."""
    types = {
        "TQ": spec.q_type, "TK": spec.keys.type, "TV": spec.values.type, "TKS": spec.keys.scale_type,
        "TVS": spec.values.scale_type,
    }  # fmt: skip
    constants: dict[str, object] = {"K_KIND": spec.keys.kind, "V_KIND": spec.values.kind}
    constants |= {"DP": spec.keys.columns, "DVP": spec.values.columns}
    if spec.kernel == "tiled":
        constants |= {"DC": spec.keys.slice, "DVC": spec.values.slice}
        constants |= {"SG_ROWS": spec.sg_rows, "SG_COLS": SIMDGROUPS // spec.sg_rows}
    else:
        constants |= {"ROWS": spec.rows, "V_IN_K": int(spec.v_in_k)}
    return _header(spec.kernel, types, constants)


def combine_header(q_type: str) -> str:
    return _header("combine", {"TQ": q_type} | dict.fromkeys(("TK", "TV", "TKS", "TVS"), "float"), _PLAIN)


def classification_header() -> str:
    return _header("classify", dict.fromkeys(("TQ", "TK", "TV", "TKS", "TVS"), "float"), _PLAIN)


def body(kernel: str) -> str:
    """The body of a kernel's entry."""
    return _file(kernel)[1]


_PLAIN: dict[str, object] = {"K_KIND": "PLAIN", "V_KIND": "PLAIN"}


def _header(kernel: str, types: dict[str, str], constants: dict[str, object]) -> str:
    # After the includes: a macro of one letter before them would break Metal's own headers.
    lines = [f"typedef {of} {name};" for name, of in types.items()]
    kinds = {name: number for number, name in enumerate(dict.fromkeys(KINDS.values()))}
    levels = dict(zip(("LEVELS_LOW", "LEVELS_HIGH"), map("{:#x}u".format, LEVEL_WORDS), strict=True))
    lines += [f"#define {name} {value}" for name, value in (kinds | levels | constants).items()]
    return (
        INCLUDES
        + "\n".join(lines)
        + "\n"
        + _params()
        + "".join(_file(name)[0] for name in ("common", "elements", kernel))
    )


@cache
def _params() -> str:
    """The parameter struct and its reader, from the same names that the host packs by (params.py)."""
    kinds = (("int", INTS, "ints"), ("long", STRIDES, "strides"), ("float", FLOATS, "floats"))
    members = "".join(f"  {kind} {name};\n" for kind, names, _ in kinds for name in names)
    reads = "".join(f"  p.{name} = {source}[{i}];\n" for _, names, source in kinds for i, name in enumerate(names))
    offsets = "".join(f"#define OFFSET_{kind.upper()} {number}\n" for kind, number in OFFSET_KINDS.items())
    return (
        f"{offsets}struct Params {{\n{members}}};\n"
        "template <class I, class L, class F> inline Params read_params(I ints, L strides, F floats) {\n"
        f"  Params p;\n{reads}  return p;\n}}\n"
    )


def _for_torch(kernel: str, header: str) -> str:
    buffers = BUFFERS[kernel]
    parameters = {"ints": "constant int*", "strides": "constant long*", "floats": "constant float*"}
    declared = {name: f"device const {of}*" for name, of in buffers.inputs.items()} | parameters
    declared |= {name: f"device {of}*" for name, of in buffers.outputs.items()}
    listed = [f"{of} {name} [[buffer({i})]]" for i, (name, of) in enumerate(declared.items())]
    signature = ",\n    ".join([*listed, *PLACES])
    return f"{header}\nkernel void {kernel}(\n    {signature}) {{\n{body(kernel)}}}\n"
