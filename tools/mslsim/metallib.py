"""Kernels compiled by Apple's own compiler: MLX's wheel for macOS holds a library of them (AIR, LLVM's bitcode) beside
the MSL texts that they were compiled from.

The wheel is downloaded by pip, into the simulator's cache, and read there; nothing of it is installed or kept in a
repository.
"""

import re
import struct
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

from mslsim.build import cache_folder

WHEEL = "mlx-metal==0.32.4"
LIBRARY, HEADERS = "mlx/lib/mlx.metallib", "mlx/include/"
_WRAPPER = 0x0B17C0DE


@cache
def wheel() -> Path | str:
    """The wheel's file, or why it cannot be had."""
    folder = cache_folder() / WHEEL.replace("==", "-")
    found = sorted(folder.glob("*.whl"))
    if found:
        return found[0]
    asked = ("-q", "--no-deps", "--only-binary=:all:", "--python-version=3.12", "--platform=macosx_14_0_arm64")
    command = [sys.executable, "-m", "pip", "download", *asked, f"--dest={folder}", WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{WHEEL} was not downloaded: {error}"
    found = sorted(folder.glob("*.whl"))
    return found[0] if found else f"{WHEEL} was not downloaded: {(done.stderr.strip().splitlines() or ['?'])[-1]}"


def header(name: str) -> str:
    """The text of a header, by the path that MLX's own texts include it by."""
    with zipfile.ZipFile(_wheel()) as archive:
        return archive.read(HEADERS + name).decode()


def _wheel() -> Path:
    path = wheel()
    if isinstance(path, str):
        raise RuntimeError(path)
    return path


class Metallib:
    """A library of compiled kernels: their names, and the bitcode of each."""

    def __init__(self, data: bytes) -> None:
        if data[:4] != b"MTLB":
            raise ValueError("not a library of Metal's")
        self._data = data
        functions, self._code = struct.unpack_from("<Q", data, 24)[0], struct.unpack_from("<Q", data, 72)[0]
        self._entries: dict[str, tuple[int, int]] = {}
        at = functions + 4
        for _ in range(struct.unpack_from("<I", data, functions)[0]):
            tags = dict(self._tags(at + 4))
            offset, size = struct.unpack("<3Q", tags[b"OFFT"])[2], struct.unpack("<Q", tags[b"MDSZ"])[0]
            self._entries[tags[b"NAME"].rstrip(b"\0").decode()] = offset, size
            at += struct.unpack_from("<I", data, at)[0]

    def _tags(self, at: int):  # type: ignore[no-untyped-def]
        while self._data[at : at + 4] != b"ENDT":
            size = struct.unpack_from("<H", self._data, at + 4)[0]
            yield self._data[at : at + 4], self._data[at + 6 : at + 6 + size]
            at += 6 + size

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._entries)

    def bitcode(self, name: str) -> bytes:
        offset, size = self._entries[name]
        wrapped = self._data[self._code + offset : self._code + offset + size]
        magic, _, start, length = struct.unpack_from("<4I", wrapped)
        if magic != _WRAPPER:
            raise ValueError(f"{name}: its code is not wrapped bitcode")
        return wrapped[start : start + length]


@cache
def mlx() -> Metallib:
    """MLX's kernels."""
    with zipfile.ZipFile(_wheel()) as archive:
        return Metallib(archive.read(LIBRARY))


# MLX's own helpers, which use its compiler's insides; what kernels of attention take of them is this.
_UTILITIES = """
#include <metal_stdlib>
using namespace metal;
#define METAL_FUNC inline
#define STEEL_CONST static constant constexpr const
#define STEEL_PRAGMA_UNROLL
#define STEEL_PRAGMA_NO_UNROLL
typedef bfloat bfloat16_t;
typedef half float16_t;
template <typename U> struct Limits;
template <> struct Limits<float> {
  static constexpr float finite_max = 3.402823466e+38f, finite_min = -3.402823466e+38f;
  static constexpr float max = __builtin_inff(), min = -__builtin_inff();
};
template <> struct Limits<half> { static constexpr float finite_min = -65504.0f; };
template <> struct Limits<bfloat> { static constexpr float finite_min = -3.38953139e+38f; };
"""
_LEFT_OUT = ("utils.h", "bf16.h", "bf16_math.h", "complex.h", "logging.h", "defines.h")


def text_of(name: str, constants: dict[str, int]) -> str:
    """A header with all that it includes, each once, as one text; function constants have the given values, or 0."""
    seen = {f"mlx/backend/metal/kernels/{left_out}" for left_out in (*_LEFT_OUT, "steel/defines.h")}

    def whole(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        lines = []
        for line in header(name).splitlines():
            included = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            lines.append(whole(included[1]) if included else "" if re.match(r"\s*#\s*pragma once", line) else line)
        return "\n".join(lines)

    # One address space here: a template's versions for the others would be the same one again.
    again = r"template <typename T>\s*struct \w+<(?:device|threadgroup) T\*> \{[^{}]*\};"
    declared = r"\bconstant\s+(\w+)\s+(\w+)\s*\[\[\s*function_constant\(\d+\)\s*\]\]\s*;"
    text = re.sub(again, "", whole(name))
    text = re.sub(declared, lambda m: f"constant constexpr {m[1]} {m[2]} = {constants.get(m[2], 0)};", text)
    text = re.sub(r",\s*function_constant\(\w+\)", "", text)
    return _UTILITIES + text.encode("ascii", "replace").decode()
