"""Functions of another module that drop-ins replace: there, and in every module that has imported them from there."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..errors import InvalidArgument, Unsupported

REFUSALS = InvalidArgument, Unsupported


class Replaced:
    """Functions of `home` by their names there. `originals` are those that it had when this was made."""

    def __init__(self, home: ModuleType, *names: str) -> None:
        self.home = home
        self.originals: dict[str, Callable[..., Any]] = {name: getattr(home, name) for name in names}
        self._stood = {name: [original] for name, original in self.originals.items()}  # what was there at some time
        self._searched: dict[str, tuple[int, int]] = {}  # modules by name, with the id and length of their dicts then
        self._holders: dict[str, dict[str, str]] = {}  # modules, and the names by which they have had an original

    def now(self) -> dict[str, Callable[..., Any]]:
        return {name: getattr(self.home, name) for name in self.originals}

    def put(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Sets functions, by their names in `home`, there and in modules that have imported the originals."""
        for name, function in functions.items():
            setattr(self.home, name, function)
            if not any(function is x for x in self._stood[name]):
                self._stood[name].append(function)
        if any(function is not self.originals[name] for name, function in functions.items()):
            for key, module in list(sys.modules.items()):
                if isinstance(module, ModuleType) and self._searched.get(key) != (mark := _mark(module)):
                    self._searched[key] = mark
                    self.search(key, vars(module))
        for key, found in self._holders.items():
            held = vars(sys.modules[key]) if key in sys.modules else {}
            for name, original in found.items():
                if original in functions and any(held.get(name) is x for x in self._stood[original]):
                    held[name] = functions[original]

    def search(self, key: str, names: dict[str, Any]) -> None:
        """Finds originals in a module. All modules take 20 ms, so it is done again only where names were added."""
        if key.partition(".")[0] in ("torch", "tilewise"):
            return
        for name, x in list(names.items()):
            for original, function in self.originals.items():
                if x is function:
                    self._holders.setdefault(key, {})[name] = original


def _mark(module: ModuleType) -> tuple[int, int]:
    """It changes when names are added to a module."""
    return id(vars(module)), len(vars(module))


def count(fallbacks: Counter[str], refusal: Exception) -> None:
    """Counts a call that torch serves, by the refused argument, and warns of the first one."""
    if not fallbacks:
        warnings.warn(
            f"falling back to torch (further fallbacks are not reported; see `fallbacks`): {refusal}", stacklevel=3
        )
    fallbacks[getattr(refusal, "argument", type(refusal).__name__)] += 1
