"""Registers tilewise with transformers, whichever of the two is imported first.

`import tilewise` does not import transformers. If transformers' model base module is loaded, tilewise registers at
once; else an import hook waits for it, at the cost of one comparison an import, and then removes itself. transformers
(as of 5.22) reads no entry points, so that a name in `attn_implementation=` can come in no other way.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..core.extras import install_line

OLDEST = (5, 22)  # older versions describe masks differently
MODELS = "transformers.modeling_utils"  # it has the registry of attention implementations


def watch() -> None:
    """Registers now, or when transformers' models are imported."""
    if MODELS in sys.modules:
        register()
    elif not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def register() -> None:
    """Registers tilewise, or warns that this transformers is too old."""
    try:
        if reason := too_old():
            warnings.warn(
                f"{reason}: attn_implementation='tilewise' is not available; {install_line('hf')}", stacklevel=2
            )
            return
        from . import transformers

        # It is missing while that module is importing these models; it registers at its own end.
        if hasattr(transformers, "register"):
            transformers.register()
            package = sys.modules.get(f"{__package__}._flash.package")
            if package is not None:  # of tilewise under flash-attn's name
                package.tell_transformers()
    except ImportError:
        return
    except Exception as error:  # a later transformers must stay importable whatever has changed
        warnings.warn(
            f"could not register attn_implementation='tilewise' with this transformers: {error!r}", stacklevel=2
        )


class Finder:
    """Import hook for one module: wraps its loader by one that then registers tilewise, and removes itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODELS:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Loader(spec.loader)  # type: ignore[assignment]
        return spec


class Loader:
    """Wraps a loader: registers tilewise after the module has run."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        register()


def too_old(version: str = "") -> str:
    """Why a version of transformers, or the imported one, is too old; empty if it is not."""
    version = version or sys.modules["transformers"].__version__
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    wanted = ".".join(map(str, OLDEST))
    return f"tilewise.compat.transformers needs transformers {wanted} or newer, not {version}" * (numbers < OLDEST)
