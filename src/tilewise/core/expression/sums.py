"""How gradients of captured tensors are summed: by what the indices of a load are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from .mods import Mods
from .node import Node, in_order

# The indices of a load are made of b, h and: q (rows), k (keys), q - k (distances), anything (cells). Its terms are
# summed over all else before the index is computed.
Axis = Literal["rows", "keys", "distances", "cells"]
AXES: tuple[Axis, ...] = ("rows", "keys", "distances", "cells")


class LoadGradient(NamedTuple):
    """A load of a captured tensor, the derivative of the score by it, and its axis."""

    load: Node
    derivative: Node
    axis: Axis

    @property
    def number(self) -> int:
        """The number of the captured tensor."""
        return int(self.load.args[0])  # type: ignore[arg-type]


def load_gradients(mods: Mods, numbers: Sequence[int], equal_strides: bool) -> tuple[LoadGradient, ...]:
    """What gradients of captured tensors `numbers` consist of. `equal_strides`: positions of queries and of keys have
    the same stride in all sequences, so that q - k follows from the distance of a query and a key by their numbers.
    """
    found = (LoadGradient(x, d, axis_of(list(x.children), equal_strides)) for x, d in mods.by_loads.items())
    return tuple(x for x in found if x.number in numbers)


def axis_of(indices: Sequence[Node], equal_strides: bool = True) -> Axis:
    """What indices are made of."""
    inputs = frozenset().union(*(x.inputs for x in indices))
    if "s" in inputs:
        return "cells"
    if "k" not in inputs:
        return "rows"
    if "q" not in inputs:
        return "keys"
    return "distances" if equal_strides and are_of_distances(indices) else "cells"


def are_of_distances(roots: Sequence[Node]) -> bool:
    """Whether nodes depend on q and k by their difference alone."""
    growth: dict[Node, tuple[int, int] | None] = {}  # with q and k, of linear nodes
    known: dict[Node, bool] = {}
    for node in in_order(*roots):
        growth[node] = _growth(node, growth)
        alone = growth[node]
        children = list(node.children)
        known[node] = (
            not node.inputs & {"q", "k"}
            or (alone is not None and alone[0] == -alone[1])
            or (bool(children) and all(known[x] for x in children))
        )
    return all(known[x] for x in roots)


def _growth(node: Node, growth: dict[Node, tuple[int, int] | None]) -> tuple[int, int] | None:
    if not node.inputs & {"q", "k"}:
        return 0, 0
    if node.op == "in":
        return int(node.args[0] == "q"), int(node.args[0] == "k")
    parts = [growth[x] for x in node.children]
    if node.kind != "int" or None in parts:
        return None
    (q, k), (q2, k2) = (parts[0], parts[-1])  # type: ignore[misc]
    if node.op == "neg":
        return -q, -k
    if node.op in ("add", "sub"):
        sign = 1 if node.op == "add" else -1
        return q + sign * q2, k + sign * k2
    if node.op == "mul":
        factor = list(node.children)[1]
        return (q * int(factor.value), k * int(factor.value)) if factor.op == "const" else None
    return None
