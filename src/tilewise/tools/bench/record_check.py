"""Checks the types of the values in a record's file, which may be damaged, forged or another program's.

Missing names are found where they are read.
"""

from __future__ import annotations

from typing import Any

MOST = 1e300  # a number that sums and products of floats can take


def text(x: Any) -> bool:
    return isinstance(x, str)


def flag(x: Any) -> bool:
    return isinstance(x, bool)


def number(x: Any) -> bool:
    """A finite number from 0 on: Python's JSON also reads NaN, Infinity and ints of any size."""
    return type(x) in (int, float) and 0 <= x <= MOST


def positive(x: Any) -> bool:
    return number(x) and x > 1 / MOST


def number_or_none(x: Any) -> bool:
    return x is None or number(x)


def positive_or_none(x: Any) -> bool:
    return x is None or positive(x)


def text_or_none(x: Any) -> bool:
    return x is None or text(x)


def error(x: Any) -> bool:
    """A number, or NaN and infinity as words."""
    return number_or_none(x) or x in ("nan", "inf")


def fact(x: Any) -> bool:
    """A property of a machine."""
    return number_or_none(x) or text(x) or flag(x)


TIMING = {"seconds": positive, "median": number, "spread": number, "rounds": number, "repeats": number}
CELL = {
    "group": text, "name": text, "metric": text, "refused": {"": text}, "x": positive_or_none, "allowed": number,
    "flops": number, "bytes": number, "workspace": number, "plan": text, "cells": number, "tiles": number,
    "memory": number_or_none, "ways": [{"name": text, "timing": TIMING, "error": error, "note": text}],
}  # fmt: skip
ROW = {
    "name": text, "against": text, "verdict": text, "is_share": flag, "bar": positive, "least": number,
    "value": number_or_none,
}  # fmt: skip
RECORD = {
    "suite": text, "dtype": text, "date": text, "command": text, "quick": flag, "complete": flag, "seconds": number,
    "device": {"last_cache_bytes": number, "threads": positive, "": fact}, "versions": {"": text_or_none},
    "environment": {"": text}, "peers": {"": text_or_none}, "notes": [text],
    "ceilings": {"matmul_dtype": text, "": number}, "cells": [CELL], "rows": [ROW],
}  # fmt: skip


def check(value: Any, kind: Any = RECORD, where: str = "") -> None:
    """Raises `ValueError` at the first value that is not of its kind.

    Args:
        kind: a list with the kind of every item, a dict with the kind of each name (of all others under ""), or a
            function that tells whether a value is valid.
    """
    if isinstance(kind, list) and isinstance(value, list):
        for i, item in enumerate(value):
            check(item, kind[0], f"{where}[{i}]")
    elif isinstance(kind, dict) and isinstance(value, dict):
        for name, item in value.items():
            if (of := kind.get(name, kind.get(""))) is not None:
                check(item, of, f"{where}.{name}" if where else name)
    elif not callable(kind) or not kind(value):
        raise ValueError(f"{where or 'the file'} is of another kind")
