"""MSL text made into C++: kernels and their parameters are read from it, threadgroup arrays are given their memory."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

# What a kernel's parameter without a buffer may be: a field of `Here` in include/mslsim/runtime.h.
POSITIONS = frozenset(
    "thread_position_in_grid thread_position_in_threadgroup threadgroup_position_in_grid threads_per_grid "
    "threads_per_threadgroup threadgroups_per_grid dispatch_threads_per_threadgroup thread_index_in_threadgroup "
    "thread_index_in_simdgroup simdgroup_index_in_threadgroup simdgroups_per_threadgroup "
    "dispatch_simdgroups_per_threadgroup threads_per_simdgroup thread_execution_width".split()
)

_ATTRIBUTES = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
_KERNEL = re.compile(
    r"(?P<attributes>(?:\[\[[^\]]*\]\]\s*)*)(?P<word>\bkernel\s+)?(?P<more>(?:\[\[[^\]]*\]\]\s*)*)\bvoid\s+(?P<name>\w+)\s*\("
)
_TEMPLATE = re.compile(r"\btemplate\s*<[^;{}]*>\s*$")
_INSTANCE = re.compile(
    r'\btemplate\s*\[\[\s*host_name\("(?P<host>\w+)"\)\s*\]\]\s*(?:\[\[\s*kernel\s*\]\]|\bkernel)\s+'
    r"(?:decltype\([^;]*\)|void)\s+(?P<name>\w+)\s*<(?P<arguments>[^;()]*)>\s*(?:\([^;]*\))?\s*;"
)
_SHARED = re.compile(
    r"\bthreadgroup\s+(?P<type>(?:(?:unsigned|signed)\s+)?[A-Za-z_][\w:]*(?:\s*<[^;{}()]*>)?)\s+"
    r"(?P<names>[A-Za-z_]\w*\s*(?:\[[^;\[\]]*\]\s*)*(?:,\s*[A-Za-z_]\w*\s*(?:\[[^;\[\]]*\]\s*)*)*);"
)
# `constant` becomes `const`, which must not stand there twice.
_QUALIFIERS = re.compile(r"\b(?:(?:const|constexpr|constant|static|inline)\s+)+")
# 32 KiB in all: more arrays than this would be less than 512 bytes each.
MAX_ARRAYS = 64


@dataclass
class Parameter:
    """A kernel's parameter: a buffer (its index), or a position (its attribute)."""

    name: str
    index: int | None = None
    position: str = ""
    reference: bool = False
    unit: int = 0  # bytes of an element, known when compiled
    writable: bool = False


@dataclass
class Kernel:
    name: str
    function: str  # with template arguments
    line: int
    parameters: list[Parameter]
    max_threads: int | None = None
    arrays: list[int] = field(default_factory=list)  # ids of its threadgroup arrays
    shared_bytes: int = 0

    @staticmethod
    def from_json(record: dict[str, Any]) -> "Kernel":
        return Kernel(**{**record, "parameters": [Parameter(**p) for p in record["parameters"]]})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_ascii(source: str) -> None:
    """Metal takes the text as ASCII: comments too."""
    for number, line in enumerate(source.splitlines(), 1):
        if not line.isascii():
            bad = next(c for c in line if not c.isascii())
            raise SyntaxError(f"line {number}: {bad!r} is not ASCII")


def without_comments(source: str) -> str:
    """Comments become spaces; every other character stays where it is."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
    return pattern.sub(lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), source)


def split_arguments(text: str) -> list[str]:
    """Splits at the commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]] if text.strip() else []


def closing(text: str, start: int, pair: str) -> int:
    """Where the bracket that is open at `start` is closed."""
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i
    raise SyntaxError(f"{pair[0]} is never closed")


def _attributes(text: str) -> dict[str, str]:
    """Names and arguments of all [[name(argument), ...]] in a text."""
    found = {}
    for m in _ATTRIBUTES.finditer(text):
        for one in split_arguments(m[1]):
            name, _, argument = one.strip().partition("(")
            found[name.strip()] = argument.removesuffix(")").strip()
    return found


def _parameters(text: str, kernel: str) -> Iterator[Parameter]:
    next_index = 0
    for part in split_arguments(text):
        attributes = _attributes(part)
        declared = _ATTRIBUTES.sub("", part).strip()
        name = re.findall(r"\w+", declared)[-1]
        if "threadgroup" in attributes or re.match(r"(const\s+)?threadgroup\b", declared):
            raise SyntaxError(f"kernel {kernel}: {name} is threadgroup memory, which compile_shader cannot pass")
        position = next((a for a in attributes if a in POSITIONS), "")
        if position:
            yield Parameter(name, position=position)
        elif "*" in declared or "&" in declared:
            index = int(attributes["buffer"]) if "buffer" in attributes else next_index
            next_index = index + 1
            yield Parameter(name, index=index, reference="&" in declared)
        else:
            raise SyntaxError(f"kernel {kernel}: the parameter {name} is neither a buffer nor a position of a thread")


