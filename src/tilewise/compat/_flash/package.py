"""tilewise as an installed flash-attn to programs that look for the package: metadata, and transformers' checks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ..replaced import Replaced

VERSION = "2.8.3+tilewise"  # the version of the interface
NAMES = {"flash-attn", "flash_attn"}
UTILITIES = "transformers.modeling_flash_attention_utils"
CHECK = "is_flash_attn_2_available"

_undo: list[Callable[[], None]] = []


class _Package(Distribution):
    """What `importlib.metadata` finds."""

    def read_text(self, filename: str) -> str | None:
        if filename in ("METADATA", "PKG-INFO"):
            return f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n"
        return "flash_attn\nflash_attn_interface\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


class Packages(DistributionFinder):
    """A finder of that package and of no module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Iterator[Any]:  # noqa: B008
        if context.name is None or context.name in NAMES:
            yield _Package()


PACKAGES = Packages()


def show() -> None:
    sys.meta_path.append(PACKAGES)
    tell_transformers()


def hide() -> None:
    if PACKAGES in sys.meta_path:
        sys.meta_path.remove(PACKAGES)
    while _undo:
        _undo.pop()()


def tell_transformers() -> None:
    """Lets `attn_implementation="flash_attention_2"` run where there is no GPU, if transformers is imported and this
    package is shown. transformers asks for CUDA before it looks for the package.
    """
    utilities: Any = sys.modules.get(UTILITIES)
    if PACKAGES not in sys.meta_path or utilities is None or _undo:
        return
    found = Replaced(sys.modules["transformers.utils.import_utils"], CHECK)
    entry = utilities.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    before = dict(entry)
    found.put({CHECK: _yes})
    devices = (*entry["supported_devices"], *((_yes, name) for name in ("cpu", "mps")))
    entry.update(general_availability_check=_yes, supported_devices=devices)
    _undo.extend((lambda: entry.update(before), lambda: found.put(found.originals)))


def _yes(*_: Any, **__: Any) -> bool:
    return True
