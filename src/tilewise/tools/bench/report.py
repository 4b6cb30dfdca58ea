"""Results for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.atomic_write import write_or_rescue, write_whole

SPEEDS = "ratios are speeds: 2x is twice as fast as the peer, in half its time; shares are of the speed that is named"


def heading(about: Mapping[str, Any]) -> list[str]:
    """The machine, the versions, the ceilings and how to read the tables, in lines."""
    device, versions = about["device"], about["versions"]
    width = device["vector_width"]
    lines = [
        *([f"{device['gpu']}, {device['processors']} processors, CUDA {device['cuda']}"] if "gpu" in device else []),
        f"{device['cpu']}, {device['cores']} cores, {device['threads']} threads, "
        + (f"vectors of {width} floats, " if width else "no numba, ")
        + f"last cache {device['last_cache_bytes'] / 1024**2:.0f} MiB",
        ", ".join(f"{name} {text}" for name, text in versions.items() if text),
        f"{about['date']}: {about['command']}",
    ]
    if about["environment"]:
        lines.append("environment: " + ", ".join(f"{k}={v}" for k, v in about["environment"].items()))
    if limits := about.get("ceilings"):
        lines.append(
            f"ceilings: reads {limits['read_gb_per_s']:.1f} GB/s (sum over {limits['read_bytes'] / 1024**2:.0f} MiB), "
            + (
                f"{limits['matmul_dtype']} {limits['matmul_gflop_per_s'] / 1e3:.0f} TFLOP/s "
                f"(torch.mm {limits['matmul_size']:.0f}^3)"
                if "matmul_size" in limits
                else f"float32 {limits['sgemm_gflop_per_s']:.0f} GFLOP/s (torch.mm {limits['sgemm_size']:.0f}^3)"
            )
        )
    return [*lines, SPEEDS, *(f"note: {note}" for note in about.get("notes", []))]


def write_json(path: Path, data: Mapping[str, Any], rescue: bool = True) -> None:
    """Writes JSON atomically; with `rescue` to a temporary file if that fails."""
    (write_or_rescue if rescue else write_whole)(path, json_text(data) + "\n")


def json_text(data: Any, width: int = 200, indent: int = 0) -> str:
    """JSON in which every list and object that fits on a line of `width` stands on one, and so do values of a longer
    object that follow each other and are no lists or objects: records stay short.

    >>> print(json_text({"device": "cpu", "rows": [{"ms": 1.5}, {"ms": 2.5}]}, width=24))
    {
     "device": "cpu",
     "rows": [
      {"ms": 1.5},
      {"ms": 2.5}
     ]
    }
    >>> print(json_text({"a": 1, "b": 2, "rows": ["x" * 9] * 2}, width=24))
    {
     "a": 1, "b": 2,
     "rows": [
      "xxxxxxxxx",
      "xxxxxxxxx"
     ]
    }
    """
    line = json.dumps(data, allow_nan=False)
    if indent + len(line) <= width or not data or not isinstance(data, dict | list | tuple):
        return line
    start, deeper = "\n" + " " * (indent + 1), indent + 1
    if isinstance(data, Mapping):
        inside: list[str] = []
        last = False  # whether the last line may take another value
        for key, value in data.items():
            text, plain = (
                f"{json.dumps(str(key))}: {json_text(value, width, deeper)}",
                not isinstance(value, dict | list),
            )
            if plain and last and deeper + len(inside[-1]) + len(text) + 2 <= width:
                inside[-1] += f", {text}"
            else:
                inside.append(text)
            last = plain
    else:
        inside = [json_text(value, width, deeper) for value in data]
    left, right = "{}" if isinstance(data, Mapping) else "[]"
    return f"{left}{start}{(',' + start).join(inside)}\n{' ' * indent}{right}"


def printable(text: str) -> str:
    """A text with "?" for control characters and for bytes that are not UTF-8.

    >>> printable("a\\x1b[31mb\\udcff")
    'a?[31mb?'
    """
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """A table with aligned columns; the first line is the header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return [text[0], "-" * max(map(len, text)), *text[1:]]


def ratio_text(ratio: float, is_share: bool) -> str:
    return f"{ratio:.0%}" if is_share else f"{ratio:.3g}x" if ratio >= 10 else f"{ratio:.2f}x"


def left_text(done: int, of: int, seconds: float) -> str:
    """The estimated time left; empty at the end.

    >>> left_text(2, 8, 30.0), left_text(1, 100, 4.0), left_text(8, 8, 99.0)
    (', about 90 s left', ', about 7 min left', '')
    """
    left = seconds / done * (of - done) if done else 0.0
    return f", about {rough_time(left)} left" if left else ""


def rough_time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def time_text(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