def line_of(text: str, position: int) -> int:
    """The line of the source, in text that has the preprocessor's markers."""
    before = text[:position]
    markers = list(re.finditer(r'^# (\d+) "[^\n]*\n', before, re.MULTILINE))
    if not markers:
        return before.count("\n") + 1
    return int(markers[-1][1]) + before.count("\n", markers[-1].end())


def to_cpp(text: str) -> tuple[str, list[Kernel]]:
    """`text` has gone through the preprocessor already. Lines stay where they are."""
    instances: dict[str, list[tuple[str, str]]] = {}
    for m in _INSTANCE.finditer(text):
        instances.setdefault(m["name"], []).append((m["host"], m["arguments"]))
    text = _INSTANCE.sub(lambda m: "\n" * m[0].count("\n"), text)

    kernels, bodies = [], []
    for m in _KERNEL.finditer(text):
        attributes = _attributes(m["attributes"] + m["more"])
        if not m["word"] and "kernel" not in attributes:
            continue
        end = closing(text, m.end(), "()")
        open_brace = text.index("{", end)
        parameters = list(_parameters(text[m.end() : end], m["name"]))
        limit = attributes.get("max_total_threads_per_threadgroup", "")
        host = attributes.get("host_name", "").strip('"') or m["name"]
        line = line_of(text, m.start())
        is_template = _TEMPLATE.search(text[: m.start()]) is not None
        named = (
            [(h, f"{m['name']}<{a}>") for h, a in instances.get(m["name"], [])] if is_template else [(host, m["name"])]
        )
        here = [
            Kernel(h, f, line, [Parameter(**vars(p)) for p in parameters], int(limit) if limit.isdigit() else None)
            for h, f in named
        ]
        bodies.append((open_brace, closing(text, open_brace + 1, "{}"), here))
        kernels += here

    ids = 0

    def allocated(m: re.Match[str]) -> str:
        nonlocal ids
        body = next((b for b in bodies if b[0] < m.start() < b[1]), None)
        if body is None:
            raise SyntaxError(f"line {line_of(text, m.start())}: threadgroup variables belong into a kernel's own body")
        made = ""
        for declared in split_arguments(m["names"]):
            name, dims = re.match(r"\s*(\w+)\s*((?:\[[^\]]*\]\s*)*)", declared).groups()  # type: ignore[union-attr]
            for kernel in body[2]:
                kernel.arrays.append(ids)
            made += f'{m["type"]} (&{name}){dims} = mslsim::shared_array<{ids}, __LINE__, {m["type"]}{dims}>("{name}");'
            ids += 1
        return made + "\n" * m[0].count("\n")

    text = _SHARED.sub(allocated, text)
    if ids > MAX_ARRAYS:
        raise SyntaxError(f"{ids} threadgroup arrays: the simulator has room for {MAX_ARRAYS} in one source")
    text = _ATTRIBUTES.sub(lambda m: "\n" * m[0].count("\n"), text)
    return _QUALIFIERS.sub(_once_const, text), kernels


def _once_const(m: re.Match[str]) -> str:
    words = m[0].split()
    if "constant" not in words or not {"const", "constexpr"} & set(words):
        return m[0]
    return re.sub(r"\bconstant\b", "", m[0])


def entries(kernels: list[Kernel]) -> str:
    """C++ by which the runtime calls each kernel, and by which we learn of its parameters."""
    out = []
    for k in kernels:
        arguments = [
            f"mslsim::here().{p.position}"
            if p.position
            else f"mslsim::{'Reference' if p.reference else 'Pointer'}{{{p.index}}}"
            for p in k.parameters
        ]
        # By its address: a call would deduce template arguments from what we give.
        call = f"const auto mslsim_kernel = &::{k.function}; mslsim_kernel({', '.join(arguments)});"
        out.append(f'extern "C" void mslsim_enter_{k.name}() {{ {call} }}')
        out.append(
            f'extern "C" void mslsim_describe_{k.name}(mslsim::Parameter* mslsim_out) '
            f"{{ mslsim::describe(&::{k.function}, mslsim_out); }}"
        )
    return "\n".join(out) + "\n"
