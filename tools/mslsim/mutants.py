"""Texts with a mistake planted in them, to see whether it is found."""

import re
from dataclasses import dataclass

from mslsim.text import line_of, without_comments

_BARRIER = re.compile(r"\b(threadgroup|simdgroup)_barrier\s*\([^;]*\)\s*;")


@dataclass(frozen=True)
class Barrier:
    """A barrier of a text, and the text without it."""

    kind: str
    line: int
    without: str


def barriers(source: str) -> list[Barrier]:
    """Every barrier in the text. An empty statement stays in its place, so that `if (x) barrier();` keeps its shape."""
    found = _BARRIER.finditer(without_comments(source))
    return [Barrier(m[1], line_of(source, m.start()), source[: m.start()] + ";" + source[m.end() :]) for m in found]


def mutate(source: str, old: str, new: str, count: int = 1) -> str:
    """`source` with `old` replaced by `new`, which must occur `count` times: a mutant that is none proves nothing."""
    there = source.count(old)
    if there != count:
        raise ValueError(f"wanted {count} times in the text, found {there} times: {old!r}")
    return source.replace(old, new)
