"""From a Metal text to C++ for OpenCL: a kernel's signature, its positions and its template's arguments.

All else is in `metal.h`, or the same in both languages.
"""

import re
from typing import NamedTuple

ENTRY = "tw"
_ATTRIBUTE = re.compile(r"\s*\[\[[^\]]*\]\]")
_DIRECTIVE = re.compile(r"^#(include <|pragma METAL).*$", re.MULTILINE)
_VECTOR = re.compile(r"\b(u?(?:short|int|long|float|half)[234])\(")  # short2(a, b)
# Positions in Metal's grid, by their attribute.
POSITIONS = {
    "threadgroup_position_in_grid": "uint3(uint(get_group_id(0)), uint(get_group_id(1)), uint(get_group_id(2)))",
    "thread_position_in_grid": "uint3(uint(get_global_id(0)), uint(get_global_id(1)), uint(get_global_id(2)))",
    "thread_position_in_threadgroup": "uint3(uint(get_local_id(0)), uint(get_local_id(1)), uint(get_local_id(2)))",
    "threadgroups_per_grid": "uint3(uint(get_num_groups(0)), uint(get_num_groups(1)), uint(get_num_groups(2)))",
    "thread_index_in_threadgroup": "uint(get_local_linear_id())",
    "thread_index_in_simdgroup": "uint(get_sub_group_local_id())",
    "simdgroup_index_in_threadgroup": "uint(get_sub_group_id())",
}


class Instance(NamedTuple):
    """A template's parameters: typedefs and numbers, which then stand before the text."""

    types: dict[str, str]
    numbers: dict[str, int]


def to_opencl(text: str, kernel: str, threads: tuple[int, int, int], instance: Instance | None = None) -> str:
    """The text with `kernel` as the only entry."""
    text = _DIRECTIVE.sub("", text).replace("using namespace metal;", "")
    head, signature, body, rest = _cut(text, kernel)
    if instance is not None:
        head = _without_kernels(head[: head.rindex("template <")])
        head += "".join(f"typedef {of} {name};\n" for name, of in instance.types.items())
        head += "".join(f"constant constexpr int {name} = {number};\n" for name, number in instance.numbers.items())
        rest = ""  # other kernels
    buffers, positions = [], []
    for parameter in _split(signature):
        declared, attribute = _ATTRIBUTE.sub("", parameter).strip(), re.search(r"\[\[(\w+)", parameter)
        if attribute and attribute[1] in POSITIONS:
            positions.append(f"  const {declared} = {_position(declared, attribute[1])};\n")
        else:
            buffers.append(declared.replace("&", "* ") if "&" in declared else declared)
    references = [p.split("&")[1].strip() for p in map(_bare, _split(signature)) if "&" in p]
    for name in references:  # OpenCL passes numbers by pointers only
        body = re.sub(rf"\b{name}\b", f"(*{name})", body)
    sizes = ", ".join(map(str, threads))
    entry = f"__kernel __attribute__((reqd_work_group_size({sizes}))) void {ENTRY}({', '.join(buffers)})"
    body = _VECTOR.sub(r"(\1)(", body)
    head = _VECTOR.sub(r"(\1)(", head)
    whole = f"{head}\n{entry} {{\n{''.join(positions)}{body}}}\n{rest}"
    return f'#include "metal.h"\nusing namespace metal;\n{_ATTRIBUTE.sub("", whole)}'


def _bare(parameter: str) -> str:
    return _ATTRIBUTE.sub("", parameter).strip()


def _position(declared: str, attribute: str) -> str:
    of, whole = declared.split()[0], POSITIONS[attribute]
    return whole.replace("uint3(", "(uint3)(") if of == "uint3" else whole


def _cut(text: str, kernel: str) -> tuple[str, str, str, str]:
    """What stands before a kernel, its parameters, its body, and what stands after it."""
    found = re.search(rf"(?:\bkernel|\[\[\s*kernel\b[^\]]*\]\])[^;{{}}(]*\bvoid\s+{kernel}\s*\(", text)
    if found is None:
        raise ValueError(f"no kernel {kernel} in the text")
    end = _closing(text, found.end() - 1, "()")
    start = text.index("{", end)
    last = _closing(text, start, "{}")
    return text[: found.start()], text[found.end() : end], text[start + 1 : last], text[last + 1 :]


def _without_kernels(text: str) -> str:
    """Other kernels have threadgroup arrays, which OpenCL has in entries only."""
    while found := re.search(r"\[\[\s*kernel\b[^\]]*\]\]\s*void\s+\w+\s*\(", text):
        body = text.index("{", _closing(text, found.end() - 1, "()"))
        text = text[: text.rindex("template <", 0, found.start())] + text[_closing(text, body, "{}") + 1 :]
    return text


def _closing(text: str, at: int, pair: str) -> int:
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i
    raise ValueError("a bracket is not closed")


def _split(signature: str) -> list[str]:
    """Parameters: commas within brackets do not divide them."""
    return [p.strip() for p in re.split(r",(?![^\[(<]*[\])>])", signature) if p.strip()]
