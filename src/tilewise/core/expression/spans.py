"""Rules that a mask_mod states as the options of a call do: causal, windows, chunks.

Such a mask keeps one interval of keys for each row, as `MaskRules` do, so kernels take it as those: no cell is
evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .build import make
from .mods import MOST, Mods, mods_of
from .node import Node, source
from .text import to_text

LIMIT = 2**29  # of positions and distances, as `core/options.py` has it
Q, K = source("q"), source("k")


@dataclass(frozen=True)
class Rules:
    """`k - q <= right`, `q - k <= left`, and `q // chunk == k // chunk`, each if it is set."""

    left: int | None = None
    right: int | None = None
    chunk: int = 0

    def __and__(self, other: Rules) -> Rules | None:
        """Both; None if no rule says both."""
        if self.chunk and other.chunk and self.chunk != other.chunk:
            return None
        return Rules(least(self.left, other.left), least(self.right, other.right), self.chunk or other.chunk)


def least(a: int | None, b: int | None) -> int | None:
    """The smaller side of two windows; None is unlimited."""
    return b if a is None else a if b is None else min(a, b)


@lru_cache(maxsize=MOST)
def split(mods: Mods) -> tuple[Rules, Mods | None]:
    """The rules among the conditions that a mask_mod joins by `&`, and the functions without them; None if none is
    left.
    """
    if mods.mask is None:
        return Rules(), mods
    found, rest = Rules(), []
    for condition in conditions(mods.mask):
        rule = _rule(condition)
        both = None if rule is None else found & rule
        if both is None:
            rest.append(condition)
        else:
            found = both
    if found == Rules():
        return found, mods
    mask = None
    for condition in rest:
        mask = condition if mask is None else make("and", mask, condition)
    if mask is None and mods.score is None:
        return found, None
    return found, mods_of(to_text((mods.score, mask), mods.tensors))


def conditions(node: Node) -> list[Node]:
    """The conditions that a node joins by `&`."""
    if node.op == "and" and node.kind == "bool":
        return [x for part in node.children for x in conditions(part)]
    return [node]


def _rule(node: Node) -> Rules | None:
    """The rule that a condition states; None if it states none."""
    if node.op in ("le", "lt"):
        a, b = node.children
        strict = node.op == "lt"
        if a.op == "abs" and b.op == "const" and b.kind == "int":  # |q - k| <= n
            distance = _distance(next(a.children))
            if distance is not None and distance[1] == 0:
                return _checked(left=int(b.value) - strict, right=int(b.value) - strict)
            return None
        x, y = _line(a), _line(b)
        if x is None or y is None:
            return None
        # a <= b with a = m q + n k + c: the sum of both sides has to be a distance
        m, n, c = x[0] - y[0], x[1] - y[1], x[2] - y[2] + strict
        if (m, n) == (1, -1):  # q - k <= -c
            return _checked(left=-c)
        return _checked(right=-c) if (m, n) == (-1, 1) else None
    if node.op == "eq":
        a, b = node.children
        if a.op == b.op == "floordiv":
            (row, size), (key, other) = a.children, b.children
            if {row, key} == {Q, K} and size is other and size.op == "const" and 1 <= int(size.value) <= 2 * LIMIT:
                return Rules(chunk=int(size.value))
    return None


def _checked(left: int | None = None, right: int | None = None) -> Rules | None:
    """A rule whose sides a window can have."""
    sides = [side for side in (left, right) if side is not None]
    return Rules(left, right) if all(0 <= side < LIMIT - 1 for side in sides) else None


def _distance(node: Node) -> tuple[int, int] | None:
    """`(sign, c)` of `sign * (q - k) + c`."""
    line = _line(node)
    return None if line is None or (line[0], line[1]) not in ((1, -1), (-1, 1)) else (line[0], line[2])


def _line(node: Node) -> tuple[int, int, int] | None:
    """`(m, n, c)` of `m * q + n * k + c` with m and n of -1 to 1, which no position can make wrap; None otherwise."""
    if node.kind != "int":
        return None
    if node is Q:
        return 1, 0, 0
    if node is K:
        return 0, 1, 0
    if node.op == "const":
        return (0, 0, int(node.value)) if abs(int(node.value)) <= LIMIT else None
    if node.op not in ("add", "sub", "neg"):
        return None
    parts = [_line(x) for x in node.children]
    if any(part is None for part in parts):
        return None
    sign = -1 if node.op in ("sub", "neg") else 1
    first, last = (parts[0] if node.op != "neg" else (0, 0, 0)), parts[-1]
    m, n, c = (x + sign * y for x, y in zip(first, last, strict=True))  # type: ignore[arg-type]
    fits = abs(m) <= 1 and abs(n) <= 1 and m * n <= 0 and abs(c) <= LIMIT
    return (m, n, c) if fits else None
