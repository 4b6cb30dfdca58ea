"""Modules that are loaded when they are first named."""

import importlib
from collections.abc import Callable
from types import ModuleType


def modules(package: str, *names: str) -> Callable[[str], ModuleType]:
    """A package's `__getattr__`: `package.name` imports the module, of those named, that nobody has imported yet."""

    def load(name: str) -> ModuleType:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    return load
