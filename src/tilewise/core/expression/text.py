"""An expression as one line of text, which parses back: its key, and its form in operators and other processes.

Captured tensors as `dtype` and rank; operations separated by `;`, arguments by spaces; `%n` is the result of operation
n, other arguments are inputs, ints, floats (with a point, or `inf`, `nan`), `T`, `F`. Roots follow after `|`; `-` is
none. A load has its tensor's number in its name.

    float32:2|sub q k;load0 h %0;add s %1|%2 -
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .build import const, make
from .node import INPUTS, OPERATIONS, Kind, Node, in_order, load, source


def to_text(roots: Iterable[Node | None], tensors: Iterable[tuple[str, int]]) -> str:
    """The text of an expression; `tensors` are dtype and rank of each."""
    roots = list(roots)
    names: dict[Node, str] = {}
    lines: list[str] = []
    for node in in_order(*(root for root in roots if root is not None)):
        if node.op == "in":
            names[node] = str(node.args[0])
        elif node.op == "const":
            names[node] = _number(node.value)
        else:
            op = f"load{node.args[0]}" if node.op == "load" else node.op
            names[node] = f"%{len(lines)}"
            lines.append(" ".join([op, *(names[x] for x in node.children)]))
    declared = " ".join(f"{dtype}:{rank}" for dtype, rank in tensors)
    return f"{declared}|{';'.join(lines)}|{' '.join('-' if root is None else names[root] for root in roots)}"


def _number(value: int | float | bool) -> str:
    if isinstance(value, bool):
        return "T" if value else "F"
    return repr(value)


def from_text(text: str) -> tuple[list[Node | None], list[tuple[str, int]]]:
    """Roots and tensors of a text."""
    declared, body, ends = text.split("|")
    tensors = [(dtype, int(rank)) for dtype, rank in (x.split(":") for x in declared.split())]
    results: list[Node] = []

    def argument(word: str) -> Node:
        if word.startswith("%"):
            return results[int(word[1:])]
        if word in INPUTS:
            return source(word)
        if word in "TF":
            return const(word == "T")
        return const(int(word) if word.lstrip("-").isdigit() else float(word))

    for line in filter(None, body.split(";")):
        op, *words = line.split(" ")
        args = [argument(word) for word in words]
        if op.startswith("load") and op[4:].isdigit():
            dtype, rank = tensors[int(op[4:])]
            if len(args) != rank:
                raise ValueError(f"{len(args)} indices of a tensor of rank {rank}: {line}")
            results.append(load(int(op[4:]), args, kind_of(dtype)))
        elif op in OPERATIONS:
            results.append(make(op, *args))
        else:
            raise ValueError(f"no operation {op}: {line}")
    return [None if word == "-" else argument(word) for word in ends.split()], tensors


def kind_of(dtype: str) -> Kind:
    """The kind of a dtype by its name, `float32` or `int8`."""
    if dtype == "bool":
        return "bool"
    return "float" if "float" in dtype else "int"


def renumbered(root: Node, numbers: Mapping[int, int]) -> Node:
    """The graph with other numbers for its captured tensors."""
    return root if all(old == new for old, new in numbers.items()) else rebuilt(root, {}, numbers)


def rebuilt(root: Node, new: Mapping[Node, Node], numbers: Mapping[int, int] | None = None) -> Node:
    """The graph with nodes replaced, and with other numbers for its captured tensors."""
    made = dict(new)
    for node in in_order(root):
        if node in made:
            continue
        args = tuple(made[x] if isinstance(x, Node) else x for x in node.args)
        if node.op == "load":
            number = int(args[0])  # type: ignore[arg-type]
            made[node] = load(number if numbers is None else numbers[number], args[1:], node.kind)  # type: ignore[arg-type]
        else:
            made[node] = make(node.op, *args) if node.op in OPERATIONS else node  # type: ignore[arg-type]
    return made[root]
