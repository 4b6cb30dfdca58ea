"""Prebuilt kernels of a release: objects for the CPUs of `targets.py`, files of the package.

`tools/prebuilt_kernels.py` writes them while a wheel is built. A file is used if it is for a CPU with the same
features, and if its digest matches its contents, this version, these sources and its target. Others are compiled.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path

from ... import __version__
from .gemm import amx
from .isa import cpu_features, machine
from .kernel_cache import checked, describe, header, sources, warn
from .linker import Kernel, link
from .targets import TARGETS, matching

FOLDER = Path(__file__).parent / "prebuilt"


@cache
def target() -> str | None:
    """The target of this process, if the package has its kernels."""
    if sys.platform != "linux" or not FOLDER.is_dir():  # other systems have other calling conventions
        return None
    hidden = set() if amx.usable() else {"amx-tile", "amx-bf16"}  # the system may deny AMX tiles
    name = matching(machine(), cpu_features() - hidden)
    return name if name is not None and (FOLDER / name).is_dir() else None


def key(name: str, target: str) -> bytes:
    """The key of a file."""
    what = __version__, sources(), target, TARGETS[target].cpu, sorted(TARGETS[target].features), name
    return hashlib.sha256(repr(what).encode()).digest()


def load(name: str) -> Kernel | None:
    """A kernel of the package; None if there is none for this CPU."""
    available = target()
    if available is None:
        return None
    file = FOLDER / available / f"{name}.o"
    try:
        return link(checked(file.read_bytes(), key(name, available)), name)
    except Exception as error:  # whatever is wrong, the kernel can be compiled
        warn(error, f"{file} cannot be used ({describe(error)}): compiling its kernel")
        return None


def write(folder: Path, name: str, target: str, code: bytes) -> None:
    """Writes a kernel to where `load` looks for it, if `folder` is the package's."""
    (folder / target).mkdir(parents=True, exist_ok=True)
    (folder / target / f"{name}.o").write_bytes(header(key(name, target), code) + code)
