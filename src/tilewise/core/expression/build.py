"""Makes nodes: casts the arguments to what an operation takes, and folds constants."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from .node import CASTS, COMPARE, FLOAT_1, INT_2, LOGIC_2, NUMBER_1, NUMBER_2, OPERATIONS, Kind, Node, intern

Value = Node | int | float | bool
LEAST, MOST = -(2**31), 2**31 - 1
RANK: dict[Kind, int] = {"bool": 0, "int": 1, "float": 2}


def const(value: int | float | bool) -> Node:
    """A number as a node; ints wrap to 32 bits."""
    if isinstance(value, bool):
        return intern("const", (value,), "bool")
    if isinstance(value, int):
        return intern("const", (wrap(value),), "int")
    return intern("const", (float(value),), "float")


def wrap(value: int) -> int:
    return (value - LEAST) % 2**32 + LEAST


def as_node(x: Value) -> Node:
    return x if isinstance(x, Node) else const(x)


def cast(x: Value, kind: Kind) -> Node:
    """A node as another kind, as torch converts."""
    x = as_node(x)
    if x.kind == kind:
        return x
    if kind == "bool":
        return make("ne", x, 0 if x.kind == "int" else 0.0)
    if x.op == "const":
        return const(float(x.value) if kind == "float" else to_int(x.value))
    return intern(kind, (x,), kind)


def to_int(x: float) -> int:
    """A float as an int, as kernels convert: towards 0; the nearest int if it does not fit; NaN is 0."""
    return 0 if x != x else int(min(max(x, LEAST), MOST))


def promoted(*nodes: Node, least: Kind = "int") -> Kind:
    """The kind that arithmetic on these is done in."""
    return max((*(x.kind for x in nodes), least), key=RANK.__getitem__)


def make(op: str, *args: Value) -> Node:
    """The node of an operation on nodes or numbers; casts as torch promotes, and folds."""
    assert op in OPERATIONS, op
    nodes = tuple(map(as_node, args))
    if op in CASTS:
        return cast(nodes[0], op)  # type: ignore[arg-type]
    kind: Kind
    if op in FLOAT_1 or op == "div":
        kind, nodes = "float", _all(nodes, "float")
    elif op in NUMBER_1 or op in NUMBER_2:
        kind = promoted(*nodes)
        nodes = _all(nodes, kind)
    elif op in INT_2:
        kind, nodes = "int", _all(nodes, "int")
    elif op in COMPARE:
        kind, nodes = "bool", _all(nodes, promoted(*nodes))
    elif op in LOGIC_2:
        kind = promoted(*nodes, least="bool")
        nodes = _all(nodes, kind)
    elif op == "not":
        kind = nodes[0].kind
    else:
        kind = promoted(*nodes[1:], least="bool")
        nodes = (cast(nodes[0], "bool"), *_all(nodes[1:], kind))
    folded = _fold(op, nodes, kind)
    return intern(op, nodes, kind) if folded is None else folded


def _all(nodes: tuple[Node, ...], kind: Kind) -> tuple[Node, ...]:
    return tuple(cast(x, kind) for x in nodes)


def is_const(x: Node, value: int | float | bool) -> bool:
    return x.op == "const" and x.value == value


def _fold(op: str, nodes: tuple[Node, ...], kind: Kind) -> Node | None:
    """What an operation comes to if its arguments say so. Nothing is folded that could hide a NaN or infinity."""
    if all(x.op == "const" for x in nodes):
        try:
            return const(_round(CONSTANT[op](*(x.value for x in nodes)), kind))
        except (OverflowError, ValueError, ZeroDivisionError):
            return None  # the kernel computes it
    rule = RULES.get(op)
    return None if rule is None else rule(*nodes)


def _round(value: int | float | bool, kind: Kind) -> int | float | bool:
    if kind == "float":
        float32: float = struct.unpack("f", struct.pack("f", value))[0]  # overflows where float32 does
        return value if float32 == value else float(value)
    return bool(value) if kind == "bool" else wrap(int(value))


def _add(x: Node, y: Node) -> Node | None:
    if x.op == "const":  # the constant stands last
        x, y = y, x
        if not is_const(y, 0):
            return make("add", x, y)
    if is_const(y, 0):
        return x
    if y.op == "const" and x.op == "add" and x.kind == "int" and x.args[1].op == "const":  # type: ignore[union-attr]
        return make("add", x.args[0], y.value + x.args[1].value)  # type: ignore[union-attr,arg-type]
    return None


def _sub(x: Node, y: Node) -> Node | None:
    if x.kind == "int":
        if x is y:
            return const(0)
        if y.op == "const":
            return make("add", x, -y.value)
        if x.op == "add" and x.args[1].op == "const" and y.op != "add":  # type: ignore[union-attr]
            return make("add", make("sub", x.args[0], y), x.args[1])  # type: ignore[arg-type]
    return x if is_const(y, 0) else None


def _mul(x: Node, y: Node) -> Node | None:
    if x.op == "const":
        x, y = y, x
        if not is_const(y, 1) and not (y.kind == "int" and is_const(y, 0)):
            return make("mul", x, y)
    if is_const(y, 1):
        return x
    return y if y.kind == "int" and is_const(y, 0) else None


def _compare(same: bool) -> Callable[[Node, Node], Node | None]:
    return lambda x, y: const(same) if x is y and x.kind == "int" else None


def _logic(neutral: bool) -> Callable[[Node, Node], Node | None]:
    """`and` or `or`, whose neutral element this is."""

    def rule(x: Node, y: Node) -> Node | None:
        if x is y:
            return x
        for one, other in ((x, y), (y, x)):
            if one.op == "const" and one.kind == "bool":
                return other if one.value is neutral else one
        return None

    return rule


def _not(x: Node) -> Node | None:
    if x.op == "not":
        return x.args[0]  # type: ignore[return-value]
    if x.op in ("lt", "le") and x.args[0].kind == "int":  # type: ignore[union-attr]
        return make("le" if x.op == "lt" else "lt", x.args[1], x.args[0])  # type: ignore[arg-type]
    return make({"eq": "ne", "ne": "eq"}[x.op], *x.args) if x.op in ("eq", "ne") else None  # type: ignore[arg-type]


def _where(c: Node, x: Node, y: Node) -> Node | None:
    if c.op == "const":
        return x if c.value else y
    if x is y:
        return x
    if c.op == "not":
        return make("where", c.args[0], y, x)  # type: ignore[arg-type]
    if x.kind == "bool" and (x.op == "const" or y.op == "const"):
        if x.op == "const":
            return make("or", c, y) if x.value else make("and", make("not", c), y)
        return make("or", make("not", c), x) if y.value else make("and", c, x)
    return None


def _same(x: Node, y: Node) -> Node | None:
    return x if x is y else None


RULES: dict[str, Callable[..., Node | None]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": lambda x, y: x if is_const(y, 1) else None,
    "floordiv": lambda x, y: x if is_const(y, 1) else None,
    "mod": lambda x, y: const(0) if is_const(y, 1) else None,
    "max": _same,
    "min": _same,
    "eq": _compare(True),
    "ne": _compare(False),
    "lt": _compare(False),
    "le": _compare(True),
    "and": _logic(True),
    "or": _logic(False),
    "not": _not,
    "neg": lambda x: x.args[0] if x.op == "neg" else None,
    "where": _where,
}
CONSTANT: dict[str, Callable[..., int | float | bool]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "floordiv": lambda x, y: x // y if y else 0,
    "mod": lambda x, y: x % y if y else 0,
    "max": lambda x, y: x if x != x else max(x, y),
    "min": lambda x, y: x if x != x else min(x, y),
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x: not x if isinstance(x, bool) else ~x,
    "where": lambda c, x, y: x if c else y,
    "neg": lambda x: -x,
    "abs": abs,
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "sin": math.sin,
    "cos": math.cos,
    "floor": lambda x: float(math.floor(x)),
    "ceil": lambda x: float(math.ceil(x)),
}
