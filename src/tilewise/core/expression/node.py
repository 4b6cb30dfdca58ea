"""Nodes of an expression: an operation, its arguments, and the kind of its result.

Equal nodes are one object, so a graph shares what it computes twice, and `is` compares. All arithmetic is that of a
kernel: `float` is float32, `int` is int32 and wraps, `bool` is a condition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal
from weakref import WeakValueDictionary

Kind = Literal["float", "int", "bool"]
Argument = "Node | int | float | bool | str"

# What a function is given. All but the score are indices: positions of the query and the key, batch row, query head.
INPUTS: dict[str, Kind] = {"s": "float", "b": "int", "h": "int", "q": "int", "k": "int"}
INDICES = ("b", "h", "q", "k")

# The operations, by the form of their arguments and result. `in`, `const` and `load` beside them are leaves: the name
# of an input, a number, and an element of captured tensor number `args[0]` at the indices `args[1:]`.
FLOAT_1 = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil")
NUMBER_1 = ("neg", "abs")  # of floats or ints
NUMBER_2 = ("add", "sub", "mul", "max", "min")
INT_2 = ("floordiv", "mod")  # rounded down; by 0 they are 0
COMPARE = ("eq", "ne", "lt", "le")  # of floats or ints; `a > b` is `b < a`
LOGIC_2 = ("and", "or", "xor")  # of bools, or of the bits of ints
CASTS = ("float", "int")  # to int: towards 0; what does not fit becomes the nearest int, NaN 0
OPERATIONS = (*FLOAT_1, *NUMBER_1, *NUMBER_2, "div", *INT_2, *COMPARE, *LOGIC_2, "not", "where", *CASTS)


class Node:
    """One operation of an expression. Made by `build.make`, which folds constants and casts arguments."""

    __slots__ = ("__weakref__", "args", "inputs", "kind", "op")
    op: str
    args: tuple[Node | int | float | bool | str, ...]
    kind: Kind
    inputs: frozenset[str]  # the inputs that it depends on

    def __repr__(self) -> str:
        words = (
            f"{x.op}(...)" if isinstance(x, Node) and x.args and x.op not in ("in", "const") else x for x in self.args
        )
        return f"{self.op}({', '.join(map(str, words))})"

    def __reduce__(self) -> tuple[object, ...]:
        return (intern, (self.op, self.args, self.kind))

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: object) -> Node:
        return self

    @property
    def children(self) -> Iterator[Node]:
        return (x for x in self.args if isinstance(x, Node))

    @property
    def value(self) -> int | float | bool:
        """The number of a `const`."""
        assert self.op == "const"
        return self.args[0]  # type: ignore[return-value]


_nodes: WeakValueDictionary[tuple[object, ...], Node] = WeakValueDictionary()


def intern(op: str, args: tuple[Node | int | float | bool | str, ...], kind: Kind) -> Node:
    """The node of an operation, arguments and kind."""
    # 1, 1.0 and True are equal, 0.0 and -0.0 too, and NaN is not itself: floats are compared by their bits.
    key = (op, kind, *(x.hex() if isinstance(x, float) else x for x in args))
    if (node := _nodes.get(key)) is None:
        node = object.__new__(Node)
        node.op, node.args, node.kind = op, args, kind
        node.inputs = frozenset([str(args[0])]) if op == "in" else frozenset().union(*(x.inputs for x in node.children))
        node = _nodes.setdefault(key, node)
    return node


def source(name: str) -> Node:
    """An input by its name in `INPUTS`."""
    return intern("in", (name,), INPUTS[name])


def load(tensor: int, indices: Iterable[Node], kind: Kind) -> Node:
    """An element of a captured tensor. An index from -n to -1 counts from the end; one outside is clamped."""
    return intern("load", (tensor, *indices), kind)


def in_order(*roots: Node) -> list[Node]:
    """All nodes of these graphs, each after its arguments."""
    found: dict[Node, None] = {}
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            found[node] = None
        elif node not in found:
            stack.append((node, True))
            stack.extend((x, False) for x in reversed(list(node.children)) if x not in found)
    return list(found)
