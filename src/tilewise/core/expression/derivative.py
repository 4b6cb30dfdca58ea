"""Derivatives of a score: by the score it is given, and by each load of a captured float tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

from .build import Value, const, is_const, make
from .node import Node, in_order

Give = Callable[[Value, Value], None]  # adds the second to the adjoint of the first


def derivatives(root: Node) -> dict[Node, Node]:
    """`{x: d root / d x}` for the score and the loads of float tensors that the result depends on smoothly.

    At a kink (abs at 0, equal arguments of max and min) it is one of the one-sided derivatives; comparisons, `floor`
    and ints are constant.
    """
    adjoints: dict[Node, Node] = {root: const(1.0)}

    def give(x: Value, adjoint: Value) -> None:
        if isinstance(x, Node) and x.kind == "float" and isinstance(adjoint, Node) and not is_const(adjoint, 0):
            adjoints[x] = make("add", adjoints[x], adjoint) if x in adjoints else adjoint

    for node in reversed(in_order(root)):
        if node in adjoints and node.op in RULES:
            RULES[node.op](give, adjoints[node], node, *node.args)
    return {x: adjoint for x, adjoint in adjoints.items() if x.op == "load" or (x.op == "in" and x.kind == "float")}


def _mul(give: Give, d: Node, y: Node, a: Node, b: Node) -> None:
    give(a, make("mul", d, b))
    give(b, make("mul", d, a))


def _div(give: Give, d: Node, y: Node, a: Node, b: Node) -> None:
    part = make("div", d, b)
    give(a, part)
    give(b, make("neg", make("mul", part, y)))


def _extreme(op: str) -> Callable[..., None]:
    def rule(give: Give, d: Node, y: Node, a: Node, b: Node) -> None:
        first = make("le", b, a) if op == "max" else make("le", a, b)
        give(a, make("where", first, d, 0.0))
        give(b, make("where", first, 0.0, d))

    return rule


def _where(give: Give, d: Node, y: Node, c: Node, a: Node, b: Node) -> None:
    give(a, make("where", c, d, 0.0))
    give(b, make("where", c, 0.0, d))


def _add(give: Give, d: Node, y: Node, a: Node, b: Node) -> None:
    give(a, d)
    give(b, d)


def _sub(give: Give, d: Node, y: Node, a: Node, b: Node) -> None:
    give(a, d)
    give(b, make("neg", d))


def _of(factor: Callable[[Node, Node], Value]) -> Callable[..., None]:
    """The rule of a function of one argument: `factor(result, argument)` is its derivative."""
    return lambda give, d, y, a: give(a, make("mul", d, factor(y, a)))


RULES: dict[str, Callable[..., None]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "max": _extreme("max"),
    "min": _extreme("min"),
    "where": _where,
    "neg": lambda give, d, y, a: give(a, make("neg", d)),
    "abs": lambda give, d, y, a: give(a, make("where", make("lt", a, 0.0), make("neg", d), d)),
    "exp": _of(lambda y, a: y),
    "exp2": _of(lambda y, a: make("mul", y, math.log(2))),
    "log": lambda give, d, y, a: give(a, make("div", d, a)),
    "log2": lambda give, d, y, a: give(a, make("div", d, make("mul", a, math.log(2)))),
    "tanh": _of(lambda y, a: make("sub", 1.0, make("mul", y, y))),
    "sigmoid": _of(lambda y, a: make("mul", y, make("sub", 1.0, y))),
    "sqrt": lambda give, d, y, a: give(a, make("div", make("mul", d, 0.5), y)),
    "rsqrt": lambda give, d, y, a: give(a, make("div", make("mul", d, make("mul", y, -0.5)), a)),
    "sin": _of(lambda y, a: make("cos", a)),
    "cos": _of(lambda y, a: make("neg", make("sin", a))),
}
