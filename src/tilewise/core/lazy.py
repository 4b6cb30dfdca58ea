"""Modules that are imported on first use."""

import importlib
from collections.abc import Callable
from types import ModuleType


def modules(package: str, *names: str) -> Callable[[str], ModuleType]:
    """A `__getattr__` for a package: `package.name` imports that submodule, if it is one of `names`."""

    def load(name: str) -> ModuleType:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    return load
